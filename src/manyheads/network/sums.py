"""Sums over workers' rows, always in ascending order of the workers: networks that share them agree to the bit."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from manyheads import host_memory
from manyheads.threads import by_rows
from manyheads.topology import Rows
from manyheads.tree import Params


@dataclass(frozen=True)
class LeafRows:
    """The rows of one leaf that a process has: those of its own workers, and those that it was sent."""

    hosted: Tensor
    """[W, ...]."""
    workers: range
    """Whose rows ``hosted`` are."""
    received: Mapping[int, Tensor] = field(default_factory=dict)
    """Worker -> its row [...]."""

    def __getitem__(self, worker: int) -> Tensor:
        return self.hosted[worker - self.workers.start] if worker in self.workers else self.received[worker]

    def to(self, dtype: torch.dtype) -> "LeafRows":
        received = {worker: row.to(dtype) for worker, row in self.received.items()}
        return LeafRows(self.hosted.to(dtype), self.workers, received)

    def part(self, part: slice) -> "LeafRows":
        """Of every row x the numbers ``x.unsqueeze(-1)[part]``."""
        received = {worker: row.unsqueeze(-1)[part] for worker, row in self.received.items()}
        return LeafRows(self.hosted.unsqueeze(-1)[:, part], self.workers, received)


def leaf_rows(
    leaves: Params, workers: range, received: Mapping[int, Mapping[str, Tensor]] | None = None
) -> dict[str, LeafRows]:
    """The rows of every leaf [W, ...] of ``workers``, beside those ``received``, worker -> its row of every leaf."""
    others = received or {}
    return {
        name: LeafRows(leaf, workers, {worker: row[name] for worker, row in others.items()})
        for name, leaf in leaves.items()
    }


def mix_rows(leaves: Mapping[str, LeafRows], masks: Mapping[str, LeafRows], matrix: Rows) -> Params:
    """P applied to the hosted rows of every leaf; a masked weight is averaged over those who keep it."""
    mix = _Mixer(matrix)
    mixed: Params = {}
    for name, leaf in leaves.items():
        mixed[name] = mix(leaf)
        if name in masks:
            mixed[name] = divided(mixed[name], mix(masks[name].to(leaf.hosted.dtype)))
    return mixed


def divided(total: Tensor, kept: Tensor) -> Tensor:
    """sum_j P_ij x_j / sum_j P_ij m_j, and 0 where nobody has the weight; in the memory of ``total``."""
    # With an axis more, a single number can be sliced as well.
    numerators, denominators = total.unsqueeze(-1), kept.unsqueeze(-1)

    def divide(part: slice) -> None:
        numerators[part].div_(denominators[part]).masked_fill_(denominators[part] == 0, 0)

    by_rows(divide, numerators)
    return total


def add_rows(total: Tensor, rows: LeafRows, columns: np.ndarray, weights: np.ndarray) -> Tensor:
    """Add sum_j w_j x_j to ``total`` [...], in place and one row after another."""
    for worker, weight in zip(columns.tolist(), weights.tolist(), strict=True):
        total.add_(rows[worker], alpha=weight)
    return total


def _sum_rows(total: Tensor, rows: LeafRows, columns: np.ndarray, weights: np.ndarray) -> Tensor:
    """The same, with the numbers of the sum shared by the threads of the run."""
    parts = total.unsqueeze(-1)
    by_rows(lambda part: add_rows(parts[part], rows.part(part), columns, weights), parts)
    return total


def for_all(row: Tensor, leaf: Tensor) -> Tensor:
    """The same row [...] for every worker of a leaf [W, ...], copied."""
    copies = host_memory.empty_like(leaf)
    by_rows(lambda rows: copies[rows].copy_(row), copies)
    return copies


def add_hosted(total: Tensor, rows: LeafRows, weights: np.ndarray | None) -> Tensor:
    """Add the hosted rows to ``total`` [...], in place, each times its worker's weight [N] (None: 1)."""
    hosted = np.arange(rows.workers.start, rows.workers.stop)
    if rows.hosted.device.type == "cpu":
        share = np.ones(len(hosted)) if weights is None else weights[hosted]
        return _sum_rows(total, rows, hosted[share != 0], share[share != 0])
    if weights is None:
        return total.add_(rows.hosted.sum(0, dtype=total.dtype))
    share = torch.from_numpy(weights[hosted]).to(rows.hosted)
    return total.add_(torch.tensordot(share, rows.hosted, 1))


def common_row(matrix: Rows) -> np.ndarray | None:
    """The weights [N] that all rows of P share, as on the full graph; None: they differ."""
    num_workers = matrix.num_workers
    if len(matrix.columns) != num_workers**2:
        return None
    table = matrix.weights.reshape(num_workers, num_workers)
    return table[0] if (table == table[0]).all() else None


class _Mixer:
    """P of one round, applied to one leaf after another."""

    def __init__(self, matrix: Rows) -> None:
        self.matrix, self._common = matrix, common_row(matrix)
        self._dense: dict[torch.dtype, Tensor] = {}

    def __call__(self, leaf: LeafRows) -> Tensor:
        return self._sums(leaf) if leaf.hosted.device.type == "cpu" else self._product(leaf)

    def _sums(self, leaf: LeafRows) -> Tensor:
        matrix, common = self.matrix, self._common
        if common is not None:
            heard = np.flatnonzero(common)
            return for_all(_sum_rows(torch.zeros_like(leaf.hosted[0]), leaf, heard, common[heard]), leaf.hosted)
        mixed = host_memory.empty_like(leaf.hosted)

        def add(rows: slice) -> None:
            for worker, row in zip(leaf.workers[rows], mixed[rows], strict=True):
                here = slice(matrix.offsets[worker], matrix.offsets[worker + 1])
                heard = matrix.weights[here] != 0
                add_rows(row.zero_(), leaf, matrix.columns[here][heard], matrix.weights[here][heard])

        by_rows(add, mixed)
        return mixed

    def _product(self, leaf: LeafRows) -> Tensor:
        """The same as one product, whose order of summation is up to the device."""
        dtype, here = leaf.hosted.dtype, slice(leaf.workers.start, leaf.workers.stop)
        if dtype not in self._dense:
            self._dense[dtype] = torch.from_numpy(self.matrix.dense()[here]).to(leaf.hosted)
        dense = self._dense[dtype]
        mixed = dense[:, here] @ leaf.hosted.reshape(len(leaf.hosted), -1)
        if leaf.received:
            received = torch.stack(list(leaf.received.values()))
            mixed.addmm_(dense[:, list(leaf.received)], received.view(len(received), -1))
        return mixed.view_as(leaf.hosted)
