"""What an engine works on: the net, the hosted workers' samples, and how a score is taken."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from manyheads.data.shards import Shards
from manyheads.engine.batches import Source
from manyheads.engine.phase import Loss
from manyheads.models.dropout import dropouts
from manyheads.models.split import Split

_LARGEST_GROWTH = 4
_ALWAYS_CACHED = 1 << 26
"""Features of so many numbers are cached in any case."""

Transform = Callable[[Tensor, np.random.Generator], Tensor]
"""(inputs [batch, ...], generator) -> inputs [batch, ...]: a random change of the inputs at training time."""


@dataclass(frozen=True)
class Workload:
    """Everything about local training that stays the same over a whole run."""

    model: Split
    train: Shards
    ids: tuple[int, ...]
    """The hosted workers' ids, in the order of their rows."""
    source: Source
    loss: Loss
    metric: Loss
    transform: Transform | None = None

    def __post_init__(self) -> None:
        # Numbered once for the whole net, so that a part that an engine cuts off draws the same masks.
        for number, layer in enumerate(dropouts(self.model).values()):
            layer.number = number

    def worth_caching(self, num_features: int) -> bool:
        """Whether so many features per train sample do not take far more memory than the samples themselves."""
        room = max(_LARGEST_GROWTH * self.train.x.numel(), _ALWAYS_CACHED)
        return num_features * len(self.train.index) <= room


def sums_of(scores: Sequence[Loss], output: Tensor, y: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Each score of outputs [samples, ...] summed along the last axis of their weights, and these, [1 + scores, ...].

    ``weight``: [samples], or [workers, samples] of workers whose outputs follow each other; outputs beyond those are
    left out. It is 0 for padding, which may have a score that is infinite or NaN, and times 0 that would be NaN.
    """
    found = [score(output, y)[: weight.numel()].view(weight.shape) for score in scores]
    weighted = [(each * weight).masked_fill(weight == 0, 0) for each in found]
    return torch.stack([*weighted, weight]).sum(-1, dtype=dtype)
