"""The numbers of a comparison: means and deviations over seeds, at the end and by round, and who is ahead."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from manyheads.json_text import fits
from manyheads.report.collect import Finished
from manyheads.report.comparison import Comparison

_ROUNDING = 1e-12
"""Means that are no further apart differ by how they were summed."""


@dataclass(frozen=True)
class Stat:
    """A number over seeds."""

    mean: float
    deviation: float | None
    """Sample deviation; None for a single seed."""
    count: int

    @property
    def error(self) -> float | None:
        """Standard error of the mean."""
        return None if self.deviation is None else self.deviation / self.count**0.5


@dataclass(frozen=True, eq=False)
class Curve:
    """Means over seeds, and the deviation of ``y``, zero for a single seed; every array [points]."""

    x: np.ndarray
    y: np.ndarray
    deviation: np.ndarray


def stat(values: Iterable[float | None]) -> Stat | None:
    """Mean and deviation of the values that are there; None: there are none."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    deviation = float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None
    return Stat(float(np.mean(numbers)), deviation, len(numbers))


def at_end(runs: Iterable[Finished], metric: str) -> Stat | None:
    """A metric after the last round."""
    return stat(number(run.summary.get(metric)) for run in runs)


def curve(runs: Sequence[Finished], x: str, y: str) -> Curve | None:
    """``y`` against ``x`` in the evaluated rounds that all seeds have; None: there are none."""
    tables = []
    for run in runs:
        points = {row["round"]: (number(row.get(x)), number(row.get(y))) for row in run.metrics}
        tables.append({round: point for round, point in points.items() if None not in point})
    rounds = sorted(set.intersection(*map(set, tables)))
    if not rounds:
        return None
    points = np.array([[table[round] for round in rounds] for table in tables], dtype=float)
    return Curve(points[:, :, 0].mean(0), *_over_seeds(points[:, :, 1]))


def sorted_workers(runs: Sequence[Finished]) -> Curve | None:
    """The workers' accuracies from the lowest to the highest, rank by rank over seeds; ``x`` is the rank from 1.

    The number of workers with test samples may differ between seeds: all are reduced to the fewest, by quantiles.
    """
    ranked = [sorted(values.values()) for run in runs if (values := worker_accuracies(run))]
    if not ranked:
        return None
    count = min(map(len, ranked))
    parts = np.linspace(0, 1, count)
    points = np.stack([np.quantile(values, parts) for values in ranked])
    return Curve(np.arange(1.0, count + 1), *_over_seeds(points))


def worker_accuracies(run: Finished) -> dict[int, float]:
    """Worker -> accuracy after the last round, of those that have test samples."""
    values = run.workers.get("accuracy")
    listed = enumerate(values if isinstance(values, list) else [])
    return {worker: value for worker, found in listed if (value := number(found)) is not None}


def _over_seeds(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sample deviation of [seeds, points]."""
    return values.mean(0), values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])


def shared_seeds(groups: Iterable[Sequence[Finished]]) -> list[list[Finished]]:
    """For each group the runs whose seeds all groups have."""
    groups = list(groups)
    shared = set.intersection(*({run.seed for run in group} for group in groups)) if groups else set()
    return [[run for run in group if run.seed in shared] for group in groups]


def best_system(comparison: Comparison, setting: int) -> int | None:
    """Which system's accuracy is ahead in a setting, the first of those that are equal; None: too few shared seeds."""
    return next(iter(best_systems(comparison, setting)), None)


def best_systems(
    comparison: Comparison,
    setting: int,
    metric: str = "accuracy_mean",
    *,
    highest: bool = True,
    shown: Callable[[float], object] | None = None,
) -> list[int]:
    """The systems that no other is ahead of in a setting, each pair over the seeds that both have.

    One, or several that are equal; none if two share no seed, or if pairs with different seeds contradict one another.
    ``shown``: how the metric is printed, if what prints the same is equal too.
    """
    measured = {
        i: scores for i in range(len(comparison.systems)) if (scores := _by_seed(comparison, i, setting, metric))
    }

    def unbeaten(ours: dict[int, float], theirs: dict[int, float]) -> bool:
        seeds = sorted(ours.keys() & theirs.keys())
        if not seeds:
            return False
        mine, others = (float(np.mean([scores[seed] for seed in seeds])) for scores in (ours, theirs))
        level = shown(mine) == shown(others) if shown is not None else abs(mine - others) <= _ROUNDING
        return level or (mine > others) == highest

    return [i for i, ours in measured.items() if all(unbeaten(ours, theirs) for theirs in measured.values())]


def _by_seed(comparison: Comparison, system: int, setting: int, metric: str) -> dict[int, float]:
    """A metric after the last round by seed, where it is known."""
    found = {run.seed: number(run.summary.get(metric)) for run in comparison.cells.get((system, setting), ())}
    return {seed: value for seed, value in found.items() if value is not None}


def majority_floor(runs: Iterable[Finished]) -> Stat | None:
    """What naming each worker's most frequent class would score. It depends on data and seed only, not on what ran."""
    return at_end({run.seed: run for run in runs}.values(), "majority_floor")


def difference(comparison: Comparison, setting: int, system: int, other: int) -> Stat | None:
    """Accuracy of one system minus another's, over the seeds that both have, one by one.

    Of one seed they share data, graph and first weights.
    """
    ours, theirs = (_by_seed(comparison, i, setting, "accuracy_mean") for i in (system, other))
    found = stat(ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys()))
    return replace(found, mean=0.0) if found is not None and abs(found.mean) <= _ROUNDING else found


def number(value: Any) -> float | None:
    """A value from a file if it is a number that a float can hold, else None."""
    return value if fits(value, float) else None


def off_diagonal(values: np.ndarray) -> np.ndarray:
    """The entries of a map [N, N] for pairs of different workers, [N (N - 1)] in double precision."""
    return values[~np.eye(len(values), dtype=bool)].astype(float)


def correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Of two maps [N, N], over the pairs of different workers; None where one of them is constant."""
    upper = np.triu_indices(len(a), 1)
    x, y = a[upper].astype(float), b[upper].astype(float)
    there = np.isfinite(x) & np.isfinite(y)
    x, y = x[there], y[there]
    if len(x) < 2 or not np.ptp(x) or not np.ptp(y):
        return None
    return float(np.corrcoef(x, y)[0, 1])
