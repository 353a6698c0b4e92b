"""What the algorithms with a shared representation and private heads have in common: how a worker trains."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from manyheads.algorithms.base import Algorithm, Context, Log, State, amount, merge, run_phases
from manyheads.algorithms.phases import HEAD, REPRESENTATION
from manyheads.engine.phase import Phase
from manyheads.models.split import Split, drawn_layers


@dataclass(frozen=True, kw_only=True)
class PersonalHeads(Algorithm):
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

    private: ClassVar[frozenset[str]] = HEAD

    @property
    def head_passes(self) -> int:
        return amount(self.head_epochs, self.head_steps).count

    def prepare(self, model: Split) -> Split:
        if self.heads == "random":
            # Called for its error: a head that cannot be drawn anew is refused before anything is written.
            drawn_layers(model.get_submodule("head"))
        return model

    def init(self, ctx: Context) -> State:
        return ctx.initial if self.heads == "same" else merge(ctx.initial, ctx.random_heads())

    def local(self, state: State, round: int, ctx: Context) -> tuple[State, Log]:
        """Train the head on the frozen representation, then the representation under the frozen head."""
        head, body = amount(self.head_epochs, self.head_steps), amount(self.body_epochs, self.body_steps)
        phases = [
            Phase("head", HEAD, head, ctx.rates.sgd(round, head=True), ctx.objective, frozen=self.frozen),
            Phase("body", REPRESENTATION, body, ctx.rates.sgd(round), ctx.objective),
        ]
        return run_phases(state, phases, round, ctx, self.rows(round, ctx))
