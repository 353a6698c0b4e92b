"""What the parameter-server algorithms share: who takes part in a round, and with which weight."""

from typing import Literal

import numpy as np

from manyheads.algorithms.base import Context

Weighting = Literal["samples", "uniform"]


def server_weights(ctx: Context, round: int, weighting: Weighting, participation: float) -> np.ndarray:
    """Each worker's weight in the server's average, [N]: 0 for those who take no part in the round."""
    taking_part = ctx.participants(round, participation)
    return taking_part * (ctx.sizes if weighting == "samples" else np.ones(len(ctx.sizes)))
