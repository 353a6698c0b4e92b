"""Masks that keep a layer's weights with the largest scores, the same ones on every device."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from manyheads.randomness import hashed, key
from manyheads.threads import by_rows
from manyheads.tree import flatten

Scores = Callable[[slice], Tensor]
"""Some workers -> a score for each of their weights, [rows, n]. None is negative but -1, which excludes a weight."""

_AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 28}
"""Scores that are ranked together: as many as stay in a core's cache, or as fill a GPU."""
_NOT_NEGATIVE = (1 << 63) - 1


def mask_of(leaf: Tensor, choose: Callable[[slice], Tensor]) -> Tensor:
    """A mask for a leaf [W, ...], uint8, of what ``choose`` keeps of some workers' weights, [rows, n] bool.

    It is asked for some workers at a time: the scores of all may fit neither into a cache nor into a GPU.
    """
    # Contiguous, so that ``flatten`` gives a view that can be filled.
    mask = torch.empty(leaf.shape, dtype=torch.uint8, device=leaf.device)
    at_once = max(1, _AT_ONCE[leaf.device.type] // max(1, leaf[0].numel()))

    def fill(part: slice) -> None:
        for start in range(part.start, part.stop, at_once):
            rows = slice(start, min(start + at_once, part.stop))
            flatten(mask)[rows] = choose(rows)

    by_rows(fill, mask)
    return mask


def largest(scores: Tensor, count: int) -> Tensor:
    """Where each row's ``count`` largest scores are: [W, n] -> [W, n] bool. The only negative score is -1.

    Of equal scores the first ones are taken, on every device: many gradients are exactly 0.
    """
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    return by_halving(scores, count) if scores.device.type == "cpu" else by_selection(scores, count)


def by_halving(scores: Tensor, count: int) -> Tensor:
    """Find each row's threshold by bisection: on a core, counting the scores above one is faster than sorting."""
    # Read as integers, the bits of such scores have the same order, and bisection comes to an end.
    keys = scores.view(torch.int32 if scores.dtype.itemsize == 4 else torch.int64).numpy()
    chosen = np.empty(keys.shape, dtype=bool)
    for row, out in zip(keys, chosen, strict=True):
        low, high = int(row.min()), int(row.max()) + 1
        while high - low > 1:
            middle = (low + high) // 2
            above = np.count_nonzero(row >= middle)
            low, high = (middle if above >= count else low), (middle if above <= count else high)
        np.greater_equal(row, low, out=out)
        if excess := np.count_nonzero(out) - count:
            out[np.flatnonzero(row == low)[-excess:]] = False
    return torch.from_numpy(chosen)


def by_selection(scores: Tensor, count: int) -> Tensor:
    """All rows at once; not by kthvalue or a cumsum of each row, which leave a row to a single block of the GPU."""
    least = scores.topk(count, sorted=False).values.amin(1, keepdim=True)
    above, equal = scores > least, scores == least
    room = count - above.sum(1, keepdim=True)
    so_far = equal.flatten().cumsum(0).view_as(equal)
    in_rows_before = so_far[:, -1:] - equal.sum(1, keepdim=True)
    return above | (equal & (so_far <= in_rows_before + room))


def random_scores(leaf: Tensor, seed: int, ids: tuple[int, ...], rows: slice, *, round: int, stream: str) -> Tensor:
    """A random order of some workers' weights in one layer: int64 [rows, n], a function of the arguments."""
    keys = torch.tensor([key(seed, stream, worker=worker, round=round) for worker in ids[rows]], device=leaf.device)
    return hashed(keys, leaf[0].numel()) & _NOT_NEGATIVE
