"""D-PSGD: decentralised SGD, one model for all.

A round of worker i, which holds a whole model w_i:

1. ``epochs`` passes over its own samples move w_i;
2. w_i becomes sum_j P_ij w_j over itself and its neighbours.

Sent: w_i, head included, to every neighbour.

Reference: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017. Differences:
the paper takes one mini-batch step a round (``steps=1``); several passes match the other algorithms' work, as in
DePRL's comparison.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from manyheads.algorithms.base import Algorithm, Context, Log, State, amount
from manyheads.algorithms.phases import WHOLE, train_whole


@dataclass(frozen=True, kw_only=True)
class DPSGD(Algorithm):
    epochs: int = 3
    """Passes over the local samples."""
    steps: int | None = None
    """Mini-batch steps, instead of passes."""
    order: Literal["train-mix", "mix-train"] = "train-mix"
    """Train and then mix, or mix first."""
    evaluate: Literal["own", "mean-model"] = "own"
    """Whether a worker is scored with its own model or with the mean of all."""

    name: ClassVar[str] = "d-psgd"
    title: ClassVar[str] = "D-PSGD"

    def local(self, state: State, round: int, ctx: Context) -> tuple[State, Log]:
        return train_whole(state, round, ctx, amount(self.epochs, self.steps), ctx.present(round))

    def mix(self, state: State, round: int, ctx: Context) -> State:
        return ctx.mix(state, WHOLE, round)

    def models(self, state: State, ctx: Context) -> State:
        return state if self.evaluate == "own" else ctx.mean_model(state)
