"""DisPFL: sparse personal models whose masks evolve, averaged where neighbours' masks overlap.

A round of worker i, which holds weights w_i under a mask m_i:

1. ``epochs`` passes over its own samples move w_i, masked after every step;
2. its mask evolves: in each layer a share of the kept weights, the smallest, is dropped, and as many are regrown where
   the gradient of one mini-batch is largest (or at random); the share falls along a cosine to 0;
3. w_i becomes the mean, weight by weight, over itself and those neighbours whose masks have that weight; then its new
   mask applies.

Sent to every neighbour: the kept weights and the mask, at one bit per weight. The new mask is sent in the next round.

Reference: Dai et al., "DisPFL: Towards Communication-Efficient Personalized Federated Learning via Decentralized
Sparse Training", ICML 2022. Differences: any graph instead of ten random neighbours a round (which is
``--graph in-neighbours:10 --redraw``); all neighbours have equal weight, whatever mixing weights other algorithms use;
the state is scored after mixing, like every other algorithm's (``order="mix-train"`` begins a round where the official
code does).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil, cos, pi
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from manyheads.algorithms.base import Algorithm, Context, Log, State, amount, check_share, run_phases
from manyheads.algorithms.phases import WHOLE
from manyheads.engine.phase import Phase, Steps
from manyheads.randomness import hashed, key
from manyheads.tree import Params, add_prefix, flatten, row_shapes, select, strip_prefix, with_rows

NEXT, SHARED = "mask", "shared_mask"
_MASK = (1 << 63) - 1
_AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 28}
"""Scores that are ranked together: as many as stay in a core's cache, or as fill a GPU."""


@dataclass(frozen=True, kw_only=True)
class DisPFL(Algorithm):
    density: float = 0.5
    """Fraction of the weights that each worker keeps."""
    sparsity: Literal["erk", "uniform"] = "erk"
    """How the density is spread over layers: Erdos-Renyi kernel, or the same in each."""
    regrow: Literal["gradient", "random"] = "gradient"
    """Where weights regrow: at the largest gradients, or at random."""
    anneal: float = 0.5
    """Share of the kept weights that is dropped and regrown in the first round; falls along a cosine to 0."""
    epochs: int = 3
    """Passes over the local samples."""
    steps: int | None = None
    """Mini-batch steps, instead of passes."""
    order: Literal["train-mix", "mix-train"] = "train-mix"
    """Train and then mix, or mix first, as in the official code."""

    name: ClassVar[str] = "dispfl"
    title: ClassVar[str] = "DisPFL"
    private: ClassVar[frozenset[str]] = frozenset({NEXT})
    row_stochastic: ClassVar[bool] = True
    uses_rounds: ClassVar[bool] = True
    extra_rows: ClassVar[float] = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("density", self.density)
        check_share("anneal", self.anneal, zero=True)

    def init(self, ctx: Context) -> State:
        weights = ctx.initial.params
        kept = densities(row_shapes(weights), self.density, self.sparsity)
        masks = {}
        for layer, (name, leaf) in enumerate(weights.items()):
            count = round(kept[name] * leaf[0].numel())
            masks[name] = _no_mask_yet(leaf)
            for rows in _ranked_together(leaf):
                scores = random_scores(leaf[rows], ctx.seed, ctx.ids[rows], round=0, stream=f"mask/{layer}")
                flatten(masks[name])[rows] = largest(scores, count)
        return State(
            {
                **{name: leaf * masks[name] for name, leaf in weights.items()},
                **add_prefix(masks, NEXT),
                **add_prefix(masks, SHARED),
            },
            ctx.initial.buffers,
        )

    def local(self, state: State, round: int, ctx: Context) -> tuple[State, Log]:
        rows = ctx.present(round)
        weights, mask = select(state.params, WHOLE), strip_prefix(state.params, SHARED)
        passes = amount(self.epochs, self.steps)
        phase = Phase("body", WHOLE, passes, ctx.rates.sgd(round), ctx.objective, mask=mask)
        trained, log = run_phases(State(weights, state.buffers), [phase], round, ctx, rows)
        evolved = with_rows(strip_prefix(state.params, NEXT), self._evolve(trained, mask, round, ctx), rows)
        return State({**state.params, **trained.params, **add_prefix(evolved, NEXT)}, trained.buffers), log

    def mix(self, state: State, round: int, ctx: Context) -> State:
        mask = strip_prefix(state.params, SHARED)
        evolved = with_rows(mask, strip_prefix(state.params, NEXT), ctx.present(round))
        mixed = ctx.network.mix(select(state.params, WHOLE), round, mask)
        buffers = {**state.buffers, **ctx.network.mix(ctx.statistics(state, WHOLE), round)}
        params = {name: leaf.mul_(evolved[name]) for name, leaf in mixed.items()}
        return State({**state.params, **params, **add_prefix(evolved, SHARED)}, buffers)

    def models(self, state: State, ctx: Context) -> State:
        return State(select(state.params, WHOLE), state.buffers)

    def _evolve(self, trained: State, mask: Params, round: int, ctx: Context) -> Params:
        """Every worker's next mask: as many weights kept in each layer as before."""
        share = self.anneal / 2 * (1 + cos(pi * round / ctx.rounds))
        gradients: Params = {}
        if self.regrow == "gradient" and share > 0 and self.density < 1:
            phase = Phase("regrow", WHOLE, Steps(1), ctx.rates.sgd(round), ctx.objective)
            gradients = ctx.engine.gradient(trained.params, trained.buffers, phase, round, batches=Steps(1))
        evolved = dict(mask)
        for layer, (name, old) in enumerate(mask.items()):
            # All workers keep equally many weights of a layer.
            total, kept = old[0].numel(), int(old[0].count_nonzero())
            dropped = ceil(share * kept)
            if kept == total or dropped == 0:
                continue
            evolved[name] = _no_mask_yet(old)
            for rows in _ranked_together(old):
                size = flatten(trained.params[name][rows]).abs()
                stay = largest(size.masked_fill_(flatten(old[rows]) == 0, -1), kept - dropped)
                if self.regrow == "gradient":
                    scores = flatten(gradients[name][rows]).abs()
                else:
                    scores = random_scores(old[rows], ctx.seed, ctx.ids[rows], round=round + 1, stream=f"mask/{layer}")
                flatten(evolved[name])[rows] = stay | largest(scores.masked_fill_(stay, -1), dropped)
        return evolved


def densities(shapes: dict[str, torch.Size], target: float, kind: Literal["erk", "uniform"]) -> dict[str, float]:
    """Each layer's density. ERK keeps more of small layers, in proportion to (sum of dims) / (product of dims)."""
    if target >= 1 or kind == "uniform":
        return dict.fromkeys(shapes, target)
    # A scalar has no dims: it counts as a layer of one number.
    raw = {name: max(1, sum(shape)) / max(1, shape.numel()) for name, shape in shapes.items()}
    size = {name: shape.numel() for name, shape in shapes.items()}
    dense: set[str] = set()
    while True:
        sparse = [name for name in shapes if name not in dense]
        budget = target * _total(size, sparse) - (1 - target) * _total(size, dense)
        scale = budget / sum(raw[name] * size[name] for name in sparse)
        top = max(raw[name] for name in sparse)
        if scale * top <= 1:
            return {name: 1.0 if name in dense else scale * raw[name] for name in shapes}
        dense |= {name for name in sparse if raw[name] == top}


def _total(size: dict[str, int], names: Iterable[str]) -> int:
    return sum(size[name] for name in names)


def _no_mask_yet(leaf: Tensor) -> Tensor:
    """Memory for the mask of a leaf [W, ...], contiguous, so that ``flatten`` gives a view that can be filled."""
    return torch.empty(leaf.shape, dtype=torch.uint8, device=leaf.device)


def _ranked_together(leaf: Tensor) -> Iterator[slice]:
    """All rows of a leaf [W, ...], some at a time: the scores of all may fit neither into a cache nor into a GPU."""
    at_once = max(1, _AT_ONCE[leaf.device.type] // max(1, leaf[0].numel()))
    return (slice(start, start + at_once) for start in range(0, len(leaf), at_once))


def largest(scores: Tensor, count: int) -> Tensor:
    """Where each row's ``count`` largest scores are: [W, n] -> [W, n] bool. The only negative score is -1.

    Of equal scores the first ones are taken, on every device: many gradients are exactly 0.
    """
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    return by_halving(scores, count) if scores.device.type == "cpu" else by_selection(scores, count)


def by_halving(scores: Tensor, count: int) -> Tensor:
    """Find each row's threshold by bisection: on a core, counting the scores above one is faster than sorting."""
    # Read as integers, the bits of such scores have the same order, and bisection comes to an end.
    keys = scores.view(torch.int32 if scores.dtype.itemsize == 4 else torch.int64).numpy()
    chosen = np.empty(keys.shape, dtype=bool)
    for row, out in zip(keys, chosen, strict=True):
        low, high = int(row.min()), int(row.max()) + 1
        while high - low > 1:
            middle = (low + high) // 2
            above = np.count_nonzero(row >= middle)
            low, high = (middle if above >= count else low), (middle if above <= count else high)
        np.greater_equal(row, low, out=out)
        if excess := np.count_nonzero(out) - count:
            out[np.flatnonzero(row == low)[-excess:]] = False
    return torch.from_numpy(chosen)


def by_selection(scores: Tensor, count: int) -> Tensor:
    """All rows at once; not by kthvalue or a cumsum of each row, which leave a row to a single block of the GPU."""
    least = scores.topk(count, sorted=False).values.amin(1, keepdim=True)
    above, equal = scores > least, scores == least
    room = count - above.sum(1, keepdim=True)
    so_far = equal.flatten().cumsum(0).view_as(equal)
    in_rows_before = so_far[:, -1:] - equal.sum(1, keepdim=True)
    return above | (equal & (so_far <= in_rows_before + room))


def random_scores(leaf: Tensor, seed: int, ids: tuple[int, ...], *, round: int, stream: str) -> Tensor:
    """A random order of each worker's weights in one layer: non-negative int64 [W, n], a function of the arguments."""
    keys = torch.tensor([key(seed, stream, worker=worker, round=round) for worker in ids], device=leaf.device)
    return hashed(keys, leaf[0].numel()) & _MASK
