"""Tuning: the same grid for all, chosen by validation accuracy, and the chosen run is not run twice."""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest

from manyheads.algorithms import REGISTRY
from manyheads.errors import UserError
from manyheads.experiment import Experiment
from manyheads.recipes import RECIPES
from manyheads.record import Record
from manyheads.tune import FACTORS, FOLDER, Tuning, tunings, with_rates


def _experiments(*seeds: int, **changes: object) -> list[Experiment]:
    return [
        replace(Experiment(algorithm=REGISTRY[name](), seed=seed, **changes), graph=graph).complete(RECIPES["digits"])  # pyright: ignore[reportArgumentType]
        for name in ("deprl", "local")
        for graph in (("ring", "full") if name == "deprl" else ("none",))
        for seed in seeds
    ]


def _pretend(tuning: Tuning, scores: Sequence[float | None]) -> None:
    """Leave on disk what finished runs with these validation accuracies would; None: the run failed."""
    for job, score in zip(tuning.jobs, scores, strict=True):
        job.path.mkdir(parents=True)
        (job.path / "experiment.json").write_text(job.experiment.to_json())
        if score is not None:
            values = dict.fromkeys((spec.name for spec in fields(Record)), 0)
            words = {"algorithm": job.experiment.algorithm.name, "run_id": job.experiment.run_id}
            summary = {**values, **words, "rounds": job.rounds, "accuracy_validation": score}
            (job.path / "summary.json").write_text(json.dumps(summary))


def test_every_setting_is_tuned_once_with_the_same_grid(tmp_path: Path) -> None:
    found = tunings(_experiments(5, 1, 12), FACTORS, tmp_path)
    assert [tuning.label for tuning in found] == ["deprl, graph ring", "deprl, graph full", "local"]
    assert [tuning.title for tuning in found] == ["DePRL, graph ring", "DePRL, graph full", "Local"]
    for tuning in found:
        assert tuning.experiment.seed == 5
        assert [job.experiment.lr for job in tuning.jobs] == [0.05, 0.1, 0.2, 0.4, 0.8]
        assert [job.experiment.head_lr for job in tuning.jobs] == [0.05, 0.1, 0.2, 0.4, 0.8]
        assert all(job.path.parent == tmp_path / FOLDER for job in tuning.jobs)
        assert {replace(job.experiment, lr=0.2, head_lr=0.2) for job in tuning.jobs} == {tuning.experiment}


@pytest.mark.parametrize(
    ("scores", "best", "at_the_end"),
    [
        ([0.1, 0.9, 0.8], 1, False),
        ([0.5, 0.4, 0.3], 0, True),
        ([0.5, 0.4, None], 0, True),
        ([0.7, 0.7, 0.7], 1, False),
        ([None, None, 0.2], 2, True),
        ([None, None, None], None, False),
    ],
)
def test_choice(tmp_path: Path, scores: list[float | None], best: int | None, at_the_end: bool) -> None:
    (tuning,) = tunings(_experiments(1)[:1], (2, 0.5, 1), tmp_path)
    _pretend(tuning, scores)
    assert (tuning.scores, tuning.best, tuning.at_the_end) == (scores, best, at_the_end)
    rates = [experiment.lr for experiment in with_rates(_experiments(1, 12)[:2], [tuning])]
    assert rates == ([] if best is None else [(0.1, 0.2, 0.4)[best]] * 2)


def test_the_chosen_run_moves_to_its_place(tmp_path: Path) -> None:
    (tuning,) = tunings(_experiments(1)[:1], (0.5, 1), tmp_path)
    _pretend(tuning, [0.2, 0.3])
    chosen = tuning.chosen
    tuning.settle(tmp_path)
    (moved,) = tmp_path.glob("deprl-*")
    assert moved.name == f"deprl-{chosen.run_id}"
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == [tuning.jobs[0].path.name]

    (again,) = tunings(_experiments(1)[:1], (0.5, 1), tmp_path)
    assert again.jobs[1].path == moved
    assert again.scores == [0.2, 0.3]
    again.settle(tmp_path)
    assert moved.exists()


def test_shards_too_small_for_a_validation_part(tmp_path: Path) -> None:
    (tuning,) = tunings(_experiments(1, validation=0.01)[:1], (1,), tmp_path)
    _pretend(tuning, [0.5])
    summary = tuning.jobs[0].path / "summary.json"
    summary.write_text(summary.read_text().replace("0.5", "null"))
    with pytest.raises(UserError, match=r"--validation 0\.01 leaves no worker a sample to tune on"):
        _ = tuning.scores


@pytest.mark.parametrize(
    ("changes", "factors", "message"),
    [
        ({"validation": 0.0}, FACTORS, "--tune chooses rates on the validation split, and --validation is 0"),
        ({"schedule": "corollary"}, FACTORS, "--tune changes rates that --schedule corollary does not use"),
        ({}, (0.0, 1.0), "--tune 0 1: give factors above 0"),
        ({}, (1.0, float("inf")), "--tune 1 inf: give factors above 0"),
    ],
)
def test_mistakes(tmp_path: Path, changes: dict[str, object], factors: tuple[float, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tunings(_experiments(1, **changes), factors, tmp_path)


def test_one_rate_is_tuned(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give one --lr and one --head-lr"):
        tunings([*_experiments(1, lr=0.1), *_experiments(1, lr=0.2)], FACTORS, tmp_path)
