"""DisPFL: sparse personal models whose masks evolve, averaged where neighbours' masks overlap.

A round of worker i, which holds weights w_i under a mask m_i:

1. ``epochs`` passes over its own samples move w_i, masked after every step;
2. its mask evolves: in each layer a share of the smallest weights is dropped, as many are regrown where the gradient
   of one mini-batch is largest (or at random); the share falls along a cosine to 0;
3. w_i becomes the mean, weight by weight, over itself and those neighbours whose masks have that weight; then its new
   mask applies.

Sent: the kept weights and one bit per weight, to every neighbour. The new mask stays until the next round.

Reference: Dai et al., "DisPFL: Towards Communication-Efficient Personalized Federated Learning via Decentralized
Sparse Training", ICML 2022. Differences: any graph instead of ten random neighbours a round (which is
``--graph in-neighbours:10 --redraw``); neighbours count alike, whatever the mixing weights of other algorithms; the
state is scored after mixing like every other algorithm's (``order="mix-train"`` cuts the round where the official code
does).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, cos, pi
from typing import ClassVar, Literal

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
            scores = random_scores(leaf, ctx.seed, ctx.ids, round=0, stream=f"mask/{layer}")
            masks[name] = largest(scores, count).view(leaf.shape)
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
        params = {name: leaf * evolved[name] for name, leaf in mixed.items()}
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
            total, kept = old[0].numel(), int(old[0].count_nonzero())
            dropped = ceil(share * kept)
            if kept == total or dropped == 0:
                continue
            flat, size = flatten(old).bool(), flatten(trained.params[name]).abs()
            stay = largest(size.masked_fill(~flat, -1.0), kept - dropped).bool()
            if self.regrow == "gradient":
                scores = flatten(gradients[name]).abs()
            else:
                scores = random_scores(old, ctx.seed, ctx.ids, round=round + 1, stream=f"mask/{layer}")
            grown = largest(scores.masked_fill(stay, -1), dropped).bool()
            evolved[name] = (stay | grown).to(old.dtype).view_as(old)
        return evolved


def densities(shapes: dict[str, torch.Size], target: float, kind: Literal["erk", "uniform"]) -> dict[str, float]:
    """Each layer's density. ERK keeps more of small layers, in proportion to (sum of dims) / (product of dims)."""
    if target >= 1 or kind == "uniform":
        return dict.fromkeys(shapes, target)
    # A single number is a layer of one.
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


def largest(scores: Tensor, count: int) -> Tensor:
    """Ones at each row's ``count`` largest scores, zeros elsewhere: [W, n] -> [W, n] uint8.

    Of equal scores the first count, on every device: many gradients are exactly 0.
    """
    mask = torch.zeros(scores.shape, dtype=torch.uint8, device=scores.device)
    if count:
        size = scores.shape[1]
        at_once = max(1, _AT_ONCE[scores.device.type] // size)
        for rows, out in zip(scores.split(at_once), mask.split(at_once), strict=True):
            least = rows.kthvalue(size - count + 1, keepdim=True).values
            above, equal = rows > least, rows == least
            room = count - above.sum(1, keepdim=True)
            out.copy_(above | (equal & (equal.cumsum(1) <= room)))
    return mask


def random_scores(leaf: Tensor, seed: int, ids: tuple[int, ...], *, round: int, stream: str) -> Tensor:
    """A random order of each worker's weights in one layer: non-negative int64 [W, n], a function of the arguments."""
    keys = torch.tensor([key(seed, stream, worker=worker, round=round) for worker in ids], device=leaf.device)
    return hashed(keys, leaf[0].numel()) & _MASK
