"""FedRep: a shared representation averaged by a server, private heads.

A round: the server sends phi to the workers that take part; each trains its head on the frozen phi for
``head_epochs`` passes, then phi under its head for ``body_epochs`` passes; the server averages the representations.

Sent: phi up and down, by those who take part. The head never leaves its worker.

Reference: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021.
Differences: two optimisers instead of one, so that a frozen part really stays put; no extra head-only round at the
end; all workers take part by default.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from manyheads.algorithms.base import Algorithm, Context, Log, State, amount, check_share, merge
from manyheads.algorithms.phases import REPRESENTATION, train_alternating
from manyheads.algorithms.server import Weighting, server_weights


@dataclass(frozen=True, kw_only=True)
class FedRep(Algorithm):
    head_epochs: int = 2
    """Passes over the local samples that move the head."""
    head_steps: int | None = None
    """Mini-batch steps that move the head, instead of passes."""
    body_epochs: int = 1
    """Passes over the local samples that move the representation."""
    body_steps: int | None = None
    """Mini-batch steps that move the representation, instead of passes."""
    weighting: Weighting = "samples"
    """Whether the server weighs workers by their samples or all alike."""
    participation: float = 1.0
    """Part of the workers that takes part in a round."""
    heads: Literal["same", "random"] = "same"
    """Whether all heads start equal or each is drawn by itself."""
    frozen: Literal["train", "eval"] = "train"
    """Mode of the frozen representation while the head trains."""

    name: ClassVar[str] = "fedrep"
    title: ClassVar[str] = "FedRep"
    private: ClassVar[frozenset[str]] = frozenset({"head"})
    server: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_share("participation", self.participation)

    @property
    def head_passes(self) -> int:
        return amount(self.head_epochs, self.head_steps).count

    def init(self, ctx: Context) -> State:
        return ctx.initial if self.heads == "same" else merge(ctx.initial, ctx.random_heads())

    def local(self, state: State, round: int, ctx: Context) -> tuple[State, Log]:
        head, body = amount(self.head_epochs, self.head_steps), amount(self.body_epochs, self.body_steps)
        rows = ctx.rows(ctx.participants(round, self.participation))
        return train_alternating(state, round, ctx, head, body, self.frozen, rows)

    def mix(self, state: State, round: int, ctx: Context) -> State:
        return ctx.average(state, REPRESENTATION, server_weights(ctx, round, self.weighting, self.participation))
