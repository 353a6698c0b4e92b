"""The mean of the workers' tensors and how far they lie from it, over any number of processes."""

from math import nan
from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.algorithms.phases import REPRESENTATION
from manyheads.network.base import Network
from manyheads.threads import by_rows
from manyheads.tree import Params, flatten, select

COLUMNS = 1 << 14
"""Numbers of a row that are converted to double precision at a time: no leaf is ever copied as a whole, and no sum is
long enough for torch to split it over threads, whose number would then change the last bits."""


class Spread(NamedTuple):
    """Two numbers about vectors x_i, one for each worker."""

    square_of_mean: float
    """|xbar|^2."""
    variance: float
    """(1/N) sum_i |x_i - xbar|^2."""

    @property
    def relative(self) -> float:
        """The variance over |xbar|^2; not a number where that is zero."""
        return self.variance / self.square_of_mean if self.square_of_mean else nan

    @property
    def mean_square(self) -> float:
        """(1/N) sum_i |x_i|^2."""
        return self.square_of_mean + self.variance


def spread(params: Params, network: Network) -> Spread:
    """The spread of the workers' rows, all leaves [W, ...] of all processes side by side, in double precision."""
    mean = network.mean(params)
    squares = torch.zeros(len(network.workers), dtype=torch.float64)
    square_of_mean = 0.0
    for name, leaf in params.items():
        squares += _square_distances(leaf, mean[name]).cpu()
        square_of_mean += float(square_norms(mean[name].unsqueeze(0)))
    return Spread(square_of_mean, float(network.gather(squares).nanmean()))


def consensus(params: Params, network: Network) -> Spread:
    """The spread of the representations [W, ...] of all processes; its variance is the consensus error."""
    return spread(select(params, REPRESENTATION), network)


def square_norms(leaf: Tensor) -> Tensor:
    """|x_i|^2 of rows [W, ...], [W] in double precision."""
    return _square_distances(leaf, torch.zeros_like(leaf[0]))


def _square_distances(leaf: Tensor, point: Tensor) -> Tensor:
    """|x_i - p|^2 of rows [W, ...] from a point [...], [W]; a row's bits are its own, whatever rows are beside it."""

    def sums(rows: slice) -> Tensor:
        total = torch.zeros(rows.stop - rows.start, dtype=torch.float64, device=leaf.device)
        blocks = zip(flatten(leaf[rows]).split(COLUMNS, dim=1), point.flatten().split(COLUMNS), strict=True)
        for block, middle in blocks:
            # In place, on one copy: memory for more of them would cost more than the arithmetic.
            total += block.to(torch.float64, copy=True).sub_(middle).square_().sum(1)
        return total

    return torch.cat(by_rows(sums, leaf))
