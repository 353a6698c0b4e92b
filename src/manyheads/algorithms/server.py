"""What the parameter-server algorithms share: who takes part in a round, and what the server makes of it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from manyheads.algorithms.base import Algorithm, Context, Exchange, State, check_share


@dataclass(frozen=True, kw_only=True)
class ServerAlgorithm(Algorithm):
    weighting: Literal["samples", "uniform"] = "samples"
    """Whether the server weighs workers by their samples or all alike."""
    participation: float = 1.0
    """Fraction of the workers that take part in a round."""

    exchange: ClassVar[Exchange] = "server"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("participation", self.participation)

    @property
    def uses_sizes(self) -> bool:
        return self.weighting == "samples"

    def rows(self, round: int, ctx: Context) -> Tensor | None:
        return ctx.rows(ctx.participants(round, self.participation))

    def average(self, state: State, groups: Iterable[str], round: int, ctx: Context) -> State:
        """The state in which every worker has, in some groups, the average of those who take part."""
        return ctx.average(state, groups, self.weights(round, ctx))

    def weights(self, round: int, ctx: Context) -> np.ndarray:
        """Each worker's weight in the average, [N]: 0 for those who take no part in the round."""
        taking_part = ctx.participants(round, self.participation)
        return taking_part * (ctx.sizes if self.uses_sizes else np.ones(len(ctx.sizes)))
