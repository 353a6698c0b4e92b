"""The groups of a net by what they are for, and local training that moves all of them at once."""

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
