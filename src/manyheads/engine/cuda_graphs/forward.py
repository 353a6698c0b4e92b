"""Forward passes in slots: the scores of every worker's model, and the features of a frozen representation."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from manyheads.data.shards import Shards
from manyheads.engine.cuda_graphs.feed import Entries, Feed, Pool, upload
from manyheads.engine.cuda_graphs.precision import Precision
from manyheads.engine.cuda_graphs.rows import FlatRows, Kind
from manyheads.engine.cuda_graphs.schedule import in_widths, narrowest
from manyheads.engine.cuda_graphs.slots import Slot, SlotJob, Slots, Variant
from manyheads.engine.phase import Loss
from manyheads.models.split import statistics
from manyheads.tree import Buffers, Params, strip_prefix

WIDTH = 256
"""The most samples in one step: enough to fill the device."""


def forward_slot(model: nn.Module, prefix: str, kind: Kind, sums: Tensor) -> Slot:
    """A slot whose weights never move; the state names the module's leaves with ``prefix`` before their own names."""
    shapes = {f"{prefix}{name}": p.shape for name, p in model.named_parameters()}
    buffers = {f"{prefix}{name}": buffer for name, buffer in statistics(model).items()}
    return Slot.make(FlatRows(shapes, kind), FlatRows({}, kind), buffers, {}, sums)


class Sweep:
    """Passes over the samples of every worker, the same in every round: filled once, recorded once."""

    def __init__(self, shards: Shards, pool: Pool, like: Tensor) -> None:
        plan = in_widths(shards, range(shards.num_workers), WIDTH)
        device = like.device
        entries = upload(plan.entries, device)
        valid = torch.arange(WIDTH, device=device) < upload(plan.counts, device).unsqueeze(1)
        weight = valid.to(like.dtype)
        if shards.weight is not None:
            weight = weight * shards.weight[entries]
        # Padding is written behind the last sample.
        places = torch.where(valid, entries, len(shards.index))
        all_entries = Entries(pool, shards.index, shards.y)
        self.pool = pool
        shapes = {"weight": ((WIDTH,), weight.dtype), "places": ((WIDTH,), torch.int64)}
        self.feed = Feed(len(entries), {**all_entries.like(WIDTH), **shapes}, device)
        self.feed.fill({**all_entries.look_up(entries), "weight": weight, "places": places})
        self.feed.tensors["places"][len(entries) :] = len(shards.index)
        self.jobs = {
            row: SlotJob(row, int(start), tuple(narrowest(int(n), WIDTH) for n in plan.counts[start : start + length]))
            for row, start, length in zip(plan.rows, plan.starts, plan.lengths, strict=True)
        }

    def variants(self) -> set[Variant]:
        """The recordings its jobs need."""
        return {variant for job in self.jobs.values() for variant in job.variants}

    def samples(self, cursor: Tensor, width: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Inputs [width, ...] at the cursor, and what else the feed holds of them."""
        here = {name: values[:width] for name, values in self.feed.read(cursor).items()}
        return self.pool.take(here["rows"]), here


def scoring(model: nn.Module, sweep: Sweep, metric: Loss, loss: Loss) -> Callable[[Slot, int], None]:
    """A step that adds to the slot's sums: metric, loss and weight."""

    @torch.no_grad()
    def step(slot: Slot, width: int) -> None:
        x, here = sweep.samples(slot.cursor, width)
        output, weight = functional_call(model, slot.leaves, (x,)), here["weight"]
        # Where a score of padding is no number, it still must not count.
        scores = [(score(output, here["y"]) * weight).masked_fill(weight == 0, 0) for score in (metric, loss)]
        slot.sums.add_(torch.stack([*scores, weight]).sum(1, dtype=slot.sums.dtype))
        slot.cursor.add_(1)

    return step


def extracting(prefix: nn.Module, sweep: Sweep, features: Tensor, precision: Precision) -> Callable[[Slot, int], None]:
    """A step that writes the prefix's features to their samples' places in ``features`` [entries + 1, ...]."""

    @torch.no_grad()
    def step(slot: Slot, width: int) -> None:
        x, here = sweep.samples(slot.cursor, width)
        with precision.autocast(x.device):
            made = functional_call(prefix, strip_prefix(slot.leaves, "representation"), (x,))
        features.index_copy_(0, here["places"], made.to(features.dtype))
        slot.cursor.add_(1)

    return step


def score_all(slots: Slots, sweep: Sweep, params: Params, buffers: Buffers, num_workers: int) -> Tensor:
    """Sums of metric, loss and weight of every worker, [W, 3]."""
    like = slots.slots[0].sums
    sums = torch.zeros(num_workers, len(like), dtype=like.dtype, device=like.device)
    slots.run(
        list(sweep.jobs.values()),
        lambda slot, row: slot.load(params, buffers, row),
        lambda slot, row: sums[row].copy_(slot.sums),
    )
    return sums
