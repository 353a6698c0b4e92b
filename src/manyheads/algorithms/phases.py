"""The two ways to train locally that algorithms share: everything at once, or head first and representation after."""

from typing import Literal

from torch import Tensor

from manyheads.algorithms.base import Context, Log, State, run_phases
from manyheads.engine.phase import Epochs, Phase, Steps

WHOLE = frozenset({"representation", "head"})
HEAD = frozenset({"head"})
REPRESENTATION = frozenset({"representation"})


def train_whole(
    state: State, round: int, ctx: Context, amount: Epochs | Steps, rows: Tensor | None
) -> tuple[State, Log]:
    """Representation and head move together."""
    phase = Phase("body", WHOLE, amount, ctx.rates.sgd(round), ctx.objective)
    return run_phases(state, [phase], round, ctx, rows)


def train_alternating(
    state: State,
    round: int,
    ctx: Context,
    head: Epochs | Steps,
    body: Epochs | Steps,
    frozen: Literal["train", "eval"],
    rows: Tensor | None,
) -> tuple[State, Log]:
    """The head on a frozen representation, then the representation under the frozen head."""
    phases = [
        Phase("head", HEAD, head, ctx.rates.sgd(round, head=True), ctx.objective, frozen=frozen),
        Phase("body", REPRESENTATION, body, ctx.rates.sgd(round), ctx.objective),
    ]
    return run_phases(state, phases, round, ctx, rows)
