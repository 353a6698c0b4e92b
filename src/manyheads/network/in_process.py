"""All workers in one process: mixing is arithmetic on their rows."""

import numpy as np
import torch
from torch import Tensor

from manyheads.network.base import Traffic, check_gathered, links, message_bytes, refuse_private
from manyheads.network.sums import add_hosted, for_all, leaf_rows, mix_rows
from manyheads.topology import Mixing
from manyheads.tree import Params


class InProcess:
    """The network of a simulation."""

    def __init__(self, mixing: Mixing, private: frozenset[str]) -> None:
        self.mixing, self.private = mixing, private
        self.num_workers = mixing.num_workers
        self.workers = range(self.num_workers)
        self.traffic = Traffic(self.workers)
        self.may_gather_private = True

    def mix(self, params: Params, round: int, mask: Params | None = None) -> Params:
        refuse_private(params, self.private)
        if not params:
            return {}
        matrix = self.mixing.rows(round)
        self.traffic.count(*links(matrix), message_bytes(params, mask))
        return mix_rows(leaf_rows(params, self.workers), leaf_rows(mask or {}, self.workers), matrix)

    def average(self, params: Params, weights: np.ndarray) -> Params:
        refuse_private(params, self.private)
        if not params:
            return {}
        taking_part = np.flatnonzero(weights)
        self.traffic.count(taking_part, taking_part, message_bytes(params, None))
        share = weights / weights.sum()
        return {
            name: for_all(add_hosted(torch.zeros_like(rows.hosted[0]), rows, share), rows.hosted)
            for name, rows in leaf_rows(params, self.workers).items()
        }

    def gather(self, values: Tensor) -> Tensor:
        check_gathered(values)
        return values

    def mean(self, params: Params) -> Params:
        return {
            name: add_hosted(rows.hosted.new_zeros(rows.hosted.shape[1:], dtype=torch.float64), rows, None)
            .div_(self.num_workers)
            for name, rows in leaf_rows(params, self.workers).items()
        }  # fmt: skip

    def present(self, round: int) -> np.ndarray:
        return self.mixing.rows(round).present
