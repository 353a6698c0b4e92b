"""Which samples each worker holds: ragged rows over one shared pool."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Shards:
    """The samples of W workers. Worker w owns the entries ``offsets[w]:offsets[w + 1]`` of ``index`` and ``y``.

    Its tensors must not change: engines keep copies of them. Other samples are other shards, in new tensors.
    """

    x: Tensor
    """The pool [samples, ...], shared and never copied."""
    index: Tensor
    """Rows of the pool, [entries] int64."""
    y: Tensor
    """Targets as the worker itself names them, [entries] (int64 labels, or floats for regression)."""
    offsets: tuple[int, ...]
    """W + 1 ascending positions."""
    weight: Tensor | None = None
    """Evaluation weights [entries]; None: every sample counts once."""

    @property
    def num_workers(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Samples per worker."""
        return tuple(b - a for a, b in pairwise(self.offsets))

    def rows(self, worker: int) -> slice:
        """Where worker w's entries stand."""
        return slice(self.offsets[worker], self.offsets[worker + 1])

    def take(self, workers: Sequence[int]) -> "Shards":
        """The shards of some workers, in the order given."""
        keep = [torch.arange(self.offsets[w], self.offsets[w + 1]) for w in workers]
        entries = torch.cat(keep) if keep else torch.empty(0, dtype=torch.int64)
        offsets = tuple(accumulate(map(len, keep), initial=0))
        weight = None if self.weight is None else self.weight[entries]
        return Shards(self.x, self.index[entries], self.y[entries], offsets, weight)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Shards":
        """The same shards with float tensors in ``dtype``, all on ``device``."""

        def move(t: Tensor) -> Tensor:
            return t.to(device, dtype) if t.is_floating_point() else t.to(device)

        weight = None if self.weight is None else move(self.weight)
        return Shards(move(self.x), self.index.to(device), move(self.y), self.offsets, weight)
