"""All workers in one process: mixing is arithmetic on their rows."""

import numpy as np
import torch
from torch import Tensor

from manyheads.network.base import Traffic, message_bytes, refuse_private
from manyheads.topology import Mixing, Rows
from manyheads.tree import Params


class InProcess:
    """The network of a simulation."""

    def __init__(self, mixing: Mixing, private: frozenset[str]) -> None:
        self.mixing, self.private = mixing, private
        self.num_workers = mixing.num_workers
        self.workers = range(self.num_workers)
        self.traffic = Traffic(self.num_workers)

    def mix(self, params: Params, round: int, mask: Params | None = None) -> Params:
        refuse_private(params, self.private)
        rows = self.mixing.rows(round)
        sizes = message_bytes(params, mask)
        receivers = np.repeat(np.arange(self.num_workers), np.diff(rows.offsets))
        links = (receivers != rows.columns) & (rows.weights != 0)
        np.add.at(self.traffic.sent, rows.columns[links], sizes[rows.columns[links]])
        np.add.at(self.traffic.received, receivers[links], sizes[rows.columns[links]])
        return {name: mix_leaf(leaf, rows, None if mask is None else mask.get(name)) for name, leaf in params.items()}

    def average(self, params: Params, weights: np.ndarray) -> Params:
        refuse_private(params, self.private)
        taking_part = weights > 0
        sizes = message_bytes(params, None)
        self.traffic.sent += np.where(taking_part, sizes, 0)
        self.traffic.received += np.where(taking_part, sizes, 0)
        share = weights / weights.sum()
        return {
            name: neighbour_sum(leaf, np.flatnonzero(taking_part), share[taking_part]).expand_as(leaf).clone()
            for name, leaf in params.items()
        }

    def gather(self, values: Tensor) -> Tensor:
        return values

    def present(self, round: int) -> np.ndarray:
        return self.mixing.rows(round).present


def neighbour_sum(leaf: Tensor, columns: np.ndarray, weights: np.ndarray) -> Tensor:
    """sum_j w_j x_j over rows of ``leaf`` [N, ...] in ascending j, so that any number of processes gives the same bits."""
    total = torch.zeros_like(leaf[0])
    for j, weight in zip(columns.tolist(), weights.tolist(), strict=True):
        total.add_(leaf[j], alpha=weight)
    return total


def mix_leaf(leaf: Tensor, rows: Rows, mask: Tensor | None) -> Tensor:
    """P applied to one leaf [N, ...]; under a mask each weight is averaged over those who have it."""
    if mask is not None:
        kept = mix_leaf(mask.to(leaf.dtype), rows, None)
        total = mix_leaf(leaf, rows, None)
        return torch.where(kept > 0, total / kept, torch.zeros_like(total))
    if leaf.device.type != "cpu":
        dense = torch.from_numpy(rows.dense()).to(leaf.device, leaf.dtype)
        return (dense @ leaf.flatten(1)).view_as(leaf)
    mixed = torch.empty_like(leaf)
    done: dict[tuple[bytes, bytes], int] = {}
    for i in range(len(leaf)):
        here = slice(rows.offsets[i], rows.offsets[i + 1])
        columns, weights = rows.columns[here], rows.weights[here]
        # Rows of P that are equal have equal results: on the full graph one sum serves all.
        same = done.setdefault((columns.tobytes(), weights.tobytes()), i)
        mixed[i] = mixed[same] if same != i else neighbour_sum(leaf, columns, weights)
    return mixed
