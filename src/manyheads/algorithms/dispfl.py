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

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from math import ceil, cos, pi
from typing import ClassVar, Literal

import torch
from torch import Tensor

from manyheads.algorithms.base import Algorithm, Context, Log, State, amount, check_share, run_phases
from manyheads.algorithms.phases import WHOLE
from manyheads.algorithms.ranking import Scores, largest, mask_of, random_scores
from manyheads.engine.phase import Phase, Steps
from manyheads.tree import Params, add_prefix, flatten, select, strip_prefix, with_rows

NEXT, SHARED = "mask", "shared_mask"


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
    """Train and then mix, or mix first."""

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
        kept = densities({name: leaf.shape[1:] for name, leaf in weights.items()}, self.density, self.sparsity)
        masks = {}
        for layer, (name, leaf) in enumerate(weights.items()):
            scores = partial(random_scores, leaf, ctx.seed, ctx.ids, round=0, stream=f"mask/{layer}")
            masks[name] = _drawn(leaf, scores, round(kept[name] * leaf[0].numel()))
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
            kept = int(old[0].count_nonzero())
            dropped = ceil(share * kept)
            if kept < old[0].numel() and dropped:
                if self.regrow == "gradient":
                    scores = partial(_sizes, gradients[name])
                else:
                    scores = partial(random_scores, old, ctx.seed, ctx.ids, round=round + 1, stream=f"mask/{layer}")
                evolved[name] = _moved(old, partial(_sizes, trained.params[name]), scores, kept - dropped, dropped)
        return evolved


def _drawn(leaf: Tensor, scores: Scores, count: int) -> Tensor:
    """A mask with ``count`` weights of each worker."""
    return mask_of(leaf, lambda rows: largest(scores(rows), count))


def _moved(old: Tensor, sizes: Scores, scores: Scores, stays: int, regrown: int) -> Tensor:
    """The mask with the largest of the kept weights, and with those of the others whose scores are largest."""

    def choose(rows: slice) -> Tensor:
        stay = largest(sizes(rows).masked_fill_(flatten(old[rows]) == 0, -1), stays)
        return stay | largest(scores(rows).masked_fill_(stay, -1), regrown)

    return mask_of(old, choose)


def _sizes(leaf: Tensor, rows: slice) -> Tensor:
    """Absolute values in some rows of a leaf [W, ...]: [rows, n]."""
    return flatten(leaf[rows]).abs()


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
