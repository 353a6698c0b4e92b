"""Forward passes in slots: the scores of every worker's model, and the features of a frozen representation."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from manyheads.data.shards import Shards
from manyheads.engine.cuda_graphs.feed import Entries, Feed, Pool, upload
from manyheads.engine.cuda_graphs.footprint import output_shape
from manyheads.engine.cuda_graphs.lane import Lane
from manyheads.engine.cuda_graphs.rows import FlatRows, Kind
from manyheads.engine.cuda_graphs.slots import Slot, Slots, Variant, jobs_of
from manyheads.engine.phase import Loss
from manyheads.engine.precision import Precision
from manyheads.engine.schedule import in_widths, narrowest
from manyheads.engine.workload import sums_of
from manyheads.models.split import statistics
from manyheads.tree import Buffers, Params, strip_prefix

WIDTH = 256
"""The most samples in one step: enough to fill the device."""


def forward_slot(model: nn.Module, prefix: str, kind: Kind, sums: Tensor) -> Slot:
    """A slot whose weights never move; in the state, the names of the module's leaves begin with ``prefix``."""
    shapes = {f"{prefix}{name}": p.shape for name, p in model.named_parameters()}
    buffers = {f"{prefix}{name}": buffer for name, buffer in statistics(model).items()}
    return Slot.make(FlatRows(shapes, kind), FlatRows({}, kind), buffers, {}, sums)


class Sweep:
    """A pass over every worker's own samples, the same in every round, so that its feed is filled only once."""

    def __init__(self, shards: Shards, pool: Pool, like: Tensor) -> None:
        plan = in_widths(shards, range(shards.num_workers), WIDTH)
        device = like.device
        entries = upload(plan.entries, device)
        valid = torch.arange(WIDTH, device=device) < upload(plan.counts, device).unsqueeze(1)
        weight = valid.to(like.dtype)
        if shards.weight is not None:
            weight = weight * shards.weight[entries]
        # Results for padding are written behind those of the last sample, where nobody reads them.
        places = torch.where(valid, entries, len(shards.index))
        all_entries = Entries(pool, shards.index, shards.y)
        self.pool = pool
        shapes = {"weight": ((WIDTH,), weight.dtype), "places": ((WIDTH,), torch.int64)}
        self.feed = Feed(len(entries), {**all_entries.like(WIDTH), **shapes}, device)
        self.feed.fill({**all_entries.look_up(entries), "weight": weight, "places": places})
        # So are those of the spare rows, over which recording may run.
        self.feed.tensors["places"][len(entries) :] = len(shards.index)
        self.jobs = {job.row: job for job in jobs_of(plan, lambda count: narrowest(count, WIDTH))}

    def variants(self) -> set[Variant]:
        """The recordings that its jobs need."""
        return {variant for job in self.jobs.values() for variant in job.variants}

    def samples(self, cursor: Tensor, width: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Inputs [width, ...] at the cursor, and what the feed holds about them."""
        here = {name: values[:width] for name, values in self.feed.read(cursor).items()}
        return self.pool.take(here["rows"]), here


class Scoring:
    """The scores of every worker's model on some shards: sums of metric, loss and weight."""

    def __init__(
        self,
        model: nn.Module,
        shards: Shards,
        pool: Pool,
        slots: Sequence[Slot],
        metric: Loss,
        loss: Loss,
        *,
        lanes: Sequence[Lane],
    ) -> None:
        self.model, self.shards, self.metric, self.loss = model, shards, metric, loss
        self.sweep = Sweep(shards, pool, next(model.parameters()))
        self.slots = Slots(lanes, slots)

    def record(self) -> None:
        self.slots.record(self._step, self.sweep.variants())

    def run(self, params: Params, buffers: Buffers) -> Tensor:
        """The sums of metric, loss and weight for every worker, [W, 3]."""
        like = self.slots.slots[0].sums
        sums = torch.zeros(self.shards.num_workers, len(like), dtype=like.dtype, device=like.device)
        self.slots.run(
            list(self.sweep.jobs.values()),
            lambda slot, row: slot.load(params, buffers, row),
            lambda slot, row: sums[row].copy_(slot.sums),
        )
        return sums

    @torch.no_grad()
    def _step(self, slot: Slot, width: int) -> None:
        x, here = self.sweep.samples(slot.cursor, width)
        output, scores = functional_call(self.model, slot.leaves, (x,)), (self.metric, self.loss)
        slot.sums.add_(sums_of(scores, output, here["y"], here["weight"], slot.sums.dtype))
        slot.cursor.add_(1)


class Extraction:
    """The features of a frozen representation's first layers, always in the same memory."""

    def __init__(
        self, prefix: nn.Module, shards: Shards, pool: Pool, kind: Kind, *, precision: Precision, lanes: Sequence[Lane]
    ) -> None:
        shape = output_shape(prefix, tuple(shards.x.shape[1:]), kind.dtype)
        # One entry more, to which padding is written.
        layout = torch.channels_last if kind.channels_last and len(shape) == 3 else torch.contiguous_format
        features = torch.zeros(len(shards.index) + 1, *shape, dtype=kind.dtype, device=kind.device)
        self.features = features.contiguous(memory_format=layout)
        self.prefix, self.precision = prefix, precision
        self.sweep = Sweep(shards, pool, self.features)
        slots = [forward_slot(prefix, "representation.", kind, self.features.new_zeros(1)) for _ in lanes]
        self.slots = Slots(lanes, slots)

    def record(self) -> None:
        self.slots.record(self._step, self.sweep.variants())

    def run(self, params: Params, buffers: Buffers, rows: Sequence[int]) -> Tensor:
        """Features [entries, ...] of these workers' samples; those of other workers are not up to date."""
        jobs = [self.sweep.jobs[row] for row in rows]
        self.slots.run(jobs, lambda slot, row: slot.load(params, buffers, row), lambda slot, row: None)
        return self.features[:-1]

    @torch.no_grad()
    def _step(self, slot: Slot, width: int) -> None:
        x, here = self.sweep.samples(slot.cursor, width)
        with self.precision.autocast(x.device):
            made = functional_call(self.prefix, strip_prefix(slot.leaves, "representation"), (x,))
        self.features.index_copy_(0, here["places"], made.to(self.features.dtype))
        slot.cursor.add_(1)
