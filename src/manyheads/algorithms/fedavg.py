"""FedAvg: one model for all, averaged by a server.

A round: the server sends w to the workers that take part; each makes ``epochs`` passes over its own samples; the server
averages what comes back, weighted by samples.

Sent: w up and down, by those who take part.

Reference: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
Differences: all workers take part by default, as in DePRL's comparison (``participation``).
"""

from dataclasses import dataclass
from typing import ClassVar

from manyheads.algorithms.base import Context, Log, State, amount
from manyheads.algorithms.phases import WHOLE, train_whole
from manyheads.algorithms.server import ServerAlgorithm


@dataclass(frozen=True, kw_only=True)
class FedAvg(ServerAlgorithm):
    epochs: int = 3
    """Passes over the local samples."""
    steps: int | None = None
    """Mini-batch steps, instead of passes."""

    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "FedAvg"

    def local(self, state: State, round: int, ctx: Context) -> tuple[State, Log]:
        return train_whole(state, round, ctx, amount(self.epochs, self.steps), self.rows(round, ctx))

    def mix(self, state: State, round: int, ctx: Context) -> State:
        return self.average(state, WHOLE, round, ctx)
