"""Every mini-batch of a phase as arrays: the batches of ``engine.batches.plan``, drawn faster."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manyheads.data.shards import Shards
from manyheads.engine.batches import Source, dropout_base, num_batches
from manyheads.engine.phase import Phase
from manyheads.randomness import generator

_NARROWEST = 8
"""Steps of fewer samples are no faster."""


@dataclass(frozen=True)
class Schedule:
    """T batches of W' workers: worker after worker, those with the most batches first, each in its order."""

    rows: tuple[int, ...]
    """The rows of the workers that have batches, [W']."""
    lengths: np.ndarray
    """Batches of each, [W']."""
    starts: np.ndarray
    """Where each one's batches begin, [W']."""
    entries: np.ndarray
    """Entries of the shards, [T, B]; a short batch is padded with the worker's first."""
    counts: np.ndarray
    """True sizes, [T]."""
    steps: np.ndarray
    """Place of each batch in its worker's phase, [T]."""
    bases: np.ndarray
    """Where each worker's dropout keys are counted from, [W']."""

    def samples(self) -> np.ndarray:
        """How many samples each worker sees, [W']."""
        return np.add.reduceat(self.counts, self.starts)

    def side_by_side(self, columns: slice, num_columns: int) -> tuple[np.ndarray, np.ndarray]:
        """Entries [S, A, B] and sizes [S, A] of some workers, who take their steps together; size 0: nothing left."""
        lengths, starts = self.lengths[columns], self.starts[columns]
        shape = (int(lengths.max()), num_columns)
        entries = np.zeros((*shape, self.entries.shape[1]), dtype=np.int64)
        counts = np.zeros(shape, dtype=np.int64)
        for column, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            entries[:length, column] = self.entries[start : start + length]
            counts[:length, column] = self.counts[start : start + length]
        return entries, counts


def schedule(
    shards: Shards, rows: Sequence[int], ids: Sequence[int], phase: Phase, source: Source, round: int
) -> Schedule:
    """The batches of some workers' rows in one phase of one round."""
    sizes, size = shards.sizes, source.batch_size
    lengths = {row: num_batches(sizes[row], phase.amount, source) for row in rows}
    order = tuple(sorted((row for row in rows if lengths[row]), key=lambda row: -lengths[row]))
    draw = _Orders(source.seed, phase.stream, round)
    taken: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    for row in order:
        left, epoch = lengths[row], 0
        # A batch of one sample, where it is left out, is always the last of its pass.
        pass_size = sizes[row] - (source.skip_single and sizes[row] % size == 1)
        while left:
            positions = draw(sizes[row], ids[row], epoch)[: min(pass_size, left * size)]
            full, rest = divmod(len(positions), size)
            counts.append(np.array([size] * full + [rest] * (rest > 0)))
            taken.append(positions + shards.offsets[row])
            left, epoch = left - len(counts[-1]), epoch + 1
    all_counts = np.concatenate([np.zeros(0, dtype=np.int64), *counts])
    each = np.array([lengths[row] for row in order], dtype=np.int64)
    starts = np.cumsum(each) - each
    first = np.array([shards.offsets[row] for row in order], dtype=np.int64)
    entries = np.repeat(first, each)[:, None].repeat(size, axis=1)
    if taken:
        entries[np.arange(size) < all_counts[:, None]] = np.concatenate(taken)
    bases = [dropout_base(source, phase, worker=ids[row], round=round) for row in order]
    steps = np.arange(len(entries)) - np.repeat(starts, each)
    return Schedule(order, each, starts, entries, all_counts, steps, np.array(bases, dtype=np.int64))


def in_widths(shards: Shards, rows: Sequence[int], width: int) -> Schedule:
    """Some workers' own samples in order, ``width`` at a time."""
    own = [np.arange(shards.offsets[row], shards.offsets[row + 1]) for row in rows]
    lengths = {row: -(-len(here) // width) for row, here in zip(rows, own, strict=True)}
    order = tuple(sorted((row for row in rows if lengths[row]), key=lambda row: -lengths[row]))
    each = np.array([lengths[row] for row in order], dtype=np.int64)
    starts = np.cumsum(each) - each
    sizes = np.array([shards.sizes[row] for row in order], dtype=np.int64)
    steps = np.arange(each.sum()) - np.repeat(starts, each)
    first = np.repeat(np.array([shards.offsets[row] for row in order], dtype=np.int64), each)
    counts = np.minimum(np.repeat(sizes, each) - steps * width, width)
    place = np.arange(width)
    entries = (first + steps * width)[:, None] + np.where(place < counts[:, None], place, 0)
    return Schedule(order, each, starts, entries, counts, steps, np.zeros(len(order), dtype=np.int64))


def narrowest(count: int, width: int) -> int:
    """The power of two, of at least eight and at most ``width``, that holds ``count`` samples with the least waste."""
    return min(width, max(_NARROWEST, 1 << (count - 1).bit_length()))


class _Orders:
    """``generator(...).permutation(size)`` for many workers, without making a generator for each."""

    def __init__(self, seed: int, stream: str, round: int) -> None:
        self.rng = generator(seed, stream)
        self.state = self.rng.bit_generator.state
        self.round = round

    def __call__(self, size: int, worker: int, epoch: int) -> np.ndarray:
        self.state["state"]["counter"][:] = (0, worker, self.round, epoch)
        self.rng.bit_generator.state = self.state
        return self.rng.permutation(size)
