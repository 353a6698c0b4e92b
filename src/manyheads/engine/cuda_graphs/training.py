"""Training in slots: a recorded step gathers a worker's batch, runs the net forward and backward, and moves its row."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from manyheads.engine.cuda_graphs.compiled import compiled
from manyheads.engine.cuda_graphs.descent import FlatDescent, UpdateRule, extras
from manyheads.engine.cuda_graphs.feed import Entries, Feed, upload
from manyheads.engine.cuda_graphs.lane import Lane
from manyheads.engine.cuda_graphs.rows import Kind, copy_all, load, store
from manyheads.engine.cuda_graphs.slots import Slot, Slots, jobs_of, phase_slots
from manyheads.engine.cuda_graphs.task import Task
from manyheads.engine.kernel import dropout_keys, set_modes, summed_loss
from manyheads.engine.phase import Phase
from manyheads.engine.precision import Precision
from manyheads.engine.schedule import Schedule, narrowest
from manyheads.engine.vmapped import Outputs
from manyheads.models.dropout import dropouts
from manyheads.models.norm import BatchNorm
from manyheads.models.split import Split, twin
from manyheads.tree import Params, add_prefix, group

_SMALLEST_CUT_BATCH = 32
"""The batch size from which on short batches are worth narrower recordings."""


@dataclass(frozen=True)
class Width:
    """How many samples a recorded step takes, and whether some of them may be padding."""

    samples: int
    padded: bool


class SlotTrainer:
    """Any net that can be captured, worker by worker."""

    def __init__(
        self,
        model: Split,
        phase: Phase,
        entries: Entries,
        *,
        capacity: int,
        batch_size: int,
        precision: Precision,
        channels_last: bool,
        compile: bool,
        lanes: Sequence[Lane],
    ) -> None:
        """``capacity``: batches of all workers in a phase."""
        model = twin(model)
        set_modes(model, phase)
        self.net, self.phase, self.entries, self.precision = Outputs(model), phase, entries, precision
        self.batch_size, self.compile = batch_size, compile
        self.device, self.dtype = entries.y.device, next(model.parameters()).dtype
        self.feed = Feed(capacity, {**entries.like(batch_size), "facts": ((3,), torch.int64)}, self.device)
        self.dropouts = dropouts(model)
        self.norms = [name for name, layer in model.named_modules() if isinstance(layer, BatchNorm) and layer.training]
        self.rate = torch.zeros(1, dtype=self.dtype, device=self.device)
        self.descent = FlatDescent(UpdateRule.of(phase), self.rate, compile=compile)
        self.losses = compiled(self._losses, compile, hashes=bool(self.dropouts))

        kind = Kind(1, self.device, self.dtype, channels_last, precision.low_names(model))
        slots = phase_slots(model, phase, kind, extras(phase, gradient=True), self.rate, lanes)
        self.slots = Slots(lanes, slots)

    def record(self, plan: Schedule) -> None:
        self.slots.record(self._step, {self._width(int(count)) for count in np.unique(plan.counts)})

    def run(self, task: Task) -> Tensor:
        plan, phase = task.plan, task.phase
        facts = np.stack([plan.counts, np.repeat(plan.bases, plan.lengths), plan.steps], axis=1)
        values = self.entries.look_up(upload(plan.entries, self.device))
        self.feed.fill({**values, "facts": upload(facts, self.device)})
        self.rate.fill_(phase.optimizer.lr)
        sums = torch.zeros(len(plan.rows), dtype=self.dtype, device=self.device)
        place = {row: k for k, row in enumerate(plan.rows)}

        def take(slot: Slot, row: int) -> None:
            slot.load(task.params, task.buffers, row)
            load(slot.constants, phase.constants, [row])
            slot.moving.load_extras(phase, [row])

        def put(slot: Slot, row: int) -> None:
            store(slot.moving.weight, task.moved, [row])
            store({n: leaf for n, leaf in slot.buffers.items() if group(n) in phase.update}, task.tracked, [row])
            sums[place[row]].copy_(slot.sums[0])

        self.slots.run(jobs_of(plan, self._width), take, put)
        return sums

    def _width(self, count: int) -> Width:
        """The recording for a batch of this size."""
        size = self.batch_size
        if count == size:
            return Width(size, False)
        if size < _SMALLEST_CUT_BATCH:
            # Without BatchNorm the recording of full batches serves short ones too: the loss always leaves padding out.
            return Width(size, bool(self.norms))
        return Width(narrowest(count, size), True)

    def _step(self, slot: Slot, width: Width) -> None:
        """One mini-batch of the worker in the slot."""
        with torch.no_grad():
            here = self.feed.read(slot.cursor)
            x, y = self.entries.pool.take(here["rows"][: width.samples]), here["y"][: width.samples]
        with torch.enable_grad():
            if width.padded and self.compile:
                # Short batches of all widths share compiled code if the net allows it.
                for samples in (x, y):
                    torch._dynamo.maybe_mark_dynamic(samples, 0)
            mean, total = self.losses(slot.leaves, x, y, here["facts"], slot.constants, width.padded)
            leaves = [slot.leaves[name] for name in slot.moving.gradient]
            gradients = torch.autograd.grad(mean, leaves, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            copy_all([view[0] for view in slot.moving.gradient.values()], gradients)
            self.descent.step(slot.moving)
            slot.sums.add_(total)
            slot.cursor.add_(1)

    def _losses(
        self, leaves: Params, x: Tensor, y: Tensor, facts: Tensor, constants: Params, padded: bool
    ) -> tuple[Tensor, Tensor]:
        """Mean and sum of a batch's losses; ``facts`` [3]: its true size, the dropout base, the step's number."""
        count, base, step = facts.unbind()
        valid = (torch.arange(len(x), device=x.device) < count).to(self.dtype)
        supplied = dropout_keys(self.dropouts, base, step)
        if padded:
            supplied |= {f"{name}.sample_weight": valid for name in self.norms}
        with self.precision.autocast(x.device):
            outputs = functional_call(self.net, add_prefix({**leaves, **supplied}, "net"), (x,))
        outputs = {name: output.to(self.dtype) for name, output in outputs.items()}
        own = {name: leaf[0] for name, leaf in constants.items()}
        total = summed_loss(self.phase.objective, outputs, y, own, valid)
        return total / count, total.detach()
