import json
from math import sqrt
from pathlib import Path

import numpy as np
import pytest

from manyheads.report.comparison import open_comparison
from manyheads.report.numbers import (
    best_system,
    best_systems,
    correlation,
    curve,
    difference,
    majority_floor,
    number,
    off_diagonal,
    sorted_workers,
    stat,
)


def test_mean_deviation_and_standard_error():
    found = stat([1.0, None, 2.0, 6.0])
    assert found is not None
    assert (found.mean, found.deviation, found.count) == (3.0, pytest.approx(sqrt(7)), 3)
    assert found.error == pytest.approx(sqrt(7 / 3))
    single = stat([4.0])
    assert single is not None
    assert (single.mean, single.deviation, single.error) == (4.0, None, None)
    assert stat([None]) is None


@pytest.mark.parametrize("value", [pytest.param(10**400, id="1e400"), None, "1", True, float("nan"), float("inf"), [1]])
def test_what_is_no_number_is_none(value):
    assert number(value) is None


def test_a_curve_is_over_the_rounds_that_all_seeds_have(tmp_path: Path, write_run):
    for seed in (1, 2):
        path = write_run(tmp_path / str(seed), seed=seed, rounds=6)
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        rows = [{**row, "accuracy_mean": seed * row["round"] / 10} for row in rows if row["round"] != seed]
        rows[-2]["accuracy_mean"] = None if seed == 1 else 0.5
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = open_comparison(tmp_path).cells[0, 0]
    found = curve(runs, "round", "accuracy_mean")
    assert found is not None
    assert found.x.tolist() == [3, 4, 6]
    np.testing.assert_allclose(found.y, [0.45, 0.6, 0.9])
    np.testing.assert_allclose(found.deviation, np.array([0.3, 0.4, 0.6]) / sqrt(2))
    assert curve(runs, "round", "no_such_metric") is None
    single = curve(runs[:1], "round", "accuracy_mean")
    assert single is not None and single.deviation.tolist() == [0] * 4


def test_workers_are_sorted_and_averaged_rank_by_rank(tmp_path: Path, write_run):
    values = {1: [0.3, 0.1, 0.2], 2: [0.5, None, 0.4]}
    for seed, accuracy in values.items():
        path = write_run(tmp_path / str(seed), seed=seed, workers=3, rounds=1)
        (path / "workers.jsonl").write_text(json.dumps({"round": 1, "accuracy": accuracy}) + "\n")
    found = sorted_workers(open_comparison(tmp_path).cells[0, 0])
    assert found is not None
    np.testing.assert_allclose(found.x, [1, 2])
    np.testing.assert_allclose(found.y, [(0.1 + 0.4) / 2, (0.3 + 0.5) / 2])


def test_who_is_ahead_and_by_how_much_seed_by_seed(tmp_path: Path, write_run):
    scores = {1: (0.9, 0.8), 2: (0.7, 0.5), 3: (0.99, 0.01), 4: (None, 0.6), 5: (0.8, None)}
    for seed, (ours, theirs) in scores.items():
        for algorithm, level in (("deprl", ours), ("local", theirs)):
            if (algorithm, seed) == ("local", 3):
                continue
            path = write_run(tmp_path / f"{algorithm}{seed}", algorithm, seed=seed)
            summary = json.loads((path / "summary.json").read_text())
            (path / "summary.json").write_text(
                json.dumps({**summary, "accuracy_mean": level, "majority_floor": seed / 10})
            )
    comparison = open_comparison(tmp_path)
    assert best_system(comparison, 0) == 0
    assert best_systems(comparison, 0) == [0]
    assert best_systems(comparison, 0, highest=False) == [1]
    gap = difference(comparison, 0, 0, 1)
    assert gap is not None
    assert (gap.mean, gap.count, gap.error) == (pytest.approx(0.15), 2, pytest.approx(0.05))
    floor = majority_floor(comparison.at(0))
    assert floor is not None
    assert (floor.mean, floor.count) == (pytest.approx(0.3), 5)


def test_maps_are_compared_over_different_workers() -> None:
    a = np.array([[9.0, 1.0, 2.0], [1.0, 9.0, 3.0], [2.0, 3.0, 9.0]])
    assert off_diagonal(a).tolist() == [1.0, 2.0, 1.0, 3.0, 2.0, 3.0]
    assert correlation(a, -2 * a + 1) == pytest.approx(-1)
    assert correlation(a, a + np.diag([1.0, 5.0, 2.0])) == pytest.approx(1), "beside itself each worker is alike"
    assert correlation(a, np.ones_like(a)) is None
    with_gap = np.where(a == 1, np.nan, a)
    assert correlation(a, with_gap) == pytest.approx(1)
