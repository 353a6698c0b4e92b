"""Gradients in slots: of an objective at every worker's own weights, in eval mode and never in bf16."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from manyheads.engine.cuda_graphs.feed import Entries, Feed, upload
from manyheads.engine.cuda_graphs.lane import Lane
from manyheads.engine.cuda_graphs.rows import Extras, Kind, load, store
from manyheads.engine.cuda_graphs.slots import Slot, Slots, Variant, jobs_of, phase_slots
from manyheads.engine.kernel import summed_loss
from manyheads.engine.phase import Phase
from manyheads.engine.schedule import Schedule
from manyheads.engine.vmapped import Outputs
from manyheads.models.split import Split, twin
from manyheads.tree import Buffers, Params, add_prefix

_EVERY_STEP: Variant = "step"


class SlotGradients:
    """The recordings for one kind of objective; a slot sums its worker's gradient in memory beside the weights."""

    def __init__(
        self,
        model: Split,
        phase: Phase,
        entries: Entries,
        *,
        capacity: int,
        width: int,
        channels_last: bool,
        lanes: Sequence[Lane],
    ) -> None:
        """``capacity``: steps of all workers together, each of ``width`` samples."""
        model = twin(model).eval()
        self.net, self.objective, self.entries = Outputs(model), phase.objective, entries
        like = next(model.parameters())
        self.feed = Feed(capacity, {**entries.like(width), "weight": ((width,), like.dtype)}, entries.y.device)
        kind = Kind(1, entries.y.device, like.dtype, channels_last)
        beside = Extras(gradient=True, momentum=False, anchor=False, mask=False)
        sums = torch.zeros(1, dtype=like.dtype, device=entries.y.device)
        self.slots = Slots(lanes, phase_slots(model, phase, kind, beside, sums, lanes))

    def record(self) -> None:
        self.slots.record(self._step, [_EVERY_STEP])

    def run(self, plan: Schedule, phase: Phase, params: Params, buffers: Buffers, into: Params) -> None:
        """Write the gradient of the mean loss of each worker in the plan to its row of ``into`` [W, ...]."""
        device = self.entries.y.device
        valid = np.arange(plan.entries.shape[1]) < plan.counts[:, None]
        weight = valid / np.repeat(plan.samples(), plan.lengths)[:, None]
        self.feed.fill({**self.entries.look_up(upload(plan.entries, device)), "weight": upload(weight, device)})

        def take(slot: Slot, row: int) -> None:
            slot.load(params, buffers, row)
            load(slot.constants, phase.constants, [row])
            for gradient in slot.moving.gradient.values():
                gradient.zero_()

        jobs = jobs_of(plan, lambda count: _EVERY_STEP)
        self.slots.run(jobs, take, lambda slot, row: store(slot.moving.gradient, into, [row]))

    def _step(self, slot: Slot, _: Variant) -> None:
        """Add the gradient of one batch's share of the mean loss of the worker in the slot."""
        with torch.no_grad():
            here = self.feed.read(slot.cursor)
            x = self.entries.pool.take(here["rows"])
        with torch.enable_grad():
            outputs: dict[str, Tensor] = functional_call(self.net, add_prefix(slot.leaves, "net"), (x,))
            constants = {name: leaf[0] for name, leaf in slot.constants.items()}
            total = summed_loss(self.objective, outputs, here["y"], constants, here["weight"])
            leaves = [slot.leaves[name] for name in slot.moving.gradient]
            gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            for sum_, gradient in zip(slot.moving.gradient.values(), gradients, strict=True):
                sum_[0].add_(gradient)
            slot.cursor.add_(1)
