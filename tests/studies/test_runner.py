"""Runs: recorded and cleared away, continued, given up in time; new workers find what they build on."""

from contextlib import closing
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from manyheads import saver
from manyheads.checkpoint import Checkpoints
from manyheads.experiment import Experiment, Runtime
from manyheads.jobs import News
from manyheads.new_workers import NewWorkers
from manyheads.session import Session
from manyheads.store import RunDirectory
from manyheads.studies import runner as module
from manyheads.studies.records import Records
from manyheads.studies.runner import Runner
from manyheads.studies.trial import QUICK, Trial, joined

CPU = Runtime(device="cpu", threads=1)


def _trial(algorithm: str = "deprl", seed: int = 1, **changes: object) -> Trial:
    return QUICK.trial(algorithm, "digits", 0.3, seed=seed, workers=3, model="mlp:4", **{"rounds": 2, **changes})


def _runner(folder: Path, **settings: object) -> Runner:
    return Runner(Records(folder / "results"), folder / "work", CPU, **settings)  # pyright: ignore[reportArgumentType]


def _last(news: list[News]) -> dict[int, News]:
    return {item.job: item for item in news}


@pytest.mark.parametrize("checkpoints", [True, False])
def test_runs_are_recorded_and_their_weights_removed(tmp_path: Path, checkpoints: bool) -> None:
    trials = [_trial(), _trial("fedavg")]
    runner = _runner(tmp_path, checkpoints=checkpoints)
    ended = _last(list(runner.run(trials)))
    assert [(item.state, item.round) for item in ended.values()] == [("finished", 2)] * 2
    assert all(map(runner.records.have, trials))
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize("new", [None, NewWorkers(workers=2, split="dirichlet:0.5", head_epochs=2)])
def test_with_and_without_weights_give_the_same_numbers(tmp_path: Path, new: NewWorkers | None) -> None:
    trial = _trial() if new is None else joined(_trial(), new)
    found, said = [], []
    for checkpoints in (True, False):
        runner = _runner(tmp_path / str(checkpoints), checkpoints=checkpoints)
        list(runner.run([trial]))
        run = runner.records.read(trial)
        assert run is not None
        found.append((run.summary["accuracy_mean"], run.summary["train_loss"], run.workers["accuracy"]))
        said.append(run.summary.keys())
    assert found[0] == found[1]
    assert said[0] == said[1] >= {"similarity_data", "root"} | ({"spectral_gap", "theorem_1"} if new is None else set())


@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_record_names_no_folder_of_the_machine(tmp_path: Path, checkpoints: bool) -> None:
    trial = joined(_trial(), NewWorkers(workers=2, split="dirichlet:0.5", head_epochs=2))
    runner = _runner(tmp_path, checkpoints=checkpoints)
    list(runner.run([trial]))
    summary = (runner.records.path(trial) / "summary.json").read_text()
    assert f"Representation after 2 rounds of {trial.source.name}" in summary
    assert str(tmp_path) not in summary


def test_without_checkpoints_no_weights_are_written_even_for_new_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> None:
        pytest.fail("weights were about to be written")

    monkeypatch.setattr(Checkpoints, "write_rows", write)
    monkeypatch.setattr(RunDirectory, "save_models", write)
    # As if there were time for a checkpoint in every round.
    monkeypatch.setattr(saver, "_CHECKPOINT_SHARE", inf)
    source = replace(_trial(rounds=4), similarity=True)
    new = joined(source, NewWorkers(workers=2, split="dirichlet:0.5", head_epochs=2))
    runner = _runner(tmp_path, checkpoints=False)
    list(runner.run([new]))
    assert runner.records.have(source) and runner.records.have(replace(new, similarity=False))
    assert not runner._learned, "nobody needs it any more"


def test_a_run_without_weights_that_was_stopped_begins_anew(tmp_path: Path) -> None:
    runner, trial = _runner(tmp_path, checkpoints=False), _trial(rounds=4)
    with closing(runner.run([trial])) as news:
        assert next(item for item in news if item.round == 2).state == "running"
    assert [item.round for item in runner.run([trial]) if item.state == "running"] == [1, 2, 3, 4]
    run = runner.records.read(trial)
    assert run is not None and [row["round"] for row in run.metrics] == [2, 4]
    assert not any("Continuing" in note for note in run.summary["notes"])


def test_a_recorded_run_that_is_made_again_for_new_workers_keeps_its_record(tmp_path: Path) -> None:
    """On a GPU it would have other numbers."""
    source = _trial()
    new = joined(source, NewWorkers(workers=2, split="dirichlet:0.5", head_epochs=2))
    runner = _runner(tmp_path, checkpoints=False)
    list(runner.run([source]))
    summary = (runner.records.path(source) / "summary.json").read_bytes()
    list(runner.run([new]))
    assert runner.records.have(new)
    assert (runner.records.path(source) / "summary.json").read_bytes() == summary
    assert list((tmp_path / "work").iterdir()) == []


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    trial = _trial(rounds=4)
    runner = replace(_runner(tmp_path), runtime=replace(CPU, checkpoint_every=1))
    with closing(runner.run([trial])) as news:
        assert next(item for item in news if item.round == 2).state == "running"
    assert not runner.records.have(trial)
    rounds = [item.round for item in runner.run([trial]) if item.state == "running"]
    assert rounds[0] > 2
    assert runner.records.have(trial)
    assert list(runner.run([trial])) == [News(0, "finished", 4)]


def test_new_workers_build_on_one_run_which_is_recorded_too(tmp_path: Path) -> None:
    source = _trial()
    new = [joined(source, NewWorkers(workers=2, split=f"dirichlet:{a}", head_epochs=2)) for a in (0.1, 0.5)]
    runner = _runner(tmp_path, checkpoints=False)
    news = list(runner.run([_trial("fedavg"), *new, source]))
    assert all(map(runner.records.have, (source, *new)))
    assert [item.round for item in news if item.job == 1] == [1, 2, 2, 3, 4, 4]
    assert [item.round for item in news if item.job == 2] == [2, 3, 4, 4]
    assert [item.state for item in news if item.job == 3] == ["finished"]
    assert list((tmp_path / "work").iterdir()) == []
    found = [runner.records.read(trial) for trial in new]
    assert all(run is not None and run.algorithm == "join" and run.options["workers"] == 2 for run in found)


def test_a_run_that_new_workers_will_need_keeps_its_weights_until_then(tmp_path: Path) -> None:
    source, other = _trial(), _trial("fedavg")
    new = joined(source, NewWorkers(workers=2, split="dirichlet:0.5", head_epochs=2))
    runner = _runner(tmp_path, checkpoints=False)
    news = list(runner.run([source, new, other]))
    assert [item.round for item in news if item.job == 1] == [2, 3, 4, 4], "its first round is the run's last"
    assert all(map(runner.records.have, (source, new, other)))
    assert list((tmp_path / "work").iterdir()) == []


def test_a_failure_does_not_stop_the_others(tmp_path: Path) -> None:
    trials = [_trial(lr=1e30, clip=0.0), _trial()]
    runner = _runner(tmp_path)
    ended = _last(list(runner.run(trials)))
    assert [item.state for item in ended.values()] == ["failed", "finished"]
    assert "is not a number" in ended[0].error


def test_a_run_that_fails_at_once_says_nothing_about_the_time_of_others(tmp_path: Path) -> None:
    """Nor do runs with other numbers of workers."""
    failing, long = _trial(lr=1e30, clip=0.0), _trial(rounds=10_000_000)
    news = list(_runner(tmp_path).run([failing, long], seconds=60))
    assert [item.state for item in news] == ["failed"], "the second would take hours"


def test_what_is_recorded_is_finished_however_short_the_time(tmp_path: Path) -> None:
    runner, trial = _runner(tmp_path), _trial()
    list(runner.run([trial]))
    assert list(runner.run([trial], seconds=1e-9)) == [News(0, "finished", 2)]


def test_an_error_of_the_program_is_shown_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    trials, opened = [_trial(), _trial(seed=12)], module.open_session

    def broken(experiment: Experiment, runtime: Runtime) -> Session:
        if experiment.seed == 1:
            raise ZeroDivisionError
        return opened(experiment, runtime)

    monkeypatch.setattr(module, "open_session", broken)
    ended = _last(list(_runner(tmp_path, checkpoints=False).run(trials)))
    assert [item.state for item in ended.values()] == ["failed", "finished"]
    assert "ZeroDivisionError" in ended[0].error
    assert "Traceback" in capsys.readouterr().err


def test_what_cannot_end_in_time_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    runner = _runner(tmp_path)
    # A tick for every look at the clock: forty rounds take longer than two.
    trials = [_trial(rounds=40), _trial(seed=12), _trial("local")]
    news = list(runner.run(trials, seconds=30))
    # The second would have time, but runs of its kind are known to take longer; of the third's kind nothing is known.
    assert {item.job for item in news} == {0, 2}
    assert max(item.round for item in news if item.job == 0) < 10
    assert [runner.records.have(trial) for trial in trials] == [False, False, True]
    assert [path.name for path in runner.work.iterdir()] == [runner.path(trials[0]).name], "it can go on"
    assert list(runner.run([_trial()], seconds=30))[-1].state == "finished"
    assert list(runner.run([_trial(seed=12)], seconds=0)) == []


def test_a_runs_end_is_foreseen_from_the_rounds_it_has_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 11.0, 13.0, 40.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    pace = module._Pace(100)
    # It goes on from round 20; the first rounds say little, and past the half it is not given up any more.
    assert [pace.end(round) for round in (21, 22, 24, 51)] == [-inf, -inf, 13 + 76, -inf]


def test_what_is_estimated_to_take_far_too_long_is_not_begun(tmp_path: Path) -> None:
    trial = _trial(rounds=10_000_000)
    assert list(_runner(tmp_path).run([trial, joined(trial, NewWorkers(workers=2))], seconds=5)) == []
