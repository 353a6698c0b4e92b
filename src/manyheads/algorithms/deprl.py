"""DePRL: personalised decentralised learning with a shared representation.

A round of worker i, which holds a representation phi_i and a head theta_i:

1. ``head_epochs`` passes over its own samples move theta_i, phi_i frozen (rate alpha);
2. ``body_epochs`` passes move phi_i under the new head (rate beta);
3. phi_i becomes sum_j P_ij phi_j over itself and its neighbours.

Sent: phi_i to every neighbour. The head never leaves its worker.

Reference: Xiong, Yan, Wang, Li, "DePRL: Achieving Linear Convergence Speedup in Personalized Decentralized Learning
with Shared Representations", AAAI 2024. Differences: the paper's tau local steps are read as epochs, as its text and
the authors' code do (``head_steps`` and ``body_steps`` give the literal reading); the head after tau steps is
theta(k, tau), not theta(k, tau - 1).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from manyheads.algorithms.base import Algorithm, Context, Log, State, amount, merge
from manyheads.algorithms.phases import REPRESENTATION, train_alternating
from manyheads.models.split import Split, drawn_layers


@dataclass(frozen=True, kw_only=True)
class DePRL(Algorithm):
    head_epochs: int = 2
    """Passes over the local samples that move the head."""
    head_steps: int | None = None
    """Mini-batch steps that move the head, instead of passes."""
    body_epochs: int = 1
    """Passes over the local samples that move the representation."""
    body_steps: int | None = None
    """Mini-batch steps that move the representation, instead of passes."""
    order: Literal["train-mix", "mix-train"] = "train-mix"
    """Train and then mix, as in the paper, or mix first, as in the authors' code."""
    heads: Literal["same", "random"] = "same"
    """Whether all heads start equal or each is drawn by itself."""
    frozen: Literal["train", "eval"] = "train"
    """Mode of the frozen representation while the head trains."""

    name: ClassVar[str] = "deprl"
    title: ClassVar[str] = "DePRL"
    private: ClassVar[frozenset[str]] = frozenset({"head"})

    @property
    def head_passes(self) -> int:
        return amount(self.head_epochs, self.head_steps).count

    def prepare(self, model: Split) -> Split:
        if self.heads == "random":
            # Refuses a head without them while nothing is written yet.
            drawn_layers(model.get_submodule("head"))
        return model

    def init(self, ctx: Context) -> State:
        return ctx.initial if self.heads == "same" else merge(ctx.initial, ctx.random_heads())

    def local(self, state: State, round: int, ctx: Context) -> tuple[State, Log]:
        head, body = amount(self.head_epochs, self.head_steps), amount(self.body_epochs, self.body_steps)
        return train_alternating(state, round, ctx, head, body, self.frozen, ctx.present(round))

    def mix(self, state: State, round: int, ctx: Context) -> State:
        return ctx.mix(state, REPRESENTATION, round)
