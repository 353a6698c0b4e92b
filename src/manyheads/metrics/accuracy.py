"""One number out of every worker's score: mean, spread, worst tenth, mean over samples."""

from math import ceil

import torch
from torch import Tensor


def summarise(scores: Tensor, there: Tensor) -> tuple[float, float, float]:
    """Mean, population deviation and mean of the ceil(N/10) lowest of scores [N], of the workers ``there`` [N] bool."""
    kept = scores[there].to(torch.float64)
    if not len(kept):
        nan = float("nan")
        return nan, nan, nan
    lowest = kept.sort().values[: ceil(len(scores) / 10)]
    return float(kept.mean()), float(kept.std(correction=0)), float(lowest.mean())


def by_samples(scores: Tensor, counts: Tensor) -> float:
    """Mean of scores [N], each counted as often as its worker has samples [N]; NaN if nobody has any."""
    kept = counts > 0
    return float((scores[kept] * counts[kept]).sum() / counts[kept].sum())
