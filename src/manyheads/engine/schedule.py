"""All mini-batches of a phase, or all parts of a pass over the samples in their order, as arrays.

Four numberings meet here. A *row* is a worker's place in this process's leaves and shards. A *column* is its place
among the workers that have batches, those with the most first. A *position* is a sample's place in its worker's shard,
and an *entry* its place in the shards of all, which is where ``Shards.index`` and ``Shards.y`` have it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from manyheads.data.shards import Shards
from manyheads.engine.batches import Passes, Source, dropout_base
from manyheads.engine.phase import Phase

_NARROWEST = 8
"""Steps of fewer samples are no faster."""


@dataclass(frozen=True)
class Schedule:
    """T batches of W' workers: one worker after another, those with the most batches first, each worker's in order."""

    rows: tuple[int, ...]
    """The rows of the workers that have batches, [W']."""
    lengths: np.ndarray
    """Batches of each, [W']."""
    entries: np.ndarray
    """Entries of the shards, [T, B]; a short batch is padded with the worker's first."""
    counts: np.ndarray
    """True sizes, [T]."""
    bases: np.ndarray
    """Where each worker's dropout keys are counted from, [W']."""

    @cached_property
    def starts(self) -> np.ndarray:
        """Where each worker's batches begin, [W']."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def steps(self) -> np.ndarray:
        """Place of each batch in its worker's phase, [T]."""
        return np.arange(len(self.counts)) - np.repeat(self.starts, self.lengths)

    def samples(self) -> np.ndarray:
        """How many samples each worker sees, [W']."""
        return np.add.reduceat(self.counts, self.starts)

    def drawn(self, column: int) -> np.ndarray:
        """The entries of one worker's batches, without padding, in their order."""
        own = slice(self.starts[column], self.starts[column] + self.lengths[column])
        entries = self.entries[own]
        return entries[np.arange(entries.shape[1]) < self.counts[own, None]]

    def side_by_side(self, columns: slice, num_columns: int) -> tuple[np.ndarray, np.ndarray]:
        """Entries [S, A, B] and sizes [S, A] of some workers who step together; size 0: none left."""
        lengths, starts = self.lengths[columns], self.starts[columns]
        shape = (int(lengths.max()), num_columns)
        entries = np.zeros((*shape, self.entries.shape[1]), dtype=np.int64)
        counts = np.zeros(shape, dtype=np.int64)
        for column, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            entries[:length, column] = self.entries[start : start + length]
            counts[:length, column] = self.counts[start : start + length]
        return entries, counts


def schedule(
    shards: Shards,
    rows: Sequence[int],
    ids: Sequence[int],
    phase: Phase,
    source: Source,
    round: int,
    *,
    go_on: Callable[[], None] = lambda: None,
) -> Schedule:
    """The batches of some workers' rows in one phase of one round; the last of a pass keeps its true size.

    ``go_on`` is called in each pass, of which there may be many, and may raise to stop.
    """
    passes = Passes(phase, source, round)
    drawn: dict[int, list[np.ndarray]] = {row: [] for row in rows}
    for row, own in drawn.items():
        for order in passes(shards.sizes[row], ids[row]):
            go_on()
            own.append(order)
    return _cut(shards, drawn, source.batch_size, lambda row: dropout_base(source, phase, worker=ids[row], round=round))


def in_widths(shards: Shards, rows: Sequence[int], width: int) -> Schedule:
    """Some workers' own samples in order, ``width`` at a time."""
    return _cut(shards, {row: [np.arange(shards.sizes[row])] for row in rows}, width, lambda row: 0)


def _cut(shards: Shards, passes: Mapping[int, Sequence[np.ndarray]], size: int, base: Callable[[int], int]) -> Schedule:
    """Each row's passes, which are positions in its shard, cut into batches of ``size``; a pass may end with less."""
    lengths = {row: sum(-(-len(order) // size) for order in own) for row, own in passes.items()}
    rows = tuple(sorted((row for row in passes if lengths[row]), key=lambda row: -lengths[row]))
    each = np.array([lengths[row] for row in rows], dtype=np.int64)
    first = np.array([shards.offsets[row] for row in rows], dtype=np.int64)
    bases = np.array([base(row) for row in rows], dtype=np.int64)
    orders = [order + shards.offsets[row] for row in rows for order in passes[row]]
    samples = np.array([len(order) for order in orders], dtype=np.int64)
    batches = -(-samples // size)
    counts = np.full(batches.sum(), size)
    counts[np.cumsum(batches) - 1] -= batches * size - samples
    entries = np.repeat(first, each)[:, None].repeat(size, axis=1)
    entries[np.arange(size) < counts[:, None]] = np.concatenate([np.zeros(0, dtype=np.int64), *orders])
    return Schedule(rows, each, entries, counts, bases)


def narrowest(count: int, width: int, least: int = _NARROWEST) -> int:
    """The smallest power of two, at least ``least``, that holds ``count`` samples; ``width`` if that is less."""
    return min(width, max(least, 1 << (count - 1).bit_length()))
