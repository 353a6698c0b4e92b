"""Which samples make up each mini-batch: a pure function of seed, worker, round and stream, alike for every engine."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import numpy as np
from torch import Tensor

from manyheads.engine.phase import Epochs, Phase, Steps
from manyheads.randomness import generator, key

_ODD = 0x9E3779B1
_MASK = (1 << 63) - 1


@dataclass(frozen=True)
class Source:
    """What fixes the order of a worker's samples besides worker, round and stream."""

    seed: int
    batch_size: int
    skip_single: bool
    """Leave out batches of one sample, as BatchNorm has no statistics for them; ``batch_size`` is then above 1."""

    def used(self, size: int) -> int:
        """How many of a worker's samples a pass takes: a batch of one, where left out, is always the last."""
        return size - (self.skip_single and size % self.batch_size == 1)


def num_batches(size: int, amount: Epochs | Steps, source: Source) -> int:
    """How many mini-batches a worker with ``size`` samples trains on."""
    per_pass = ceil(source.used(size) / source.batch_size)
    return amount.count * (per_pass if isinstance(amount, Epochs) else min(per_pass, 1))


class Passes:
    """The passes of a phase over the workers' samples: what ``generator(...).permutation(size)`` gives for each."""

    def __init__(self, phase: Phase, source: Source, round: int) -> None:
        self.amount, self.source, self.round = phase.amount, source, round
        # One generator, set to a new state for every pass: making one takes longer than drawing from it.
        self._rng = generator(source.seed, phase.stream)
        self._state = self._rng.bit_generator.state

    def __call__(self, size: int, worker: int) -> Iterator[np.ndarray]:
        """Positions in the shard of a worker with ``size`` samples, pass by pass, as far as its mini-batches go."""
        left, batch_size = num_batches(size, self.amount, self.source), self.source.batch_size
        used, epoch = self.source.used(size), 0
        while left:
            order = self._order(size, worker, epoch)[: min(used, left * batch_size)]
            left, epoch = left - ceil(len(order) / batch_size), epoch + 1
            yield order

    def _order(self, size: int, worker: int, epoch: int) -> np.ndarray:
        self._state["state"]["counter"][:] = (0, worker, self.round, epoch)
        self._rng.bit_generator.state = self._state
        return self._rng.permutation(size)


def dropout_base(source: Source, phase: Phase, *, worker: int, round: int) -> int:
    """The number from which a worker's dropout keys of one phase are counted."""
    return key(source.seed, f"dropout/{phase.stream}", worker=worker, round=round)


def dropout_key(base: Tensor, step: int | Tensor, layer: int) -> Tensor:
    """Keys [W] of one dropout layer in one step, from the workers' bases [W] (int64)."""
    return (base + (step * 256 + layer + 1) * _ODD) & _MASK
