"""Many runs: what a failure leaves alone, what is not run again, and what processes do not change."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import active_children
from multiprocessing.context import SpawnProcess
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from manyheads.algorithms import REGISTRY
from manyheads.experiment import Experiment, Runtime
from manyheads.grid import distinct, plan
from manyheads.jobs import Job, News, run_jobs
from manyheads.session import Session, open_session

ONE = Runtime(device="cpu", threads=1)
TWO = Runtime(device="cpu", threads=2)


def _jobs(lab: SimpleNamespace, folder: Path, *names: str, **changes: object) -> list[Job]:
    experiments = [lab.tiny(REGISTRY[name](), **changes) for name in names]
    return plan(distinct(experiments, ONE), folder)


def _started() -> list[SpawnProcess]:
    """The processes of the jobs; other tests may have left theirs, which are forked."""
    return [child for child in active_children() if isinstance(child, SpawnProcess)]


def _files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_failure_does_not_stop_the_others_and_a_second_call_does_only_what_is_missing(
    lab: SimpleNamespace, tmp_path: Path
) -> None:
    good = _jobs(lab, tmp_path, "local", "fedavg", rounds=3)
    (bad,) = _jobs(lab, tmp_path, "d-psgd", lr=1e200, clip=0.0)
    jobs = [bad, *good]
    news = list(run_jobs(jobs, ONE))
    ends = [(item.job, item.state) for item in news if item.state != "running"]
    assert ends == [(0, "failed"), (1, "finished"), (2, "finished")]
    assert [item.round for item in news if item.job == 1] == [1, 2, 3, 3]
    (failure,) = (item for item in news if item.state == "failed")
    assert "is not a number" in failure.error and failure.diverged
    before = _files(good[0].path) | _files(good[1].path)
    again = list(run_jobs(jobs, ONE))
    assert [item for item in again if item.job > 0] == [News(1, "finished", 3), News(2, "finished", 3)]
    assert _files(good[0].path) | _files(good[1].path) == before


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("mat1 and mat2"), "RuntimeError, as shown above."),
        (torch.OutOfMemoryError("CUDA out of memory"), "it does not fit into the device's memory."),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "it does not fit into the device's memory."),
        (MemoryError(), "it does not fit into the device's memory."),
    ],
)
def test_a_crash_costs_one_run(
    error: Exception,
    said: str,
    lab: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad, good = _jobs(lab, tmp_path, "local", "fedavg", rounds=1)

    def opening(experiment: Experiment, runtime: Runtime) -> Session:
        if experiment is bad.experiment:
            raise error
        return open_session(experiment, runtime)

    monkeypatch.setattr("manyheads.jobs.open_session", opening)
    ends = [item for item in run_jobs([bad, good], ONE) if item.state != "running"]
    assert ends == [News(0, "failed", error=said), News(1, "finished", 1)]
    assert ("Traceback" in capsys.readouterr().err) == ("shown above" in said)


def test_processes_change_nothing_the_death_of_one_costs_one_run_and_closing_ends_all(
    lab: SimpleNamespace, tmp_path: Path
) -> None:
    here, there = (_jobs(lab, tmp_path / place, "deprl", "ditto", rounds=5) for place in ("here", "there"))
    assert {item.state for item in run_jobs(here, ONE)} == {"running", "finished"}

    news = run_jobs([*there, *_jobs(lab, tmp_path / "there", "local", rounds=100_000)], TWO)
    ends: dict[int, News] = {}
    for number, item in enumerate(news):
        if number == 0:
            assert len(_started()) == 2
            pid = _started()[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        if item.state != "running":
            ends[item.job] = item
        if len(ends) == 2 and item.job == 2:
            break
    assert sorted(item.state for item in ends.values()) == ["failed", "finished"]
    (failed,) = (item for item in ends.values() if item.state == "failed")
    assert failed.error.startswith("its process ended with status -9") and not failed.diverged
    assert _started()
    news.close()
    assert not _started()

    assert [item.state for item in run_jobs([there[failed.job]], TWO)][-1] == "finished"
    for one, other in zip(here, there, strict=True):
        for name in ("models.safetensors", "workers.jsonl", "partition.safetensors"):
            assert (one.path / name).read_bytes() == (other.path / name).read_bytes()


def test_processes_that_die_between_two_runs_do_not_stop_the_others(lab: SimpleNamespace, tmp_path: Path) -> None:
    jobs = _jobs(lab, tmp_path, "local", "fedavg", "deprl", "d-psgd", "ditto")
    ends: dict[int, str] = {}
    for number, item in enumerate(run_jobs(jobs, TWO)):
        if number == 0:
            while not (jobs[0].finished and jobs[1].finished):
                time.sleep(0.01)
            # Until they have said so, and wait for their next.
            time.sleep(0.5)
            for child in _started():
                child.kill()
                child.join()
        if item.state != "running":
            ends[item.job] = item.state
    assert sorted(ends) == [0, 1, 2, 3, 4] and list(ends.values()).count("failed") == 2, "each costs one run"


def test_processes_do_not_hear_ctrl_c_from_their_first_moment_on(lab: SimpleNamespace, tmp_path: Path) -> None:
    def interrupt() -> None:
        while len(children := _started()) < 2:
            time.sleep(0.001)
        for child in children:
            assert child.pid is not None
            os.kill(child.pid, signal.SIGINT)

    other = Thread(target=interrupt)
    other.start()
    news = list(run_jobs(_jobs(lab, tmp_path, "local", "fedavg"), TWO))
    other.join()
    assert [item.state for item in news if item.state != "running"] == ["finished", "finished"]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "this one hears it again"


def test_processes_share_the_cores(lab: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int | None, int]] = []

    def processes(jobs: list[Job], waiting: list[int], runtime: Runtime, count: int) -> list[News]:
        asked.append((runtime.threads, count))
        return []

    monkeypatch.setattr("manyheads.jobs._in_processes", processes)
    jobs = _jobs(lab, tmp_path, "local", "fedavg", "deprl")
    for threads in (7, 2):
        assert list(run_jobs(jobs, replace(ONE, threads=threads))) == []
    assert asked == [(2, 3), (1, 2)]


def test_a_finished_run_on_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    x, y = np.arange(60.0).reshape(20, 3), np.arange(20) % 2
    np.savez(path, x=x, y=y)
    experiment = Experiment(data=str(path), model="mlp:4", split="iid", workers=2, rounds=1)
    jobs = plan(distinct([experiment], ONE), tmp_path / "runs")
    assert [item.state for item in run_jobs(jobs, ONE)] == ["running", "finished"]
    assert list(run_jobs(jobs, ONE)) == [News(0, "finished", 1)]
    np.savez(path, x=x + 1, y=y)
    (refused,) = run_jobs(jobs, ONE)
    assert refused.state == "failed"
    assert f"was not begun on the data that {path} holds now" in refused.error


def test_a_finished_run_of_code_that_changed_is_refused(lab: SimpleNamespace, tmp_path: Path) -> None:
    def factor(bigger: float) -> Callable[[torch.Tensor, np.random.Generator], torch.Tensor]:
        return (lambda x, rng: x) if bigger == 1 else (lambda x, rng: x * bigger)

    begun, edited = (_jobs(lab, tmp_path, "local", rounds=1, transform=factor(size)) for size in (1, 2))
    assert [item.state for item in run_jobs(begun, ONE)] == ["running", "finished"]
    assert list(run_jobs(begun, ONE)) == [News(0, "finished", 1)]
    (refused,) = run_jobs(edited, ONE)
    assert refused.state == "failed" and "was begun with different code in its transform" in refused.error


def test_data_without_a_checksum_are_compared_where_they_lie(tmp_path: Path) -> None:
    there, experiment = replace(ONE, data_dir=tmp_path), Experiment(data="mobiact", model="mlp:4", workers=2, rounds=1)
    x, y = np.random.default_rng(0).normal(size=(60, 900)), np.arange(60) % 6
    for change, states in ((0, ["running", "finished"]), (0, ["finished"]), (1, ["failed"])):
        x[3, 4] += change
        np.savez(tmp_path / "mobiact6.npz", x=x, y=y)
        jobs = plan(distinct([experiment], there), tmp_path / "runs")
        assert [item.state for item in run_jobs(jobs, there)] == states
