"""Many runs: what they share, what is run once, what a failure leaves alone, and what processes do not change."""

import os
import signal
import time
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from manyheads.algorithms import REGISTRY
from manyheads.compare import Job, News, distinct, labels, plan, run_jobs
from manyheads.errors import UserError
from manyheads.experiment import Experiment, Runtime

ONE = Runtime(device="cpu", threads=1)
TWO = Runtime(device="cpu", threads=2)


def _jobs(lab: SimpleNamespace, folder: Path, *names: str, **changes: object) -> list[Job]:
    experiments = [lab.tiny(REGISTRY[name](), **changes) for name in names]
    return plan(distinct(experiments, ONE), folder)


def _files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_all_share_partition_graph_and_first_weights(lab: SimpleNamespace) -> None:
    data = lab.blobs(workers=4)
    sessions = [
        lab.opened(lab.tiny(kind(), data=data, split="iid", graph="random:0.5", seed=7)) for kind in REGISTRY.values()
    ]
    first = sessions[0]
    other = lab.opened(replace(first.experiment, seed=8))
    assert other.everyone.digest() != first.everyone.digest()
    weights = next(name for name in first.ctx.initial.params if name.startswith("head."))
    assert not torch.equal(other.ctx.initial.params[weights], first.ctx.initial.params[weights])
    for session in sessions[1:]:
        assert session.everyone.digest() == first.everyone.digest()
        for name, leaf in first.ctx.initial.params.items():
            assert torch.equal(session.ctx.initial.params[name], leaf)
    on_graph = [session for session in sessions if session.experiment.graph == "random:0.5"]
    assert [session.experiment.algorithm.name for session in on_graph] == ["deprl", "d-psgd", "dispfl"]
    for session in on_graph:
        assert np.array_equal(session.mixing.rows(0).dense() > 0, first.mixing.rows(0).dense() > 0)


def test_what_an_algorithm_does_not_look_at_makes_no_second_run(lab: SimpleNamespace) -> None:
    asked = [
        lab.tiny(REGISTRY[name](), graph=graph, weights=weights, seed=seed)
        for name in ("deprl", "fedavg", "local")
        for graph in ("ring", "full")
        for weights in (None, "metropolis")
        for seed in (1, 2, 2)
    ]
    found = distinct(asked, ONE)
    assert [(e.algorithm.name, e.graph, e.seed) for e in found] == [
        ("deprl", "ring", 1),
        ("deprl", "ring", 2),
        ("deprl", "full", 1),
        ("deprl", "full", 2),
        ("fedavg", "server", 1),
        ("fedavg", "server", 2),
        ("local", "none", 1),
        ("local", "none", 2),
    ]
    assert labels(found)[2:5] == ["deprl, graph full, seed 1", "deprl, graph full, seed 2", "fedavg, seed 1"]
    assert labels(found[::4]) == ["deprl", "fedavg"]


def test_one_run_cannot_end_twice(lab: SimpleNamespace) -> None:
    with pytest.raises(UserError, match="--rounds 3 and 5: give one number"):
        distinct([lab.tiny(REGISTRY["local"](), rounds=rounds) for rounds in (3, 5)], ONE)


def test_folders_that_are_something_else(lab: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        _jobs(lab, tmp_path / "file", "local")
    (tmp_path / "experiment.json").touch()
    with pytest.raises(UserError, match="holds a single run"):
        _jobs(lab, tmp_path, "local")


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


def test_processes_change_nothing_the_death_of_one_costs_one_run_and_closing_ends_all(
    lab: SimpleNamespace, tmp_path: Path
) -> None:
    here, there = (_jobs(lab, tmp_path / place, "deprl", "ditto", rounds=5) for place in ("here", "there"))
    assert {item.state for item in run_jobs(here, ONE)} == {"running", "finished"}

    news = run_jobs([*there, *_jobs(lab, tmp_path / "there", "local", rounds=100_000)], TWO)
    ends: dict[int, News] = {}
    for number, item in enumerate(news):
        if number == 0:
            assert len(active_children()) == 2
            pid = active_children()[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        if item.state != "running":
            ends[item.job] = item
        if len(ends) == 2 and item.job == 2:
            break
    assert sorted(item.state for item in ends.values()) == ["failed", "finished"]
    (failed,) = (item for item in ends.values() if item.state == "failed")
    assert failed.error.startswith("its process ended with status -9") and not failed.diverged
    assert active_children()
    news.close()
    assert not active_children()

    assert [item.state for item in run_jobs([there[failed.job]], TWO)][-1] == "finished"
    for one, other in zip(here, there, strict=True):
        for name in ("models.safetensors", "workers.jsonl", "partition.safetensors"):
            assert (one.path / name).read_bytes() == (other.path / name).read_bytes()


def test_processes_do_not_hear_ctrl_c_from_their_first_moment_on(lab: SimpleNamespace, tmp_path: Path) -> None:
    def interrupt() -> None:
        while len(children := active_children()) < 2:
            time.sleep(0.001)
        for child in children:
            assert child.pid is not None
            os.kill(child.pid, signal.SIGINT)

    other = Thread(target=interrupt)
    other.start()
    news = list(run_jobs(_jobs(lab, tmp_path, "local", "fedavg"), TWO))
    other.join()
    assert [item.state for item in news if item.state != "running"] == ["finished", "finished"]


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
    assert f"other data than {path} holds now" in refused.error
