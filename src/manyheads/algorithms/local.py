"""Local training: every worker for itself, nothing sent.

A round of worker i: ``epochs`` passes over its own samples move its whole model. The floor that sharing must beat.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from manyheads.algorithms.base import Context, Log, State, amount
from manyheads.algorithms.phases import WHOLE, train_whole
from manyheads.models.split import Split


@dataclass(frozen=True, kw_only=True)
class Local:
    epochs: int = 3
    """Passes over the local samples."""
    steps: int | None = None
    """Mini-batch steps, instead of passes."""

    name: ClassVar[str] = "local"
    title: ClassVar[str] = "Local"
    private: ClassVar[frozenset[str]] = WHOLE
    server: ClassVar[bool] = False
    row_stochastic: ClassVar[bool] = True
    uses_rounds: ClassVar[bool] = False
    extra_rows: ClassVar[float] = 0.0

    @property
    def order(self) -> Literal["train-mix"]:
        return "train-mix"

    def prepare(self, model: Split) -> Split:
        return model

    def init(self, ctx: Context) -> State:
        return ctx.initial

    def local(self, state: State, round: int, ctx: Context) -> tuple[State, Log]:
        return train_whole(state, round, ctx, amount(self.epochs, self.steps), ctx.present(round))

    def mix(self, state: State, round: int, ctx: Context) -> State:
        return state

    def models(self, state: State, ctx: Context) -> State:
        return state
