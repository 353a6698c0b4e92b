"""Many workers in stacked products, with one step of all of them in one recording: for nets without statistics.

Workers are sorted by their number of batches, and there are recordings for a few numbers of leading workers, so that
those who have finished cost little. A recording that still includes some of them does not move them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from manyheads.engine.chain import Chain, is_chain
from manyheads.engine.cuda_graphs.compiled import compiled
from manyheads.engine.cuda_graphs.descent import FlatDescent, UpdateRule, extras
from manyheads.engine.cuda_graphs.feed import Entries, Feed, upload
from manyheads.engine.cuda_graphs.fused import layer_update
from manyheads.engine.cuda_graphs.lane import Lane, Replay, take_turns
from manyheads.engine.cuda_graphs.rows import FlatRows, Kind, copy_all, load, store
from manyheads.engine.cuda_graphs.task import Task
from manyheads.engine.kernel import dropout_keys, set_modes, summed_loss, summed_losses
from manyheads.engine.phase import Phase
from manyheads.engine.precision import Precision
from manyheads.engine.schedule import Schedule
from manyheads.engine.sgd import clip_factors
from manyheads.engine.vmapped import Outputs
from manyheads.models.dropout import dropouts
from manyheads.models.norm import has_batchnorm
from manyheads.models.split import Split, statistics, twin
from manyheads.tree import Params, add_prefix, group, leading

_SHARES = (1.0, 0.75, 0.5, 0.25, 0.125)
"""Parts of the stack that have recordings of their own."""
_FEWEST = 8
"""No recording is for fewer workers than this, unless the stack is smaller."""


def stackable(model: Split, *, images: bool) -> bool:
    """Whether stacking is worth it; ``images``: chains may have convolutions.

    Statistics would need masks, and convolutions outside of chains would become grouped ones, which are slow.
    """
    if statistics(model) or has_batchnorm(model):
        return False
    return is_chain(model, images=images) or not has_convolutions(model)


def has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(layer, nn.modules.conv._ConvNd) for layer in model.modules())


@dataclass(frozen=True)
class Step:
    """One mini-batch of each of the first A workers."""

    x: Tensor
    """[A, B, ...]."""
    y: Tensor
    """[A, B, ...]."""
    count: Tensor
    """True sizes [A]; 0: the worker has finished."""
    base: Tensor
    """Dropout bases [A]."""
    number: Tensor
    """The step's place in the phase, [1]."""
    constants: Params
    """[A, ...] each."""


@dataclass(frozen=True)
class Setting:
    """What the methods of doing such steps are made from."""

    model: Split
    phase: Phase
    moving: FlatRows
    frozen: FlatRows
    rate: Tensor
    precision: Precision
    compile: bool


class StackedTrainer:
    """The recordings of one kind of phase for up to ``num_rows`` workers at once.

    Two or four smaller stacks on streams beside each other were measured on an H200: 7 and 12 % slower than one.
    """

    def __init__(
        self,
        model: Split,
        phase: Phase,
        entries: Entries,
        *,
        num_rows: int,
        capacity: int,
        batch_size: int,
        precision: Precision,
        compile: bool,
        lane: Lane,
    ) -> None:
        """``capacity``: the most steps that a worker takes in a phase."""
        model = twin(model)
        set_modes(model, phase)
        self.entries, self.lane, self.num_rows = entries, lane, num_rows
        self.device, dtype = entries.y.device, next(model.parameters()).dtype
        chained = is_chain(model, images=True)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        kind = Kind(num_rows, self.device, dtype, channels_last=True, low=precision.low_names(model))
        beside = extras(phase, gradient=not chained)
        self.moving = FlatRows({n: s for n, s in shapes.items() if group(n) in phase.update}, kind, beside)
        self.frozen = FlatRows({n: s for n, s in shapes.items() if group(n) not in phase.update}, kind)
        self.constants = {name: leaf.new_zeros(num_rows, *leaf.shape[1:]) for name, leaf in phase.constants.items()}
        places = {**entries.like(num_rows, batch_size), "count": ((num_rows,), torch.int64)}
        self.feed = Feed(capacity, places, self.device)
        self.bases = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.rate = torch.zeros(1, dtype=dtype, device=self.device)
        self.sums = torch.zeros(num_rows, dtype=dtype, device=self.device)
        method = _Chain if chained else _Vmapped
        self.method = method(Setting(model, phase, self.moving, self.frozen, self.rate, precision, compile))
        self.sizes = sorted({max(min(_FEWEST, num_rows), round(num_rows * share)) for share in _SHARES})
        self.recordings: dict[int, Replay] = {}

    def record(self, plan: Schedule) -> None:
        sizes = {size for chunk in self._chunks(plan) for size in self._sizes(plan, chunk)}
        for size in sorted(sizes - self.recordings.keys(), reverse=True):
            self.cursor.zero_()
            self.recordings[size] = self.lane.record(lambda size=size: self._step(size))

    def run(self, task: Task) -> Tensor:
        sums = self.sums.new_zeros(len(task.plan.rows))
        self.rate.fill_(task.phase.optimizer.lr)
        take_turns([(self.lane, self._work(task, sums))])
        return sums

    def _work(self, task: Task, sums: Tensor) -> Iterator[None]:
        """Chunk after chunk: load its workers, replay its steps, store its workers."""
        plan = task.plan
        for chunk in self._chunks(plan):
            rows = list(plan.rows[chunk])
            entries, counts = plan.side_by_side(chunk, self.num_rows)
            values = self.entries.look_up(upload(entries, self.device))
            self.feed.fill({**values, "count": upload(counts, self.device)})
            self.bases[: len(rows)].copy_(upload(plan.bases[chunk], self.device))
            self._load(task, rows)
            for size in self._sizes(plan, chunk):
                self.recordings[size]()
            store(self.moving.weight, task.moved, rows)
            sums[chunk].copy_(self.sums[: len(rows)])
            yield

    def _load(self, task: Task, rows: list[int]) -> None:
        self.moving.load(task.params, rows)
        self.moving.load_extras(task.phase, rows)
        self.frozen.load(task.params, rows)
        load(self.constants, task.phase.constants, rows)
        self.cursor.zero_()
        self.sums.zero_()

    def _chunks(self, plan: Schedule) -> list[slice]:
        return [slice(k, k + self.num_rows) for k in range(0, len(plan.rows), self.num_rows)]

    def _sizes(self, plan: Schedule, chunk: slice) -> list[int]:
        """The recording for each of a chunk's steps: the smallest that holds all workers with batches left."""
        lengths = plan.lengths[chunk]
        active = [int((lengths > step).sum()) for step in range(int(lengths.max()))]
        return [next(size for size in self.sizes if size >= count) for count in active]

    @torch.no_grad()
    def _step(self, size: int) -> None:
        here = self.feed.read(self.cursor)
        rows, count = here["rows"][:size], here["count"][:size]
        x = self.entries.pool.take(rows.flatten()).unflatten(0, rows.shape)
        constants = leading(self.constants, size)
        sums = self.method.step(Step(x, here["y"][:size], count, self.bases[:size], self.cursor, constants))
        self.sums[:size].add_(sums.masked_fill(count == 0, 0))
        self.cursor.add_(1)


class _Chain:
    """Backward rules written by hand, as on the CPU; linear layers are moved by the factors of their gradients."""

    def __init__(self, at: Setting) -> None:
        self.phase, self.rate, self.precision, self.dtype = at.phase, at.rate, at.precision, at.rate.dtype
        self.chain = Chain(at.model, at.phase, {**at.frozen.compute, **at.moving.compute})
        self.part_of = {name: part for part in at.moving.parts for name in part.layout.shapes}
        # Code for the first number of workers is compiled for that number; all others share code for any number.
        self.gradients = compiled(self._gradients, at.compile, dynamic=None)
        rule, cores = UpdateRule.of(at.phase), at.precision.tensor_cores
        self.update = layer_update(rule, at.rate.device, self.dtype, triton=at.compile, tensor_cores=cores)

    def step(self, step: Step) -> Tensor:
        factors, gradients, clip, sums = self.gradients(
            step.x, step.y, step.count, step.base, step.number, step.constants
        )
        for layer, d, x, bias in factors:
            part = self.part_of[f"{layer}.weight"]
            self.update.by_factors(part, layer, d, x, clip, step.count, self.rate, bias=bias)
        for name, gradient in gradients:
            self.update.by_gradient(self.part_of[name], name, gradient, clip, step.count, self.rate)
        return sums

    def _gradients(
        self, x: Tensor, y: Tensor, count: Tensor, base: Tensor, number: Tensor, constants: Params
    ) -> tuple[list[tuple[str, Tensor, Tensor, bool]], list[tuple[str, Tensor]], Tensor, Tensor]:
        """Gradients of linear layers as factors (layer, d, x, bias), those of other leaves, clip factors and losses.

        The last two are [A]: what a worker's gradients are multiplied by, and the sum of its losses.
        """
        active, size = x.shape[:2]
        with self.precision.autocast(x.device):
            outputs, tapes = self.chain.forward(x, base, number)
        valid = (torch.arange(size, device=x.device) < count.unsqueeze(1)).to(self.dtype)

        def mean_losses(outputs: Params) -> tuple[Tensor, Tensor]:
            sums = summed_losses(self.phase.objective, outputs, y, constants, valid)
            return (sums / count.clamp(min=1)).sum(), sums

        exact = {name: output.to(self.dtype) for name, output in outputs.items()}
        gradients, sums = grad(mean_losses, has_aux=True)(exact)
        low = {name: gradient.to(outputs[name].dtype) for name, gradient in gradients.items()}
        with self.precision.autocast(x.device):
            contributions = self.chain.backward(tapes, low)
        # Over as many positions as an image has, storing the product is cheaper than reading its factors again.
        products = {c.name: c.product() for c in contributions if isinstance(c.layer, nn.Conv2d)}
        clip = torch.ones(active, dtype=self.dtype, device=x.device)
        if self.phase.optimizer.clip is not None and contributions:
            squares = torch.stack([c.square_norm(self.dtype, products.get(c.name)) for c in contributions])
            clip = clip_factors(squares.sum(0), self.phase.optimizer.clip)
        factors = [(c.name, c.d, c.x, c.bias) for c in contributions if c.name not in products]
        leaves = [(f"{name}.weight", product.flatten(1)) for name, product in products.items()]
        biases = [(f"{c.name}.bias", c.d.sum(1)) for c in contributions if c.name in products and c.bias]
        return factors, leaves + biases, clip, sums


class _Vmapped:
    """Any other net that draws no random numbers of its own, through torch.func's vmap."""

    def __init__(self, at: Setting) -> None:
        self.net, self.phase, self.precision = Outputs(at.model), at.phase, at.precision
        self.moving, self.frozen = at.moving, at.frozen
        self.dropouts, self.dtype = dropouts(at.model), at.rate.dtype
        self.descent = FlatDescent(UpdateRule.of(at.phase), at.rate, compile=at.compile)

    def step(self, step: Step) -> Tensor:
        active, size = step.x.shape[:2]
        moving = leading(self.moving.compute, active)
        others = leading(self.frozen.compute, active) | dropout_keys(self.dropouts, step.base, step.number)
        valid = (torch.arange(size, device=step.x.device) < step.count.unsqueeze(1)).to(self.dtype)

        def loss(
            moving: Params, others: Params, x: Tensor, y: Tensor, valid: Tensor, count: Tensor, constants: Params
        ) -> tuple[Tensor, Tensor]:
            with self.precision.autocast(x.device):
                outputs = functional_call(self.net, add_prefix({**others, **moving}, "net"), (x,))
            outputs = {name: output.to(self.dtype) for name, output in outputs.items()}
            total = summed_loss(self.phase.objective, outputs, y, constants, valid)
            return total / count, total

        gradients, sums = vmap(grad(loss, has_aux=True))(
            moving, others, step.x, step.y, valid, step.count.clamp(min=1), step.constants
        )
        into = leading(self.moving.gradient, active)
        copy_all(into.values(), [gradients[name] for name in into])
        # The update passes over all rows of the stack; those beyond the first A are not active.
        counts = torch.nn.functional.pad(step.count, (0, len(self.moving.parts[0].weight) - active))
        self.descent.step(self.moving, (counts > 0).unsqueeze(1))
        return sums
