"""Workers take turns in a few slots side by side; a slot is a lane with one worker's rows and recorded steps.

A slot's steps are graphs of their own, so slots never wait for each other: a worker is loaded, its batches are replayed
one by one, it is stored, and the next one takes the slot. No step is spent on workers that have finished.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.engine.cuda_graphs.lane import Lane, Replay, take_turns
from manyheads.engine.cuda_graphs.rows import Extras, FlatRows, Kind, load
from manyheads.engine.phase import Phase
from manyheads.engine.schedule import Schedule
from manyheads.models.split import statistics
from manyheads.tree import Buffers, Params, group

Variant = Hashable
"""Which of a slot's recordings a step replays."""

Move = Callable[["Slot", int], object]
"""(slot, row): put a worker into a slot, or take it out."""


@dataclass(frozen=True)
class Slot:
    """One worker at a time, in memory that stays where it is."""

    frozen: FlatRows
    moving: FlatRows
    buffers: Buffers
    """Statistics, each [1, ...] in memory of its own: compiled code that writes to one must not change another."""
    constants: Params
    """What the objective reads, each [1, ...]."""
    leaves: Params
    """The tensors of a forward pass, without the worker axis; those that move carry gradients."""
    cursor: Tensor
    """Which row of the feed comes next, [1] int64."""
    sums: Tensor
    """What the worker's steps sum up, such as its loss."""

    @staticmethod
    def make(frozen: FlatRows, moving: FlatRows, buffers: Buffers, constants: Params, sums: Tensor) -> "Slot":
        """An empty slot, for statistics like ``buffers`` [...] and constants like ``constants`` [W, ...]."""
        own = {name: torch.zeros_like(leaf, device=sums.device).unsqueeze(0) for name, leaf in buffers.items()}
        still = {name: leaf[0] for name, leaf in {**frozen.compute, **own}.items()}
        moves = {name: leaf[0].detach().requires_grad_() for name, leaf in moving.compute.items()}
        room = {name: leaf.new_zeros(1, *leaf.shape[1:]) for name, leaf in constants.items()}
        cursor = torch.zeros(1, dtype=torch.int64, device=sums.device)
        return Slot(frozen, moving, own, room, still | moves, cursor, torch.zeros_like(sums))

    def load(self, params: Params, buffers: Buffers, row: int) -> None:
        """Copy one worker's rows here and begin."""
        self.frozen.load(params, [row])
        self.moving.load(params, [row])
        load(self.buffers, buffers, [row])
        self.sums.zero_()


def phase_slots(
    model: nn.Module, phase: Phase, kind: Kind, beside: Extras, sums: Tensor, lanes: Sequence[Lane]
) -> list[Slot]:
    """A slot for each lane; ``beside`` goes with the leaves that the phase moves, the others are frozen."""
    moving = {name: p.shape for name, p in model.named_parameters() if group(name) in phase.update}
    frozen = {name: p.shape for name, p in model.named_parameters() if group(name) not in phase.update}
    return [
        Slot.make(FlatRows(frozen, kind), FlatRows(moving, kind, beside), statistics(model), phase.constants, sums)
        for _ in lanes
    ]


@dataclass(frozen=True)
class SlotJob:
    """One worker's steps: its row, where its batches begin in the feed, and the recording of each."""

    row: int
    start: int
    variants: tuple[Variant, ...]


def jobs_of(plan: Schedule, variant: Callable[[int], Variant]) -> list[SlotJob]:
    """A job for each worker of a plan; ``variant``: the recording for a batch of so many samples."""
    return [
        SlotJob(row, int(start), tuple(variant(int(count)) for count in plan.counts[start : start + length]))
        for row, start, length in zip(plan.rows, plan.starts, plan.lengths, strict=True)
    ]


class Slots:
    """Runs jobs through slots."""

    def __init__(self, lanes: Sequence[Lane], slots: Sequence[Slot]) -> None:
        self.lanes, self.slots = lanes, slots
        self.recordings: list[dict[Variant, Replay]] = [{} for _ in slots]

    def record(self, step: Callable[[Slot, Any], None], variants: Iterable[Variant]) -> None:
        """Record the variants that are not recorded yet. This overwrites the slots.

        ``step(slot, variant)`` does one step and moves the slot's cursor on. It is not kept here: it is a method of the
        object that owns these slots, and such a cycle would leave the recordings to the garbage collector.
        """
        for variant in variants:
            for lane, slot, recordings in zip(self.lanes, self.slots, self.recordings, strict=True):
                if variant not in recordings:
                    slot.cursor.zero_()
                    recordings[variant] = lane.record(lambda slot=slot, variant=variant: step(slot, variant))

    def run(self, jobs: Sequence[SlotJob], load: Move, store: Move) -> None:
        """Run every job in some slot: ``load``, then its recorded steps, then ``store``."""
        shares = _share(jobs, len(self.slots))
        take_turns([(lane, self._work(k, shares[k], load, store)) for k, lane in enumerate(self.lanes)])

    def _work(self, k: int, jobs: Sequence[SlotJob], load: Move, store: Move) -> Iterator[None]:
        slot, recordings = self.slots[k], self.recordings[k]
        for job in jobs:
            slot.cursor.fill_(job.start)
            load(slot, job.row)
            yield
            for variant in job.variants:
                recordings[variant]()
                yield
            store(slot, job.row)
            yield


def _share(jobs: Sequence[SlotJob], num_slots: int) -> list[list[SlotJob]]:
    """Deal jobs to slots: the longest first, each to the slot with the least to do."""
    shares: list[list[SlotJob]] = [[] for _ in range(num_slots)]
    load = [0] * num_slots
    for job in sorted(jobs, key=lambda job: -len(job.variants)):
        k = load.index(min(load))
        shares[k].append(job)
        load[k] += len(job.variants)
    return shares
