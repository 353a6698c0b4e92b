"""How fast a mixing brings the workers together, and the facts about it that a person wants to see."""

from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np

from manyheads.topology.layout import edges
from manyheads.topology.rows import TOLERANCE, Mixing, Rows
from manyheads.units import plural, short

SAMPLED_ROUNDS = 8
"""How many rounds stand for a mixing without a period."""


@dataclass(frozen=True)
class Spectrum:
    """What ``spectral`` found over ``rounds`` rounds: one period, or a sample where there is none."""

    rho: float
    """The most that a round leaves of the workers' disagreement, on average over many: 0 (none) to 1 (all)."""
    min_degree: int
    max_degree: int
    """The fewest and the most others a worker hears in a round."""
    column_sums: tuple[float, float]
    """The smallest and the largest of all rounds."""
    rounds: int

    @property
    def gap(self) -> float:
        """The spectral gap, 1 - rho."""
        return 1 - self.rho

    @property
    def doubly_stochastic(self) -> bool:
        return _ones(self.column_sums)


@lru_cache(maxsize=1)
def spectral(mixing: Mixing) -> Spectrum:
    """Measure a mixing from the product M of its rounds' P.

    ``rho`` is ``|M - 11^T/N|_2 ** (1 / rounds)`` if every P is doubly stochastic: for a fixed symmetric P that is its
    second largest absolute eigenvalue. Otherwise mixing does not preserve the mean, and ``rho`` is the second largest
    absolute eigenvalue of M to that power, the rate in the long run. Where every worker hears the same distances away,
    as on a ring, that is quick; otherwise M is dense, thousands of workers take seconds, and the last result is cached.
    """
    rounds = mixing.period or SAMPLED_ROUNDS
    every = [mixing.rows(round) for round in range(rounds)]
    degrees = [np.diff(rows.offsets) - 1 for rows in every]
    sums = [np.bincount(rows.columns, rows.weights, mixing.num_workers) for rows in every]
    column_sums = (float(np.min(sums)), float(np.max(sums)))
    first_rows = [_first_of_shifted(rows) for rows in every]
    shifted = [row for row in first_rows if row is not None]
    if len(shifted) == rounds:
        # Circulant matrices commute, and have the same eigenvectors: waves, of which the first is constant.
        factor = np.abs(np.prod(np.fft.fft(shifted), axis=0))[1:].max(initial=0.0)
    else:
        product = reduce(lambda product, rows: rows.dense() @ product, every, np.eye(mixing.num_workers))
        doubly = _ones(column_sums)
        factor = _norm(product - 1 / len(product)) if doubly else np.sort(np.abs(np.linalg.eigvals(product)))[-2]
    return Spectrum(
        rho=min(1.0, float(factor) ** (1 / rounds)),
        min_degree=int(np.min(degrees)),
        max_degree=int(np.max(degrees)),
        column_sums=column_sums,
        rounds=rounds,
    )


def describe(mixing: Mixing) -> list[tuple[str, str]]:
    """What there is to know about a mixing, as (label, value) lines."""
    found = spectral(mixing)
    low, high = found.column_sums
    if mixing.period is None:
        changes = f"every round; the figures are from the first {found.rounds}"
    else:
        changes = "never" if mixing.period == 1 else f"in a cycle of {mixing.period} rounds"
    return [
        ("graph", mixing.name),
        ("workers", str(mixing.num_workers)),
        ("links", f"{len(edges(mixing)):,}"),
        ("messages a round", f"{len(mixing.rows(0).columns) - mixing.num_workers:,}"),
        ("neighbours", _span(found.min_degree, found.max_degree)),
        ("changes", changes),
        (
            "P",
            "doubly stochastic" if found.doubly_stochastic else f"row-stochastic, column sums {low:.2f} to {high:.2f}",
        ),
        ("rho", f"{found.rho:.5f}"),
        ("spectral gap", short(found.gap)),
        ("1 / gap", _rounds(1 / found.gap) if found.gap > 1e-12 else "never agree"),
        *(("note", note) for note in mixing.notes),
    ]


def _rounds(count: float) -> str:
    return f"{count:,.0f} {plural('round', round(count))}"


def _ones(column_sums: tuple[float, float]) -> bool:
    return max(abs(total - 1) for total in column_sums) <= TOLERANCE


def _first_of_shifted(rows: Rows) -> np.ndarray | None:
    """The first row of a P whose other rows are that row shifted, [N]; None: they are not."""
    num_workers, degrees = rows.num_workers, np.diff(rows.offsets)
    if (degrees != degrees[0]).any():
        return None
    distances = (rows.columns - rows.receivers) % num_workers
    ascending = np.lexsort((distances, rows.receivers))
    distances, weights = (entries[ascending].reshape(num_workers, -1) for entries in (distances, rows.weights))
    if (distances != distances[0]).any() or (weights != weights[0]).any():
        return None
    first = np.zeros(num_workers)
    first[distances[0]] = weights[0]
    return first


def _norm(matrix: np.ndarray) -> float:
    """The spectral norm; for a symmetric matrix by its eigenvalues, in a fraction of the time."""
    if np.array_equal(matrix, matrix.T):
        return float(np.abs(np.linalg.eigvalsh(matrix)).max())
    return float(np.linalg.norm(matrix, 2))


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"
