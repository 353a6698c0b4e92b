"""Rows at fixed addresses: the weights of a few workers, in flat memory that recorded steps read and write."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from manyheads.engine.cuda_graphs.feed import upload
from manyheads.engine.phase import Phase
from manyheads.tree import Params

_ALIGNMENT = 64
"""Every leaf starts at a multiple of so many numbers: fast kernels load 16 bytes at once."""


class Layout:
    """Where each leaf lies in a flat row; convolution weights can be stored channels-last."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], *, channels_last: bool) -> None:
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.channels_last = channels_last
        self.offsets: dict[str, int] = {}
        self.size = 0
        for name, shape in self.shapes.items():
            self.offsets[name] = self.size
            self.size += -(-prod(shape) // _ALIGNMENT) * _ALIGNMENT

    def views(self, flat: Tensor) -> Params:
        """Flat rows [R, size] -> their leaves, each [R, *shape], in the same memory."""
        leaves = {}
        for name, shape in self.shapes.items():
            part = flat[:, self.offsets[name] : self.offsets[name] + prod(shape)]
            if self.channels_last and len(shape) == 4:
                out, channels, height, width = shape
                leaves[name] = part.view(len(flat), out, height, width, channels).permute(0, 1, 4, 2, 3)
            else:
                leaves[name] = part.view(len(flat), *shape)
        return leaves


@dataclass
class Part:
    """The leaves that nets read in one number format, side by side: every tensor is [R, numbers]."""

    layout: Layout
    weight: Tensor
    compute: Tensor
    """What forward and backward read: the weights themselves, or a copy of lower precision."""
    gradient: Tensor | None = None
    momentum: Tensor | None = None
    anchor: Tensor | None = None
    mask: Tensor | None = None

    def zero(self) -> None:
        """Start a phase: set the momentum to zero, and copy the weights if there is a copy of lower precision."""
        if self.momentum is not None:
            self.momentum.zero_()
        if self.compute is not self.weight:
            self.compute.copy_(self.weight)


@dataclass(frozen=True)
class Extras:
    """What a phase needs beside the weights that it moves."""

    gradient: bool
    momentum: bool
    anchor: bool
    mask: bool


@dataclass(frozen=True)
class Kind:
    """How many rows there are and how they lie."""

    num_rows: int
    device: torch.device
    dtype: torch.dtype
    channels_last: bool = False
    low: frozenset[str] = frozenset()
    """Leaves that forward and backward read in bf16."""


class FlatRows:
    """Leaves of a few workers, in one part for each number format that forward and backward read."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], kind: Kind, extras: Extras | None = None) -> None:
        """``extras`` None: the leaves never move, and only what forward and backward read is stored."""
        names = {
            torch.bfloat16: [n for n in shapes if n in kind.low],
            kind.dtype: [n for n in shapes if n not in kind.low],
        }
        self.parts = [_part({n: shapes[n] for n in own}, kind, dtype, extras) for dtype, own in names.items() if own]
        self.weight, self.compute, self.gradient, self.anchor, self.mask = (
            self._views(flat) for flat in ("weight", "compute", "gradient", "anchor", "mask")
        )

    def _views(self, flat: str) -> Params:
        flats = [(part.layout, getattr(part, flat)) for part in self.parts]
        return {name: view for layout, flat in flats if flat is not None for name, view in layout.views(flat).items()}

    def load(self, tree: Mapping[str, Tensor], rows: Sequence[int]) -> None:
        """Copy some workers' rows of ``tree`` [W, ...] here and start a phase on them."""
        load(self.weight, tree, rows)
        for part in self.parts:
            part.zero()

    def load_extras(self, phase: Phase, rows: Sequence[int]) -> None:
        """Copy some workers' rows of the phase's anchor and mask here."""
        load(self.anchor, phase.proximal[0] if phase.proximal else {}, rows)
        load(self.mask, phase.mask or {}, rows)


def _part(shapes: Mapping[str, Sequence[int]], kind: Kind, dtype: torch.dtype, extras: Extras | None) -> Part:
    """A part that forward and backward read in ``dtype``."""
    layout = Layout(shapes, channels_last=kind.channels_last)

    def room(dtype: torch.dtype) -> Tensor:
        return torch.zeros(kind.num_rows, layout.size, dtype=dtype, device=kind.device)

    if extras is None:
        weight = room(dtype)
        return Part(layout, weight, weight)
    weight = room(kind.dtype)
    return Part(
        layout,
        weight,
        weight if dtype == kind.dtype else room(dtype),
        room(dtype) if extras.gradient else None,
        room(kind.dtype) if extras.momentum else None,
        room(kind.dtype) if extras.anchor else None,
        torch.ones_like(weight) if extras.mask else None,
    )


def load(views: Mapping[str, Tensor], tree: Mapping[str, Tensor], rows: Sequence[int]) -> None:
    """views[name][:k] <- tree[name][rows], for the names that both have."""
    names = [name for name in views if name in tree]
    if len(rows) == 1:
        copy_all([views[name][0] for name in names], [tree[name][rows[0]] for name in names])
        return
    index = row_index(rows, tree)
    for name in names:
        views[name][: len(rows)].copy_(tree[name][index[tree[name].device]], non_blocking=True)


def store(views: Mapping[str, Tensor], tree: Mapping[str, Tensor], rows: Sequence[int]) -> None:
    """tree[name][rows] <- views[name][:k], for the names that both have."""
    names = [name for name in views if name in tree]
    if len(rows) == 1:
        copy_all([tree[name][rows[0]] for name in names], [views[name][0] for name in names])
        return
    index = row_index(rows, tree)
    for name in names:
        leaf = tree[name]
        leaf[index[leaf.device]] = views[name][: len(rows)].to(leaf.device, leaf.dtype)


def copy_all(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copy many tensors: those on one device with equal types and strides in one launch, the others one by one."""
    alike: dict[tuple[torch.dtype, torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.device != source.device and target.dtype != source.dtype:
            # What comes from the host is converted on the device.
            source = source.to(target.device, non_blocking=True)
        if target.device == source.device and target.stride() == source.stride():
            group = alike.setdefault((target.dtype, source.dtype, target.device), ([], []))
            group[0].append(target)
            group[1].append(source)
        else:
            target.copy_(source, non_blocking=True)
    for into, out_of in alike.values():
        torch._foreach_copy_(into, out_of)  # pyright: ignore[reportPrivateImportUsage]


def row_index(rows: Sequence[int], tree: Mapping[str, Tensor]) -> dict[torch.device, Tensor]:
    """Rows as an index, on every device that the tree has leaves on."""
    return {device: upload(np.array(rows), device) for device in {leaf.device for leaf in tree.values()}}
