"""FedAvg: one model for all, averaged by a server.

A round: the server sends w to the workers that take part; each makes ``epochs`` passes over its own samples; the server
averages what comes back, weighted by samples.

Sent: w up and down, by those who take part.

Reference: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
Differences: all workers take part by default, as in DePRL's comparison (``participation``).
"""

from dataclasses import dataclass
from typing import ClassVar

from manyheads.algorithms.base import Algorithm, Context, Log, State, amount, check_share
from manyheads.algorithms.phases import WHOLE, train_whole
from manyheads.algorithms.server import Weighting, server_weights


@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm):
    epochs: int = 3
    """Passes over the local samples."""
    steps: int | None = None
    """Mini-batch steps, instead of passes."""
    weighting: Weighting = "samples"
    """Whether the server weighs workers by their samples or all alike."""
    participation: float = 1.0
    """Part of the workers that takes part in a round."""

    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "FedAvg"
    server: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_share("participation", self.participation)

    def local(self, state: State, round: int, ctx: Context) -> tuple[State, Log]:
        rows = ctx.rows(ctx.participants(round, self.participation))
        return train_whole(state, round, ctx, amount(self.epochs, self.steps), rows)

    def mix(self, state: State, round: int, ctx: Context) -> State:
        return ctx.average(state, WHOLE, server_weights(ctx, round, self.weighting, self.participation))
