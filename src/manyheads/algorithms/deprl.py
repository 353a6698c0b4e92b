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

from manyheads.algorithms.base import Context, State
from manyheads.algorithms.personal_heads import PersonalHeads
from manyheads.algorithms.phases import REPRESENTATION


@dataclass(frozen=True, kw_only=True)
class DePRL(PersonalHeads):
    order: Literal["train-mix", "mix-train"] = "train-mix"
    """Train and then mix, or mix first."""

    name: ClassVar[str] = "deprl"
    title: ClassVar[str] = "DePRL"

    def mix(self, state: State, round: int, ctx: Context) -> State:
        return ctx.mix(state, REPRESENTATION, round)
