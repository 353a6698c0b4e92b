"""The engine for a GPU: samples stay on it, every step is recorded once as a CUDA graph, no step waits for the host."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from manyheads import host_memory
from manyheads.data.shards import Shards
from manyheads.engine.batches import num_batches
from manyheads.engine.chain import is_chain
from manyheads.engine.cuda_graphs.compiled import keeps_dropout, wanted, without_remarks
from manyheads.engine.cuda_graphs.feed import Entries, Pool, upload
from manyheads.engine.cuda_graphs.footprint import output_shape
from manyheads.engine.cuda_graphs.forward import WIDTH, Extraction, Scoring, forward_slot
from manyheads.engine.cuda_graphs.gradients import SlotGradients
from manyheads.engine.cuda_graphs.kinds import bare, kind, meaning
from manyheads.engine.cuda_graphs.lane import Lane
from manyheads.engine.cuda_graphs.rows import Kind, row_index
from manyheads.engine.cuda_graphs.slots import Slot
from manyheads.engine.cuda_graphs.stacked import StackedTrainer, has_convolutions, stackable
from manyheads.engine.cuda_graphs.task import Task, Trainer
from manyheads.engine.cuda_graphs.training import SlotTrainer
from manyheads.engine.kernel import set_modes
from manyheads.engine.phase import Epochs, Evaluation, Fit, Phase, Progress, Steps
from manyheads.engine.precision import Precision
from manyheads.engine.schedule import Schedule, in_widths, schedule
from manyheads.engine.workload import Workload
from manyheads.errors import UserError, first_line
from manyheads.models.dropout import dropouts
from manyheads.models.split import Split, cacheable_prefix, cut, twin
from manyheads.tree import Buffers, Params, group

_KEPT = 16
"""Recordings of each sort that are kept: an objective that holds other numbers in every round needs new ones."""
Made = TypeVar("Made")
Key = TypeVar("Key", bound=Hashable)


class CudaGraphsEngine:
    """Stacks workers where that is faster; all other nets run in parallel slots.

    It also runs on a CPU, step by step or with emulated recordings, which is how it is tested against the plain loop.
    """

    name = "cuda-graphs"

    def __init__(
        self,
        workload: Workload,
        *,
        precision: Precision,
        num_slots: int,
        num_stacked: int,
        stack_images: bool = False,
        rows_on_host: bool = False,
        compile: bool | None = None,
        notes: list[str] | None = None,
    ) -> None:
        """At most ``num_slots`` workers run side by side in slots, or ``num_stacked`` in a stack: see plan_memory.

        ``stack_images``: whether chains with convolutions are stacked too.
        ``notes``: the list to which messages for the user are added.
        """
        self.work, self.precision = workload, precision
        self.device = workload.train.x.device
        self.dtype = next(workload.model.parameters()).dtype
        self.images = not precision.deterministic and any(isinstance(m, nn.Conv2d) for m in workload.model.modules())
        self.stack_images = stack_images
        self.num_stacked = max(1, min(num_stacked, len(workload.ids)))
        self.lanes = [Lane(self.device) for _ in range(max(1, min(num_slots, len(workload.ids))))]
        # Not if bits must repeat: compiled code may be tuned by timing, with another outcome in every process.
        self.compile = (wanted(self.device) and not precision.deterministic) if compile is None else compile
        self.rows_on_host = rows_on_host
        """Whether ``place`` puts rows into pinned host memory; all other methods take rows from wherever they are."""
        self.notes: list[str] = [] if notes is None else notes
        self.progress = Progress()
        self.vmaps = True
        """Whether vmap can run the net: until one of its operations turns out to be unsupported."""
        self._trainers: dict[Hashable, Trainer] = {}
        self._gradients: dict[Hashable, SlotGradients] = {}
        self._extractions: dict[Hashable, Extraction] = {}
        self._scorings: dict[Hashable, Scoring] = {}
        self._depths: dict[str, int] = {}
        self._pools: dict[Hashable, tuple[Tensor, Pool]] = {}

    def place(self, leaves: Params) -> Params:
        if self.rows_on_host:
            return host_memory.pinned(leaves)
        return {name: leaf.to(self.device) for name, leaf in leaves.items()}

    def fit(self, params: Params, buffers: Buffers, phase: Phase, round: int, *, workers: Tensor | None = None) -> Fit:
        work = self.work
        rows = range(len(work.ids)) if workers is None else workers.tolist()
        plan = schedule(work.train, rows, work.ids, phase, work.source, round)
        moved = {**params, **self._room(params, phase, plan)}
        tracked = {**buffers, **self._room(buffers, phase, plan)}
        loss = torch.full((len(work.ids),), float("nan"), dtype=self.dtype, device=self.device)
        if plan.rows:
            with self.precision.settings(self.device):
                sums = self._train(Task(plan, phase, params, buffers, moved, tracked))
            means = sums / upload(plan.samples(), self.device)
            trained = upload(np.array(plan.rows), self.device)
            loss[trained] = means.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
        self._finish(moved)
        return Fit(moved, tracked, loss)

    def evaluate(self, params: Params, buffers: Buffers, shards: Shards) -> Evaluation:
        with self.precision.settings(self.device), torch.no_grad():
            sums = self._scoring(shards).run(params, buffers)
        metric, loss, weight = sums.unbind(1)
        self._finish(params)
        return Evaluation(metric / weight, loss / weight)

    def gradient(
        self, params: Params, buffers: Buffers, phase: Phase, round: int, *, batches: Steps | None = None
    ) -> Params:
        work, asked = self.work, replace(phase, amount=batches or Epochs(1))
        rows = range(len(work.ids))
        if batches is None:
            plan = in_widths(work.train, rows, WIDTH)
        else:
            plan = schedule(work.train, rows, work.ids, asked, work.source, round)
        into = {name: self._like(leaf).zero_() for name, leaf in params.items() if group(name) in phase.update}

        def make() -> SlotGradients:
            entries = Entries(self._pool(work.train.x, images=self.images), work.train.index, work.train.y)
            capacity, width = plan.entries.shape
            return SlotGradients(
                work.model,
                bare(asked),
                entries,
                capacity=capacity,
                width=width,
                channels_last=self.images,
                lanes=self.lanes,
            )

        if plan.rows:
            with self.precision.settings(self.device):
                gradients = _recorded(self._gradients, (batches, kind(asked)), make, SlotGradients.record)
                gradients.run(plan, asked, params, buffers, into)
        self._finish(into)
        return into

    def _train(self, task: Task) -> Tensor:
        """Run one phase; the sums of the workers' losses, in the plan's order [W']."""
        work, phase = self.work, task.phase
        model, rows, x = work.model, work.train.index, work.train.x
        depth = self._cached_depth(phase)
        if depth:
            model, rows, x = cut(model, depth)[1], None, self._features(depth, task)

        def trainer() -> Trainer:
            make = partial(self._trainer, model, rows, x, bare(phase))
            return _recorded(self._trainers, kind(phase), make, lambda trainer: trainer.record(task.plan))

        try:
            return self._compiled_if_possible(trainer).run(task)
        except RuntimeError as error:
            if is_chain(model, images=True) or not self._stacks(model):
                raise
            note = f"this net cannot be stacked ({str(error).partition('. ')[0][:200]}): it runs in slots."
            return self._instead(lambda: self._train(task), note, vmaps=False)

    def _stacks(self, model: Split) -> bool:
        return stackable(model, images=self.stack_images) and (is_chain(model, images=True) or self.vmaps)

    def _trainer(self, model: Split, rows: Tensor | None, x: Tensor, phase: Phase) -> Trainer:
        """What trains ``model`` on samples ``x``; ``rows``: which of them the shards' entries are (None: in order)."""
        work, source, stacked = self.work, self.work.source, self._stacks(model)
        images = self.images and (has_convolutions(model) or not stacked)
        entries = Entries(self._pool(x, images=images), rows, work.train.y)
        # There is room for all hosted workers, as others may take part in later rounds.
        lengths = [num_batches(size, phase.amount, source) for size in work.train.sizes]
        if stacked:
            return StackedTrainer(
                model,
                phase,
                entries,
                num_rows=self.num_stacked,
                capacity=max(lengths),
                batch_size=source.batch_size,
                precision=self.precision,
                compile=self.compile,
                lane=self.lanes[0],
            )
        return SlotTrainer(
            model,
            phase,
            entries,
            capacity=sum(lengths),
            batch_size=source.batch_size,
            precision=self.precision,
            channels_last=self.images,
            compile=self.compile,
            lanes=self.lanes,
        )

    def _compiled_if_possible(self, make: Callable[[], Made]) -> Made:
        """``make()``; if compiling fails, as it does without a C compiler, the engine does not compile from then on."""
        if not self.compile:
            return make()
        try:
            with without_remarks():
                if any(layer.p > 0 for layer in dropouts(self.work.model).values()) and not keeps_dropout(self.device):
                    raise RuntimeError("compiled dropout masks differ")
                return make()
        except UserError:
            raise
        except Exception as error:
            note = f"torch.compile failed ({first_line(error)[:200]}): running without it, which is slower."
            # Without compiled code, the patches of stacked convolutions cost more to copy and sum than stacking gains.
            # Trainers made before, which may have met a new size of batches, are compiled too.
            return self._instead(make, note, compile=False, stack_images=False, _trainers={})

    def _instead(self, make: Callable[[], Made], note: str, **settings: Any) -> Made:
        """``make()`` with other settings of this engine, which then stay, and a note for the user."""
        before = {name: getattr(self, name) for name in settings}
        vars(self).update(settings)
        try:
            made = make()
        except Exception:
            # It was not the settings that failed: perhaps this phase's objective.
            vars(self).update(before)
            raise
        self.notes.append(note)
        return made

    def _cached_depth(self, phase: Phase) -> int:
        """How many first layers run once per phase: 0 if their features would be far larger than the data."""
        if "representation" in phase.update:
            return 0
        if phase.frozen not in self._depths:
            depth, x = cacheable_prefix(self.work.model, phase.frozen), self.work.train.x
            size = prod(output_shape(cut(self.work.model, depth)[0], tuple(x.shape[1:]), self.dtype))
            self._depths[phase.frozen] = depth if self.work.worth_caching(size) else 0
        return self._depths[phase.frozen]

    def _features(self, depth: int, task: Task) -> Tensor:
        """Features [entries, ...] of the first ``depth`` layers for the plan's workers, always in the same memory."""
        train, phase = self.work.train, task.phase

        def make() -> Extraction:
            model = twin(self.work.model)
            set_modes(model, phase)
            prefix, _rest = cut(model, depth)
            pool = self._pool(train.x, images=self.images)
            kind = Kind(1, self.device, self.dtype, self.images, self.precision.low_names(model))
            return Extraction(prefix, train, pool, kind, precision=self.precision, lanes=self.lanes)

        extraction = _recorded(self._extractions, (depth, phase.frozen), make, Extraction.record)
        return extraction.run(task.params, task.buffers, task.plan.rows)

    def _scoring(self, shards: Shards) -> Scoring:
        """The recordings that score every worker on some shards."""

        def make() -> Scoring:
            model, pool = twin(self.work.model).eval(), self._pool(shards.x, images=self.images)
            return Scoring(model, shards, pool, self._score_slots, self.work.metric, self.work.loss, lanes=self.lanes)

        key = (id(shards), meaning(self.work.metric), meaning(self.work.loss))
        return _recorded(self._scorings, key, make, Scoring.record)

    @cached_property
    def _score_slots(self) -> list[Slot]:
        """What the scorings of all shards share."""
        kind = Kind(1, self.device, self.dtype, self.images)
        # In double precision, so that an accuracy over a few samples is recorded as exactly that fraction.
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        return [forward_slot(self.work.model, "", kind, sums) for _ in self.lanes]

    def _pool(self, x: Tensor, *, images: bool) -> Pool:
        """The pool of some samples, which are kept so that no other tensor can get their address."""
        # With the strides: images turned by transpose() have the address, and may have the shape, of those they turn.
        key = (x.data_ptr(), x.shape, x.stride(), x.dtype, images)
        if key not in self._pools:
            self._pools[key] = (x, Pool(x, channels_last=images))
        return self._pools[key][1]

    def _room(self, tree: Params, phase: Phase, plan: Schedule) -> Params:
        """New memory for the leaves that a phase moves, already with the rows of workers that do not train."""
        still = sorted(set(range(len(self.work.ids))) - set(plan.rows))
        known = self.work.model.state_dict().keys()
        moving = {name: leaf for name, leaf in tree.items() if name in known and group(name) in phase.update}
        index, room = row_index(still, moving), {}
        for name, leaf in moving.items():
            room[name] = self._like(leaf)
            if still:
                room[name][index[leaf.device]] = leaf[index[leaf.device]]
        return room

    def _like(self, leaf: Tensor) -> Tensor:
        """New memory like a leaf's, on the device or in host memory."""
        on_host = leaf.device != self.device
        return host_memory.empty(leaf.shape, leaf.dtype) if on_host else torch.empty_like(leaf)

    def _finish(self, params: Params) -> None:
        """Wait for copies from and to host memory, if rows are there: the caller may read or release them at once."""
        if any(leaf.device != self.device for leaf in params.values()):
            torch.cuda.synchronize(self.device)


def _recorded(made: dict[Key, Made], key: Key, make: Callable[[], Made], record: Callable[[Made], None]) -> Made:
    """What ``make`` gives for a key, with everything recorded that is needed now; the last few are kept."""
    try:
        wanted = made[key] if key in made else make()
        record(wanted)
    except torch.OutOfMemoryError:
        raise UserError("the GPU's memory ran out while recording: lower --workers or --batch-size.") from None
    made.pop(key, None)
    made[key] = wanted
    if len(made) > _KEPT:
        del made[next(iter(made))]
    return wanted
