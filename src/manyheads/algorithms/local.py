"""Local training: every worker for itself, nothing sent.

A round of worker i: ``epochs`` passes over its own samples move its whole model. The floor that sharing must beat.
"""

from dataclasses import dataclass
from typing import ClassVar

from manyheads.algorithms.base import Algorithm, Context, Exchange, Log, State, amount
from manyheads.algorithms.phases import WHOLE, train_whole


@dataclass(frozen=True, kw_only=True)
class Local(Algorithm):
    epochs: int = 3
    """Passes over the local samples."""
    steps: int | None = None
    """Mini-batch steps, instead of passes."""

    name: ClassVar[str] = "local"
    title: ClassVar[str] = "Local"
    private: ClassVar[frozenset[str]] = WHOLE
    exchange: ClassVar[Exchange] = "none"

    def local(self, state: State, round: int, ctx: Context) -> tuple[State, Log]:
        return train_whole(state, round, ctx, amount(self.epochs, self.steps), ctx.present(round))

    def mix(self, state: State, round: int, ctx: Context) -> State:
        return state
