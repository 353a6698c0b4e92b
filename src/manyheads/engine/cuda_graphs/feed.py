"""What recorded steps read, all in device memory: the samples, and for every step which of them are its batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_SPARE = 4
"""Rows beyond the last: making a recording runs a few steps from the first row on, perhaps more than a phase has."""


class Pool:
    """Samples that recorded steps gather from; images can be stored channels-last."""

    def __init__(self, x: Tensor, *, channels_last: bool) -> None:
        """``x`` [samples, ...] is kept as it is, or copied if it needs another layout.

        Samples that change later, such as features, must therefore have that layout: a copy would not follow them.
        """
        self.images = channels_last and x.ndim == 4
        self.x = x.permute(0, 2, 3, 1).contiguous() if self.images else x

    def take(self, rows: Tensor) -> Tensor:
        """Rows [n] -> samples [n, ...]."""
        taken = self.x.index_select(0, rows)
        return taken.permute(0, 3, 1, 2) if self.images else taken


@dataclass(frozen=True)
class Entries:
    """The row of the pool and the target that belong to every entry of the shards."""

    pool: Pool
    rows: Tensor | None
    """[entries]; None: entry i is row i."""
    y: Tensor
    """[entries, ...]."""

    def look_up(self, entries: Tensor) -> dict[str, Tensor]:
        """Entries [...] -> ``rows`` of the pool [...] and targets ``y`` [..., ...]."""
        return {"rows": entries if self.rows is None else self.rows[entries], "y": self.y[entries]}

    def like(self, *shape: int) -> "Shapes":
        """The shapes and types of ``rows`` and ``y`` for entries of this shape."""
        return {"rows": (shape, torch.int64), "y": ((*shape, *self.y.shape[1:]), self.y.dtype)}


Shapes = Mapping[str, tuple[Sequence[int], torch.dtype]]
"""Each tensor's shape in one step, and its type."""


class Feed:
    """Tensors with one row per step, filled before the steps run; a recording reads the row at its cursor."""

    def __init__(self, capacity: int, shapes: Shapes, device: torch.device) -> None:
        self.tensors = {
            name: torch.zeros(capacity + _SPARE, *shape, dtype=dtype, device=device)
            for name, (shape, dtype) in shapes.items()
        }

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Values [steps, ...], by name."""
        for name, value in values.items():
            self.tensors[name][: len(value)].copy_(value)

    def read(self, cursor: Tensor) -> dict[str, Tensor]:
        """Every tensor's row at the cursor [1]."""
        return {name: tensor.index_select(0, cursor)[0] for name, tensor in self.tensors.items()}


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """A host array on the device; on a GPU through pinned memory, so that the host does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
