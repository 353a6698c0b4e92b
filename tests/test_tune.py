"""Tuning: the same grid for all, chosen by validation accuracy, and the chosen run is not run twice."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest

from manyheads.algorithms import REGISTRY
from manyheads.errors import UserError
from manyheads.experiment import Experiment
from manyheads.grid import directory_name
from manyheads.jobs import Job, News
from manyheads.recipes import RECIPES
from manyheads.record import Record
from manyheads.store.layout import EARLIER, TUNING
from manyheads.tune import FACTORS, Tuning, choose, tunings, with_rates


def _experiments(*seeds: int, **changes: object) -> list[Experiment]:
    return [
        replace(Experiment(algorithm=REGISTRY[name](), seed=seed, **changes), graph=graph).complete(RECIPES["digits"])  # pyright: ignore[reportArgumentType]
        for name in ("deprl", "local")
        for graph in (("ring", "full") if name == "deprl" else ("none",))
        for seed in seeds
    ]


def _pretend(tuning: Tuning, scores: Sequence[float | None]) -> None:
    """Leave on disk what finished runs with these validation accuracies would; None: the run failed."""
    for (job, *_), score in zip(tuning.jobs, scores, strict=True):
        if not job.path.exists():
            _made(job.path, job.experiment, score)


def _made(path: Path, experiment: Experiment, score: float | None = 0.5) -> Path:
    """What a run leaves in a directory; None: it failed."""
    path.mkdir(parents=True)
    (path / "experiment.json").write_text(experiment.to_json())
    if score is not None:
        values = dict.fromkeys((spec.name for spec in fields(Record)), 0)
        words = {"algorithm": experiment.algorithm.name, "run_id": experiment.run_id}
        summary = {**values, **words, "rounds": experiment.recipe.rounds, "accuracy_validation": score}
        (path / "summary.json").write_text(json.dumps(summary))
    return path


def _places(folder: Path) -> dict[tuple[str, int, float | None], str]:
    """Where each run of a comparison lies: (algorithm, seed, rate) -> folder."""
    runs = {path.parent: Experiment.from_json(path.read_text()) for path in folder.rglob("experiment.json")}
    places = {
        (one.algorithm.name, one.seed, one.lr): path.parent.relative_to(folder).as_posix() for path, one in runs.items()
    }
    assert len(places) == len(runs)
    return places


def _tuned(folder: Path, scores: dict[float, float], *seeds: int) -> Tuning:
    """A tuning of DePRL on the ring, its runs made."""
    (tuning,) = tunings(_experiments(*seeds)[: len(seeds)], scores, folder)
    _pretend(tuning, [scores[factor] for factor in tuning.factors])
    return tuning


def test_every_setting_is_tuned_once_with_the_same_grid(tmp_path: Path) -> None:
    found = tunings(_experiments(5, 1, 12), FACTORS, tmp_path)
    assert [tuning.label for tuning in found] == ["deprl, graph ring", "deprl, graph full", "local"]
    assert [tuning.title for tuning in found] == ["DePRL, graph ring", "DePRL, graph full", "Local"]
    for tuning in found:
        assert [job.experiment.seed for job in tuning.tries] == [5] * 5
        assert [job.experiment.lr for job in tuning.tries] == [0.05, 0.1, 0.2, 0.4, 0.8]
        assert [job.experiment.head_lr for job in tuning.tries] == [0.05, 0.1, 0.2, 0.4, 0.8]
        for jobs in tuning.jobs:
            assert [job.experiment.seed for job in jobs] == [5, 1, 12]
            assert len({replace(job.experiment, seed=5) for job in jobs}) == 1
            assert all(job.path.parent == tmp_path / TUNING for job in jobs)
        assert {replace(job.experiment, lr=0.2, head_lr=0.2) for job in tuning.tries} == {tuning.experiment}


@pytest.mark.parametrize(
    ("scores", "best", "best_at_edge"),
    [
        ([0.1, 0.9, 0.8], 1, False),
        ([0.5, 0.4, 0.3], 0, True),
        ([0.5, 0.4, None], 0, True),
        ([0.7, 0.7, 0.7], 1, False),
        ([None, None, 0.2], 2, True),
        ([0.0, None, None], 0, True),
        ([None, None, None], None, False),
    ],
)
def test_choice(tmp_path: Path, scores: list[float | None], best: int | None, best_at_edge: bool) -> None:
    (tuning,) = tunings(_experiments(1)[:1], (2, 0.5, 1), tmp_path)
    _pretend(tuning, scores)
    assert (tuning.scores, tuning.best, tuning.best_at_edge) == (scores, best, best_at_edge)
    rates = [(one.lr, one.head_lr) for one in with_rates(_experiments(1, 12)[:2], [tuning])]
    assert rates == ([] if best is None else [((0.1, 0.2, 0.4)[best],) * 2] * 2)


def test_of_equal_factors_the_one_is_best_that_changes_rates_least(tmp_path: Path) -> None:
    """A quarter is further from one than twice is."""
    (tuning,) = tunings(_experiments(1)[:1], (0.25, 2), tmp_path)
    _pretend(tuning, [0.7, 0.7])
    assert tuning.chosen.lr == 0.4


def test_rates_keep_their_digits(tmp_path: Path) -> None:
    (tuning,) = tunings(_experiments(1, lr=0.12345, head_lr=0.3)[:1], (0.1, 1), tmp_path)
    assert [(job.experiment.lr, job.experiment.head_lr) for job in tuning.tries] == [(0.012345, 0.03), (0.12345, 0.3)]


def test_only_rates_that_are_too_high_lose(tmp_path: Path) -> None:
    """A full disk must not decide which rates are best."""
    found = tunings(_experiments(1)[:1], (0.5, 1), tmp_path)
    _pretend(found[0], [0.5, None])

    def run(jobs: list[Job]) -> dict[str, News]:
        return {jobs[1].label: News(1, "failed", error="No space left on device")}

    with pytest.raises(UserError, match=r"deprl.*, rates × 1: No space left on device"):
        choose(found, run)
    assert _places(tmp_path).keys() == {("deprl", 1, 0.1), ("deprl", 1, 0.2)}


def test_luck_with_the_first_seed_wins_nothing(tmp_path: Path) -> None:
    """By rate and seed: what each would score, None where it fails."""
    scores = {(0.1, 1): 0.7, (0.2, 1): 0.8, (0.2, 2): 0.8, (0.2, 3): 0.7, (0.4, 1): 0.9, (0.4, 2): 0.9, (0.4, 3): 0.1}
    scores |= {(0.8, 1): 0.85, (0.8, 2): None, (0.8, 3): 0.9}
    (tuning,) = tunings(_experiments(1, 2, 3)[:3], (0.5, 1, 2, 4), tmp_path)
    made = []

    def run(jobs: Sequence[Job]) -> dict[str, News]:
        failed = {}
        for job in jobs:
            rate = job.experiment.lr, job.experiment.seed
            _made(job.path, job.experiment, scores[rate])
            made.append(rate)
            if scores[rate] is None:
                failed[job.label] = News(0, "failed", diverged=True)
        return failed

    assert choose([tuning], run) == {}
    firsts = [(0.1, 1), (0.2, 1), (0.4, 1), (0.8, 1)]
    assert made == [*firsts, (0.4, 2), (0.4, 3), (0.8, 2), (0.8, 3), (0.2, 2), (0.2, 3)]
    assert tuning.scores == [0.7, pytest.approx(2.3 / 3), pytest.approx(1.9 / 3), None]
    assert tuning.chosen.lr == 0.2
    assert {key for key, place in _places(tmp_path).items() if place == "."} == {("deprl", n, 0.2) for n in (1, 2, 3)}


@pytest.mark.parametrize("done", range(1, 6))
def test_killed_at_any_point_the_choice_is_the_same(tmp_path: Path, done: int) -> None:
    """A mean over some of the seeds would depose rates that all seeds together are for."""
    scores = {(0.1, 1): 0.6, (0.2, 1): 0.8, (0.2, 2): 0.3, (0.2, 3): 0.9}
    made, jobs = 0, []
    while made < 4:
        (tuning,) = tunings(_experiments(1, 2, 3)[:3], (0.5, 1), tmp_path)
        jobs = [job for job in tuning.tries if not job.finished] or tuning.undecided
        for job in jobs[:done]:
            rate = job.experiment.lr, job.experiment.seed
            _made(job.path, job.experiment, scores[rate])
            made += 1
    (tuning,) = tunings(_experiments(1, 2, 3)[:3], (0.5, 1), tmp_path)
    assert tuning.undecided == [] and tuning.chosen.lr == 0.2


def test_the_chosen_run_moves_to_its_place(tmp_path: Path) -> None:
    (tuning,) = tunings(_experiments(1)[:1], (0.5, 1), tmp_path)
    _pretend(tuning, [0.2, 0.3])
    chosen = tuning.chosen
    tuning.settle()
    (moved,) = tmp_path.glob("deprl-*")
    assert moved.name == f"deprl-{chosen.run_id}"
    assert [path.name for path in (tmp_path / TUNING).iterdir()] == [tuning.jobs[0][0].path.name]

    (again,) = tunings(_experiments(1)[:1], (0.5, 1), tmp_path)
    assert again.jobs[1][0].path == moved
    assert again.scores == [0.2, 0.3]
    again.settle()
    assert moved.exists()


LAST, BEFORE = TUNING, f"{TUNING}/{EARLIER}"


def _comparison(folder: Path) -> None:
    """One that was tuned and run with two seeds, beside what is no part of it."""
    _tuned(folder, {0.5: 0.2, 1: 0.3}, 1, 12).settle()
    deprl = _experiments(12)[0]
    _made(folder / directory_name(deprl), deprl)
    local = replace(_experiments(1)[2], lr=7.0)
    _made(folder / directory_name(local), local)
    _made(folder / "deprl-mine", replace(deprl, lr=8.0))


OTHERS = {("local", 1, 7.0): ".", ("deprl", 12, 8.0): "."}


def test_rates_chosen_before_leave_the_comparison_and_come_back(tmp_path: Path) -> None:
    _comparison(tmp_path)
    assert _places(tmp_path) == OTHERS | {("deprl", 1, 0.1): LAST, ("deprl", 1, 0.2): ".", ("deprl", 12, 0.2): "."}

    wide = _tuned(tmp_path, {0.5: 0.2, 1: 0.3, 2: 0.6}, 1, 12)
    assert wide.scores == [0.2, 0.4, 0.6], "of all seeds the mean"
    wide.settle()
    wider = {("deprl", 1, 0.1): LAST, ("deprl", 1, 0.2): LAST, ("deprl", 12, 0.2): LAST, ("deprl", 1, 0.4): "."}
    assert _places(tmp_path) == OTHERS | wider

    again = _tuned(tmp_path, {0.5: 0.2, 1: 0.3}, 1, 12)
    assert again.scores == [0.2, 0.4]
    again.settle()
    narrower = {("deprl", 1, 0.1): LAST, ("deprl", 1, 0.2): ".", ("deprl", 12, 0.2): ".", ("deprl", 1, 0.4): BEFORE}
    assert _places(tmp_path) == OTHERS | narrower


def test_tries_with_a_seed_that_nobody_asks_for_are_no_part_of_the_last_tuning(tmp_path: Path) -> None:
    _tuned(tmp_path, {0.5: 0.2, 1: 0.3, 2: 0.1}, 2).settle()
    _tuned(tmp_path, {0.5: 0.6, 1: 0.3, 2: 0.1}, 1, 2).settle()
    assert _places(tmp_path) == {
        ("deprl", 1, 0.1): ".",
        # It need not be run again.
        ("deprl", 2, 0.1): ".",
        ("deprl", 1, 0.2): LAST,
        ("deprl", 1, 0.4): LAST,
        ("deprl", 2, 0.2): LAST,
        ("deprl", 2, 0.4): LAST,
    }
    _tuned(tmp_path, {0.5: 0.2, 1: 0.3, 2: 0.1}, 3).settle()
    assert _places(tmp_path)["deprl", 2, 0.2] == BEFORE, "nobody asked for this seed"


def test_a_seed_that_was_run_before_stays_in_the_comparison(tmp_path: Path) -> None:
    _comparison(tmp_path)
    _tuned(tmp_path, {0.5: 0.2, 1: 0.3}, 1).settle()
    assert _places(tmp_path)["deprl", 12, 0.2] == "."


def test_both_rates_are_chosen(tmp_path: Path) -> None:
    other = replace(_experiments(1)[0], head_lr=0.4)
    _made(tmp_path / directory_name(other), other)
    _tuned(tmp_path, {0.5: 0.2, 1: 0.3}, 1).settle()
    assert (tmp_path / BEFORE / directory_name(other)).exists()


@pytest.mark.parametrize("done", range(3))
def test_killed_while_runs_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int) -> None:
    scores = {0.5: 0.2, 1: 0.3, 2: 0.6}
    for name in ("killed", "whole"):
        _comparison(tmp_path / name)
    _tuned(tmp_path / "whole", scores, 1, 12).settle()
    left, rename = [None] * done, Path.rename

    def dying(path: Path, target: Path) -> Path:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return rename(path, target)

    tuning = _tuned(tmp_path / "killed", scores, 1, 12)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", dying)
        tuning.settle()
    assert _places(tmp_path / "killed").keys() == _places(tmp_path / "whole").keys()
    for _ in range(2):
        _tuned(tmp_path / "killed", scores, 1, 12).settle()
        assert _places(tmp_path / "killed") == _places(tmp_path / "whole")


def test_a_run_that_was_made_twice_is_kept_twice(tmp_path: Path) -> None:
    tuning = _tuned(tmp_path, {0.5: 0.2, 1: 0.3}, 1)
    tuning.settle()
    lost = tuning.jobs[0][0].path
    shutil.copytree(lost, tmp_path / lost.name)
    for _ in range(2):
        _tuned(tmp_path, {0.5: 0.2, 1: 0.3}, 1).settle()
        found = {path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("summary.json")}
        assert found == {tuning.jobs[1][0].path.name, f"{LAST}/{lost.name}", f"{BEFORE}/{lost.name}-2"}


def test_shards_too_small_for_a_validation_part(tmp_path: Path) -> None:
    (tuning,) = tunings(_experiments(1, validation=0.01)[:1], (1,), tmp_path)
    _pretend(tuning, [0.5])
    summary = tuning.jobs[0][0].path / "summary.json"
    summary.write_text(summary.read_text().replace("0.5", "null"))
    with pytest.raises(UserError, match=r"--validation 0\.01 leaves no worker a sample to tune on"):
        _ = tuning.scores


@pytest.mark.parametrize(
    ("changes", "factors", "message"),
    [
        ({"validation": 0.0}, FACTORS, "--tune chooses rates on the validation split, but --validation is 0"),
        ({"schedule": "corollary"}, FACTORS, "--tune changes rates that --schedule corollary does not use"),
        ({}, (0.0, 1.0), "--tune 0 1: give factors above 0"),
        ({}, (1.0, float("inf")), "--tune 1 inf: give factors above 0"),
    ],
)
def test_mistakes(tmp_path: Path, changes: dict[str, object], factors: tuple[float, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tunings(_experiments(1, **changes), factors, tmp_path)


def test_factors_that_give_the_same_rates_are_one(tmp_path: Path) -> None:
    tuning, *_ = tunings(_experiments(1), (1.0, 1.0000000001, 2.0), tmp_path)
    assert tuning.factors == (1.0, 2.0)


def test_one_rate_is_tuned(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give one --lr and one --head-lr"):
        tunings([*_experiments(1, lr=0.1), *_experiments(1, lr=0.2)], FACTORS, tmp_path)
