"""How fast a mixing brings the workers together, and the facts about it that a person wants to see."""

from dataclasses import dataclass

import numpy as np

from manyheads.topology.layout import edges
from manyheads.topology.rows import TOLERANCE, Mixing

SAMPLED_ROUNDS = 8
"""How many rounds stand for a mixing without a period."""


@dataclass(frozen=True)
class Spectrum:
    """What ``spectral`` found over ``rounds`` rounds: one period, or a sample where there is none."""

    rho: float
    """The factor by which a round shrinks the workers' disagreement, 0 (at once) to 1 (never)."""
    min_degree: int
    max_degree: int
    """The fewest and the most others a worker hears in a round."""
    column_sums: tuple[float, float]
    """The smallest and the largest of all rounds."""
    period: int | None
    rounds: int

    @property
    def gap(self) -> float:
        """The spectral gap, 1 - rho."""
        return 1 - self.rho

    @property
    def doubly_stochastic(self) -> bool:
        return max(abs(total - 1) for total in self.column_sums) <= TOLERANCE


def spectral(mixing: Mixing) -> Spectrum:
    """Measure a mixing from the product M of its rounds' P; dense, for up to a few thousand workers.

    ``rho`` is ``|M - 11^T/N|_2 ** (1 / rounds)`` where every P is doubly stochastic: for a fixed symmetric P its second
    largest absolute eigenvalue. Otherwise what is kept is not the mean, and it is the second largest absolute
    eigenvalue of M to that power, the rate in the long run.
    """
    num_workers = mixing.num_workers
    rounds = mixing.period or SAMPLED_ROUNDS
    product = np.eye(num_workers)
    degrees, sums = [], []
    for round in range(rounds):
        rows = mixing.rows(round)
        matrix = rows.dense()
        product = matrix @ product
        degrees.append(np.diff(rows.offsets) - 1)
        sums.append(matrix.sum(0))
    column_sums = (float(np.min(sums)), float(np.max(sums)))
    report = Spectrum(0.0, int(np.min(degrees)), int(np.max(degrees)), column_sums, mixing.period, rounds)
