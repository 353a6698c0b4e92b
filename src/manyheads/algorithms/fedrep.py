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

from manyheads.algorithms.base import Context, Log, State, amount, merge
from manyheads.algorithms.phases import REPRESENTATION, train_alternating
from manyheads.algorithms.server import ServerAlgorithm
from manyheads.models.split import Split, drawn_layers


@dataclass(frozen=True, kw_only=True)
class FedRep(ServerAlgorithm):
    head_epochs: int = 2
    """Passes over the local samples that move the head."""
    head_steps: int | None = None
    """Mini-batch steps that move the head, instead of passes."""
    body_epochs: int = 1
    """Passes over the local samples that move the representation."""
    body_steps: int | None = None
    """Mini-batch steps that move the representation, instead of passes."""
    heads: Literal["same", "random"] = "same"
    """Whether all heads start equal or each is drawn by itself."""
    frozen: Literal["train", "eval"] = "train"
    """Mode of the frozen representation while the head trains."""

    name: ClassVar[str] = "fedrep"
    title: ClassVar[str] = "FedRep"
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
        return train_alternating(state, round, ctx, head, body, self.frozen, self.rows(round, ctx))

    def mix(self, state: State, round: int, ctx: Context) -> State:
        return self.average(state, REPRESENTATION, round, ctx)
