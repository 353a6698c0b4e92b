"""The numbers of a comparison: means and deviations over seeds, at the end and by round, and who is ahead."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

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
    """Which system's accuracy is ahead in a setting, the first of those that are equal; None: they share no seed."""
    return next(iter(best_systems(comparison, setting)), None)


def best_systems(
    comparison: Comparison,
    setting: int,
    metric: str = "accuracy_mean",
    *,
    highest: bool = True,
    shown: Callable[[float], object] | None = None,
) -> list[int]:
    """The systems that are ahead in a setting, over the seeds that all of them have: one, or several that are equal.

    ``shown``: how the metric is printed, if what prints the same is equal too.
    """
    alike = _alike(comparison, setting, metric)
    means = {i: found.mean for i, runs in alike.items() if (found := at_end(runs, metric)) is not None}
    best = (max if highest else min)(means.values(), default=0.0)
    if shown is not None:
        return [i for i, mean in means.items() if shown(mean) == shown(best)]
    return [i for i, mean in means.items() if abs(mean - best) <= _ROUNDING]


def _alike(comparison: Comparison, setting: int, metric: str) -> dict[int, list[Finished]]:
    """The runs of each system that has the metric, of the seeds that all these systems have."""
    measured = {
        i: runs
        for i in range(len(comparison.systems))
        if (runs := [r for r in comparison.cells.get((i, setting), ()) if number(r.summary.get(metric)) is not None])
    }
    return dict(zip(measured, shared_seeds(measured.values()), strict=True))


def majority_floor(runs: Iterable[Finished]) -> Stat | None:
    """What naming each worker's most frequent class would score. It depends on data and seed only, not on what ran."""
    return at_end({run.seed: run for run in runs}.values(), "majority_floor")


def difference(comparison: Comparison, setting: int, system: int, other: int) -> Stat | None:
    """Accuracy of one system minus another's, over the seeds that all have, one by one.

    Of one seed they share data, graph and first weights.
    """
    alike = _alike(comparison, setting, "accuracy_mean")
    ours, theirs = ({run.seed: run.summary["accuracy_mean"] for run in alike.get(i, ())} for i in (system, other))
    found = stat(ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys()))
    return replace(found, mean=0.0) if found is not None and abs(found.mean) <= _ROUNDING else found


def number(value: Any) -> float | None:
    """A value from a file if it is a number, else None."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and np.isfinite(value) else None


def off_diagonal(values: np.ndarray) -> list[float]:
    """The entries of a map [N, N] for pairs of different workers."""
    return values[~np.eye(len(values), dtype=bool)].astype(float).tolist()


def correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Of two maps [N, N], over the pairs of different workers; None where one of them is constant."""
    upper = np.triu_indices(len(a), 1)
    x, y = a[upper].astype(float), b[upper].astype(float)
    there = np.isfinite(x) & np.isfinite(y)
    x, y = x[there], y[there]
    if len(x) < 2 or not np.ptp(x) or not np.ptp(y):
        return None
    return float(np.corrcoef(x, y)[0, 1])
