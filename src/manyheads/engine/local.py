"""The engine without graphs: workers in cache-sized chunks over the threads, ragged phases without waste."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from manyheads.data.shards import Shards
from manyheads.engine.batches import num_batches
from manyheads.engine.kernel import Batch, Kernel, in_a_row, point_at, set_modes, summed_loss
from manyheads.engine.phase import Evaluation, Fit, Phase, Progress, Steps
from manyheads.engine.precision import Precision
from manyheads.engine.schedule import Schedule, in_widths, narrowest, schedule
from manyheads.engine.workload import Workload, sums_of
from manyheads.models.split import Split, cacheable_prefix, cut, needs_loop, statistics, twin
from manyheads.randomness import generator, key, torch_seed
from manyheads.threads import Result, Threads
from manyheads.tree import Buffers, Params, clone, group, select

_FORWARD_BATCH = {"cpu": 128, "cuda": 1024}
"""Samples that go through the net at once where no batch is drawn."""
_SMALL_BATCH = 256
"""Batches of up to so many samples are all padded alike."""
_AT_ONCE = 2048
"""Samples of stacked workers that go through the net at once in training: many more would leave the cache."""
_STACKED = 1 << 18
"""Up to so many weights and so many inputs, workers are scored together: with more, each is worth a pass of its own."""


@dataclass(frozen=True)
class _Chunk:
    """Workers that go through a phase together."""

    plan: Schedule
    """Their mini-batches, in which they stand in order."""
    phase: Phase
    round: int


@dataclass(frozen=True)
class _Inputs:
    """What the net of a chunk is fed with, step by step."""

    pool: Tensor
    """[samples, ...]."""
    where: Tensor
    """Where in the pool each worker's samples lie, [S, A, B]."""
    labels: Tensor
    """[S, A, B, ...]."""
    counts: np.ndarray
    """True sizes of the batches, [S, A]."""


class LocalEngine:
    """Runs phases chunk by chunk with one of the kernels.

    Each worker's numbers depend on its own rows and samples only: neither the chunk it falls in, nor the number of
    threads, nor the workers hosted beside it change a bit of them (with the vmap kernel: to rounding).
    """

    def __init__(
        self,
        workload: Workload,
        kernel: type[Kernel],
        *,
        chunk_size: int,
        threads: Threads,
        name: str,
        precision: Precision | None = None,
    ) -> None:
        self.work, self.kernel, self.chunk_size, self.name = workload, kernel, chunk_size, name
        self.precision = precision or Precision()
        self.device = workload.train.x.device
        self.dtype = next(workload.model.parameters()).dtype
        # Modules that draw from torch's own generator share it, so they run one after another.
        self.seeded = needs_loop(workload.model) is not None
        self.threads = Threads(1) if self.seeded else threads
        self._own, self._replicas = threading.local(), WeakSet[Split]()
        self.progress = Progress()

    def place(self, leaves: Params) -> Params:
        return {name: leaf.to(self.device) for name, leaf in leaves.items()}

    def fit(self, params: Params, buffers: Buffers, phase: Phase, round: int, *, workers: Tensor | None = None) -> Fit:
        sizes = self.work.train.sizes
        rows = range(len(sizes)) if workers is None else workers.tolist()
        moved = {**params, **clone(select(params, phase.update))}
        # All of them: a user's layer may move its statistics in a frozen part too, which are dropped after the phase.
        tracked = clone(buffers)
        loss = torch.full((len(sizes),), float("nan"), dtype=self.dtype, device=self.device)
        batches = {row: num_batches(sizes[row], phase.amount, self.work.source) for row in rows}
        self.progress = Progress(total=sum(batches.values()))
        widths = {row: narrowest(sizes[row], self.work.source.batch_size, _SMALL_BATCH) for row in rows if batches[row]}

        def train(rows: list[int]) -> None:
            work = self.work
            # Batches that no worker here can fill are as wide as they are padded to; their samples stay the same.
            source = replace(work.source, batch_size=widths[rows[0]])
            plan = schedule(work.train, rows, work.ids, phase, source, round, go_on=self.threads.go_on)
            with self._seed(phase.stream, rows[0], round):
                self._fit_chunk(moved, tracked, loss, _Chunk(plan, phase, round))

        self._each(train, self._chunks(widths, batches, lambda width: _AT_ONCE // width))
        return Fit(moved, {**buffers, **select(tracked, phase.update)}, loss)

    def evaluate(self, params: Params, buffers: Buffers, shards: Shards) -> Evaluation:
        # In double precision, so that an accuracy over a few samples is recorded as exactly that fraction.
        sums = torch.zeros(3, shards.num_workers, dtype=torch.float64, device=self.device)
        counts = dict(enumerate(shards.sizes))
        most, weights = _FORWARD_BATCH[self.device.type], sum(leaf[:1].numel() for leaf in params.values())
        inputs_each = shards.x[:1].numel()

        def together(width: int) -> int:
            return _STACKED // max(weights, width * inputs_each)

        def width_of(count: int) -> int:
            padded = narrowest(count, most)
            # A worker that is scored alone needs no padding.
            return padded if count <= most and together(padded) > 1 else -(-count // -(-count // most))

        widths = {row: width_of(count) for row, count in counts.items() if count}

        def score(rows: list[int]) -> None:
            plan = in_widths(shards, rows, widths[rows[0]])
            entries, inputs = self._drawn(shards, plan)
            model, scores, total = self._replica(), (self.work.metric, self.work.loss), sums.new_zeros(3, len(rows))
            with torch.no_grad(), self._seed("evaluation", rows[0]):
                outputs = self.kernel.scoring(model, *_rows_of(model, params, buffers, self._index(plan.rows)))
                for batch in self._batches(inputs, plan):
                    active, width = batch.y.shape[:2]
                    weight = batch.count.new_ones(active, width) if batch.weight is None else batch.weight
                    if shards.weight is not None:
                        weight = weight * shards.weight[entries[batch.step, :active, :width]]
                    output, y = in_a_row(outputs(batch.x)), in_a_row(batch.y)
                    total[:, :active] += sums_of(scores, output, y, weight, total.dtype)
            sums[:, plan.rows] = total

        self._each(score, self._chunks(widths, counts, together))
        metric, loss, weight = sums
        return Evaluation(metric / weight, loss / weight)

    def gradient(
        self, params: Params, buffers: Buffers, phase: Phase, round: int, *, batches: Steps | None = None
    ) -> Params:
        moving = [name for name in params if group(name) in phase.update]
        work, train, rows = self.work, self.work.train, range(self.work.train.num_workers)
        if batches is None:
            plan = in_widths(train, rows, _FORWARD_BATCH[self.device.type])
        else:
            plan = schedule(train, rows, work.ids, replace(phase, amount=batches), work.source, round)
        drawn = {row: plan.drawn(column) for column, row in enumerate(plan.rows)}

        def one(row: int) -> list[Tensor]:
            model = self._replica().eval()
            point_at(model, params, buffers, row)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(group(name) in phase.update)
            leaves = [model.get_parameter(name) for name in moving]
            entries = drawn.get(row, np.empty(0, np.int64))
            constants = {name: leaf[row] for name, leaf in phase.constants.items()}
            total = [torch.zeros_like(leaf) for leaf in leaves]
            with self._seed(phase.stream, row, round):
                for span in self._passes(slice(0, len(entries))):
                    part = torch.from_numpy(entries[span]).to(self.device)
                    outputs = model.outputs(train.x.index_select(0, train.index[part]))
                    sums = summed_loss(phase.objective, outputs, train.y[part], constants, None)
                    loss = sums / len(entries)
                    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
                    for sum_, g in zip(total, gradients, strict=True):
                        sum_ += g
            return total

        each = self._each(one, rows)
        return {name: torch.stack([worker[k] for worker in each]) for k, name in enumerate(moving)}

    def _chunks(
        self, widths: Mapping[int, int], batches: Mapping[int, int], together: Callable[[int], int]
    ) -> list[list[int]]:
        """Rows that step together, all of one width; ``together``: how many rows of a width may.

        What a worker's batches are padded to depends on that worker alone, so that its chunk changes no bit. Workers
        with similar numbers of batches share a chunk, so that hardly any row waits for another.
        """
        order = sorted(widths, key=lambda row: (-widths[row], -batches[row]))
        alike = {width: list(same) for width, same in groupby(order, lambda row: widths[row])}
        sizes = {width: min(self.chunk_size, max(1, together(width))) for width in alike}
        return [same[k : k + sizes[width]] for width, same in alike.items() for k in range(0, len(same), sizes[width])]

    def _fit_chunk(self, moved: Params, tracked: Buffers, loss: Tensor, chunk: _Chunk) -> None:
        model, inputs = self._inputs(moved, tracked, chunk)
        rows = self._index(chunk.plan.rows)
        params, buffers = _rows_of(model, moved, tracked, rows)
        phase = _narrow(chunk.phase, rows, params)
        kernel = self.kernel(model, phase, params, buffers)
        sums = torch.zeros(len(chunk.plan.rows), dtype=self.dtype, device=self.device)
        for batch in self._batches(inputs, chunk.plan):
            active = len(batch.count)
            sums[:active] += kernel.step(self._transformed(batch, chunk))
            self.progress.done += active
        if isinstance(rows, Tensor):
            for name, leaf in select(params, phase.update).items():
                moved[name][rows] = leaf
            for name, leaf in buffers.items():
                tracked[name][rows] = leaf
        seen = torch.from_numpy(chunk.plan.samples()).to(sums)
        loss[rows] = (sums / seen).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)

    def _inputs(self, params: Params, buffers: Buffers, chunk: _Chunk) -> tuple[Split, _Inputs]:
        """The net to train and its inputs: while the representation is frozen, features computed once for the phase."""
        train, phase, plan = self.work.train, chunk.phase, chunk.plan
        model = self._replica()
        drawn, plain = self._drawn(train, plan)
        frozen = "representation" not in phase.update and self.work.transform is None
        depth = cacheable_prefix(model, phase.frozen) if frozen else 0
        if depth == 0:
            return model, plain
        prefix, rest = cut(model, depth)
        set_modes(model, phase)
        features, found, size = [], torch.empty_like(drawn), 0
        with torch.no_grad():
            if not self.work.worth_caching(prefix(train.x[train.index[drawn[0, 0, :1]]]).numel()):
                return model, plain
            for column, row in enumerate(plan.rows):
                point_at(model, params, buffers, row)
                # Only for samples that the phase draws: a few steps are not worth a whole pass.
                used = torch.from_numpy(np.unique(plan.drawn(column))).to(self.device)
                chosen = train.index[used]
                parts = self._passes(slice(0, len(used)))
                features += [prefix(train.x.index_select(0, chosen[part])) for part in parts]
                found[:, column] = size + torch.searchsorted(used, drawn[:, column].contiguous())
                size += len(used)
        return rest, replace(plain, pool=torch.cat(features), where=found)

    def _drawn(self, shards: Shards, plan: Schedule) -> tuple[Tensor, _Inputs]:
        """The entries [S, A, B] of a plan's batches, and the net's inputs there."""
        drawn, counts = plan.side_by_side(slice(None), len(plan.rows))
        entries = torch.from_numpy(drawn).to(self.device)
        return entries, _Inputs(shards.x, shards.index[entries], shards.y[entries], counts)

    def _index(self, rows: Sequence[int]) -> Tensor | slice:
        """What takes the workers' rows out of a leaf: one worker's in place, several as a copy."""
        return slice(rows[0], rows[0] + 1) if len(rows) == 1 else torch.tensor(rows, device=self.device)

    def _batches(self, inputs: _Inputs, plan: Schedule) -> Iterator[Batch]:
        pool, where, labels, counts = inputs.pool, inputs.where, inputs.labels, inputs.counts
        steps, _, size = where.shape
        sizes = torch.from_numpy(counts).to(self.device)
        lengths, valid = sizes.to(self.dtype), torch.arange(size, device=self.device) < sizes.unsqueeze(-1)
        bases = torch.from_numpy(plan.bases).to(self.device)
        for s in range(steps):
            self.threads.go_on()
            active = int((counts[s] > 0).sum())
            full = bool((counts[s, :active] == size).all())
            # A lone unpadded worker takes its batch at its true size; stacked ones share one width.
            width = size if self.kernel.padded else int(counts[s, 0])
            x = pool.index_select(0, where[s, :active, :width].reshape(-1)).view(active, width, *pool.shape[1:])
            weight = None if full or not self.kernel.padded else valid[s, :active].to(self.dtype)
            yield Batch(x, labels[s, :active, :width], weight, lengths[s, :active], bases[:active], s)

    def _transformed(self, batch: Batch, chunk: _Chunk) -> Batch:
        """The batch after the user's random change of its inputs, if there is one."""
        work = self.work
        if work.transform is None:
            return batch
        changed, stream = batch.x.clone(), f"transform/{chunk.phase.stream}"
        for k, count in enumerate(batch.count.int().tolist()):
            worker = work.ids[chunk.plan.rows[k]]
            rng = generator(work.source.seed, stream, worker=worker, round=chunk.round, epoch=batch.step)
            changed[k, :count] = work.transform(batch.x[k, :count], rng)
        return replace(batch, x=changed)

    def _seed(self, stream: str, row: int, round: int = 0) -> AbstractContextManager[None]:
        """For nets that draw from torch's own generator: make their draws a function of these and the seed."""
        seed = key(self.work.source.seed, stream, worker=self.work.ids[row], round=round)
        return torch_seed(seed) if self.seeded else nullcontext()

    def _replica(self) -> Split:
        """This thread's own copy of the net, as a module can be pointed at only one worker at a time."""
        if getattr(self._own, "model", None) is None:
            self._own.model = twin(self.work.model)
            self._replicas.add(self._own.model)
        # torch may choose another kernel for weights that require gradients, even if none are computed: reset, so that
        # a worker's numbers do not depend on what this copy was used for before.
        return self._own.model.requires_grad_(False)

    def _let_go(self) -> None:
        """Point the replicas at the first weights: one that still points at a row would keep all rows in memory."""
        first = self.work.model
        params = {name: parameter.detach().unsqueeze(0) for name, parameter in first.named_parameters()}
        buffers = {name: buffer.unsqueeze(0) for name, buffer in statistics(first).items()}
        for model in self._replicas:
            point_at(model, params, buffers, 0)

    def _each(self, work: Callable[..., Result], items: Sequence) -> list[Result]:
        """``work`` on every item, results in order."""
        # Whatever the caller's gradient mode is: every thread has its own.
        run = torch.enable_grad()(work)
        try:
            # Last batches come in many shapes.
            with self.precision.settings(self.device, tune=False):
                return self.threads.map(run, items) if self.device.type == "cpu" else [run(item) for item in items]
        finally:
            self._let_go()

    def _passes(self, rows: slice) -> Iterator[slice]:
        """Parts of a range of rows that go through the net together where no mini-batches are drawn."""
        size = _FORWARD_BATCH[self.device.type]
        for start in range(rows.start, rows.stop, size):
            self.threads.go_on()
            yield slice(start, min(start + size, rows.stop))


def _rows_of(model: Split, params: Params, buffers: Buffers, index: Tensor | slice) -> tuple[Params, Buffers]:
    """Some workers' rows of what a net has."""
    own = {name: params[name][index] for name, _ in model.named_parameters()}
    return own, {name: buffers[name][index] for name, _ in model.named_buffers() if name in buffers}


def _narrow(phase: Phase, rows: Tensor | slice, names: Collection[str]) -> Phase:
    """The phase with its per-worker tensors cut to some rows, and its anchor and mask to the named leaves."""

    def narrow(tree: Params) -> Params:
        return {name: leaf[rows] for name, leaf in tree.items()}

    def named(tree: Params) -> Params:
        return narrow({name: leaf for name, leaf in tree.items() if name in names})

    return replace(
        phase,
        constants=narrow(phase.constants),
        proximal=None if phase.proximal is None else (named(phase.proximal[0]), phase.proximal[1]),
        mask=None if phase.mask is None else named(phase.mask),
    )
