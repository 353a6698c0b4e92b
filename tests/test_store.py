import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from manyheads.algorithms import DPSGD, DePRL
from manyheads.checkpoint import Checkpoints, Snapshot
from manyheads.errors import UserError
from manyheads.experiment import Experiment
from manyheads.models import Split, build
from manyheads.recipes import RECIPES
from manyheads.record import Record
from manyheads.store import Run, RunDirectory
from manyheads.tree import stack

EXPERIMENT = Experiment(workers=4, rounds=50).complete(RECIPES["digits"])


def record(round: int, **values: Any) -> Record:
    numbers = dict.fromkeys(
        (
            "accuracy_mean",
            "accuracy_std",
            "accuracy_worst10",
            "accuracy_before_mixing",
            "loss",
            "train_loss",
            "consensus_error",
            "consensus_error_relative",
            "consensus_error_before_mixing",
            "bytes_sent_per_worker",
            "bytes_received_per_worker",
            "seconds",
            "simulated_seconds",
        ),
        round / 100,
    )
    return Record(
        **{
            "round": round,
            "algorithm": "deprl",
            "run_id": EXPERIMENT.run_id,
            "accuracy_validation": None,
            "majority_floor": 0.1,
            "workers_without_test": 0,
            "bytes_on_wire": 0,
            "peak_memory_bytes": 1,
            "per_worker": {"accuracy": [0.5, None, 0.25, round / 10]},
            **numbers,
            **values,
        }
    )


def start(path: Path, experiment: Experiment = EXPERIMENT, resume: bool = False) -> RunDirectory:
    return RunDirectory.open(path, experiment, resume=resume)


def save_checkpoint(path: Path, round: int, experiment: Experiment = EXPERIMENT) -> Snapshot:
    n = experiment.workers
    state = Snapshot(round, {"head.w": torch.rand(n, 3)}, {}, np.arange(n), np.arange(n) + 1, 7, 1.5)
    Checkpoints(path / "checkpoint", run_id=experiment.run_id, num_workers=n, workers=range(n)).save(state)
    return state


def rounds(records: list[dict[str, Any]]) -> list[int]:
    return [entry["round"] for entry in records]


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file() and file.name != ".lock"}


@contextmanager
def refused(path: Path, pattern: str) -> Iterator[None]:
    """A UserError of one line that overwrites nothing."""
    before = contents(path) if path.is_dir() else None
    with pytest.raises(UserError, match=pattern) as caught:
        yield
    assert "\n" not in str(caught.value)
    assert before is None or contents(path) == before


def test_a_new_directory_holds_the_whole_experiment(tmp_path: Path) -> None:
    directory = start(tmp_path / "runs" / "a")
    assert directory.path == tmp_path / "runs" / "a"
    assert (directory.path / "experiment.json").read_text() == EXPERIMENT.to_json()
    assert Run.open(directory.path).experiment == EXPERIMENT
    assert not directory.finished(1)


def test_the_same_experiment_is_taken_up_again(tmp_path: Path) -> None:
    start(tmp_path).append(record(1))
    before = contents(tmp_path)
    start(tmp_path)
    start(tmp_path, resume=True)
    assert contents(tmp_path) == before


def test_resume_insists_on_a_directory(tmp_path: Path) -> None:
    with refused(tmp_path, r"--resume: there is no run in .*/a\."):
        start(tmp_path / "a", resume=True)
    assert list(tmp_path.iterdir()) == []


def test_another_experiment_is_refused_by_the_options_that_differ(tmp_path: Path) -> None:
    start(tmp_path)
    with refused(tmp_path, r"\(graph ring there, full here; seed 1 there, 2 here\): choose another --out"):
        start(tmp_path, replace(EXPERIMENT, graph="full", seed=2))
    with refused(tmp_path, r"\(head_epochs 2 there, 5 here\)"):
        start(tmp_path, replace(EXPERIMENT, algorithm=DePRL(head_epochs=5)))
    with refused(tmp_path, r"\(algorithm deprl there, d-psgd here; graph ring there, full here\)"):
        start(tmp_path, replace(EXPERIMENT, algorithm=DPSGD(), graph="full"))
    with refused(tmp_path, r"\(model mlp:64 there, module Linear \w{8} here\)"):
        start(tmp_path, replace(EXPERIMENT, model=nn.Linear(64, 10)))


@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_a_damaged_experiment_is_refused(tmp_path: Path, content: str) -> None:
    start(tmp_path)
    (tmp_path / "experiment.json").write_text(content)
    with refused(tmp_path, r"experiment\.json is damaged"):
        start(tmp_path)


def test_a_changed_experiment_file_is_another_experiment(tmp_path: Path) -> None:
    start(tmp_path)
    (tmp_path / "experiment.json").write_text("{}")
    with refused(tmp_path, "algorithm None there, deprl here"):
        start(tmp_path)


def test_a_directory_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with refused(tmp_path, "is not empty and no run directory"):
        start(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]
    with refused(tmp_path, "is a file"):
        start(tmp_path / "thesis.tex")
    with refused(tmp_path, "cannot write .*: Not a directory"):
        start(tmp_path / "thesis.tex" / "run")


def test_a_process_killed_before_its_experiment_was_written_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / ".experiment.json.12ab34cd.part").write_text("{")
    start(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".lock", "experiment.json"]


def test_more_rounds_extend_a_run(tmp_path: Path) -> None:
    directory = start(tmp_path)
    directory.finish(record(50), {})
    assert directory.finished(50)
    longer = replace(EXPERIMENT, rounds=80)
    assert not start(tmp_path, longer).finished(80)
    assert Run.open(tmp_path).experiment == longer


def test_fewer_rounds_than_done_are_finished(tmp_path: Path) -> None:
    directory = start(tmp_path)
    directory.finish(record(50), {})
    assert start(tmp_path, replace(EXPERIMENT, rounds=20)).finished(20)
    assert Run.open(tmp_path).experiment.rounds == 50


def test_a_run_cannot_be_taken_back_behind_its_checkpoint(tmp_path: Path) -> None:
    start(tmp_path)
    save_checkpoint(tmp_path, 12)
    with refused(tmp_path, "has come to round 12, beyond --rounds 10: give at least 12"):
        start(tmp_path, replace(EXPERIMENT, rounds=10))
    start(tmp_path, replace(EXPERIMENT, rounds=20))
    assert Run.open(tmp_path).experiment.rounds == 20


def test_rounds_are_fixed_where_the_schedule_depends_on_them(tmp_path: Path) -> None:
    scheduled = replace(EXPERIMENT, schedule="corollary")
    start(tmp_path, scheduled)
    with refused(tmp_path, r"\(rounds 50 there, 80 here\)"):
        start(tmp_path, replace(scheduled, rounds=80))


def test_records_are_lines_in_two_files(tmp_path: Path) -> None:
    directory = start(tmp_path)
    for round in (1, 2):
        directory.append(record(round, loss=float("nan")))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[1]) == {**record(2).metrics(), "loss": None}
    run = Run.open(tmp_path)
    assert run.metrics() == [json.loads(line) for line in lines]
    assert run.workers()[1] == {"round": 2, "accuracy": [0.5, None, 0.25, 0.2]}
    assert run.damaged_lines == 0


def test_a_record_can_be_taken_up_again(tmp_path: Path) -> None:
    directory = start(tmp_path)
    assert directory.record(1) is None
    for round in (1, 2):
        directory.append(record(round))
    assert directory.record(2) == record(2)
    assert directory.record(3) is None


def test_records_are_cut_back_to_a_round(tmp_path: Path) -> None:
    directory = start(tmp_path)
    assert not directory.cut_back(0)
    for round in range(1, 6):
        directory.append(record(round))
    assert not directory.cut_back(5)
    assert directory.cut_back(3)
    run = Run.open(tmp_path)
    assert rounds(run.metrics()) == rounds(run.workers()) == [1, 2, 3]
    directory.append(record(4))
    assert rounds(run.metrics()) == [1, 2, 3, 4]
    assert directory.cut_back(0)
    assert run.metrics() == []


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_line_that_was_not_written_to_its_end_is_dropped(tmp_path: Path, cut: int) -> None:
    directory = start(tmp_path)
    for round in (1, 2):
        directory.append(record(round))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    run = Run.open(tmp_path)
    assert rounds(run.metrics()) == [1]
    assert run.damaged_lines == 1
    assert directory.cut_back(2)
    directory.append(record(2))
    assert rounds(run.metrics()) == [1, 2]
    assert run.damaged_lines == 0


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    directory = start(tmp_path)
    for round in (1, 2, 3):
        directory.append(record(round))
    for name, bad in (("metrics.jsonl", b"\xff\x00{"), ("workers.jsonl", b"[2]")):
        lines = (tmp_path / name).read_bytes().splitlines()
        (tmp_path / name).write_bytes(b"\n".join([lines[0], bad, lines[2], b""]))
    run = Run.open(tmp_path)
    assert rounds(run.metrics()) == rounds(run.workers()) == [1, 3]
    assert run.damaged_lines == 2
    run.metrics()
    assert run.damaged_lines == 2


def test_the_summary_is_the_last_record(tmp_path: Path) -> None:
    directory = start(tmp_path)
    assert Run.open(tmp_path).summary() is None
    directory.finish(record(50, loss=float("inf")), {"notes": ["one"], "runtime": {"engine": "loop"}})
    expected = {**record(50).metrics(), "rounds": 50, "loss": None, "notes": ["one"], "runtime": {"engine": "loop"}}
    del expected["round"]
    assert Run.open(tmp_path).summary() == expected
    assert directory.finished(50)
    assert not directory.finished(51)
    (tmp_path / "summary.json").write_text('{"rounds": 5')
    assert not directory.finished(1)


def test_a_full_disk_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = start(tmp_path)
    directory.finish(record(50), {})

    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full_disk)
    with refused(tmp_path, r"cannot write .*summary\.json: No space left on device"):
        directory.finish(record(60), {})
    with refused(tmp_path, r"cannot write .*models\.safetensors|cannot write .*model\.json"):
        directory.save_models({"head.w": torch.zeros(4, 2)}, {}, {})
    monkeypatch.setattr(Path, "open", full_disk)
    with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
        directory.append(record(51))


HOLD = """
import sys, time
from pathlib import Path
from manyheads.store import RunDirectory
with RunDirectory(Path(sys.argv[1])).lock():
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_process_is_kept_out_until_the_first_is_gone(tmp_path: Path) -> None:
    directory = start(tmp_path)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, env=env) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"held\n"
            with refused(tmp_path, "another process is writing to"), directory.lock():
                pytest.fail("two processes hold one run directory")
            with refused(tmp_path, "another process is writing to"):
                start(tmp_path, replace(EXPERIMENT, rounds=80))
        finally:
            other.send_signal(signal.SIGKILL)
    with directory.lock():
        pass


def test_what_is_no_run_cannot_be_opened(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with refused(path, "is no run directory"):
            Run.open(path)


def test_the_state_is_that_of_the_newest_good_checkpoint(tmp_path: Path) -> None:
    start(tmp_path)
    run = Run.open(tmp_path)
    with refused(tmp_path, "has no checkpoint"):
        run.state()
    old = save_checkpoint(tmp_path, 8)
    new = save_checkpoint(tmp_path, 12)
    assert torch.equal(run.state().params["head.w"], new.params["head.w"])
    assert run.notes == []
    (tmp_path / "checkpoint" / "round-000012" / "manifest.json").write_text("")
    assert torch.equal(run.state().params["head.w"], old.params["head.w"])
    assert "continuing from round 8" in run.notes[0]


def nets(experiment: Experiment, shape: tuple[int, ...]) -> list[Split]:
    """A trained-looking net for each worker: no two equal, statistics moved."""
    made = []
    for worker in range(experiment.workers):
        torch.manual_seed(worker)
        assert experiment.model is not None
        net = build(experiment.model, shape, 3, head=experiment.head, norm=experiment.norm).to(experiment.dtype)
        with torch.no_grad():
            for p in net.parameters():
                p.add_(torch.randn_like(p))
            net.train()(torch.randn(8, *shape, dtype=experiment.dtype))
        made.append(net.eval())
    return made


def save_nets(directory: RunDirectory, made: list[Split], shape: tuple[int, ...]) -> None:
    params = stack({name: p.detach() for name, p in net.named_parameters()} for net in made)
    buffers = stack({name: leaf for name, leaf in net.state_dict().items() if name not in params} for net in made)
    directory.save_models(params, buffers, {"input_shape": list(shape), "num_outputs": 3})


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_worker_deploys_its_own_net(tmp_path: Path, precision: Any) -> None:
    own = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3))
    experiment = replace(EXPERIMENT, model=own, precision=precision)
    directory, made = start(tmp_path, experiment), nets(experiment, (2, 3))
    run = Run.open(tmp_path, model=own)
    with refused(tmp_path, "has no models yet"):
        run.model(0)
    save_nets(directory, made, (2, 3))
    x = torch.randn(7, 2, 3, dtype=experiment.dtype)
    before = torch.get_rng_state()
    for worker, net in enumerate(made):
        found = run.model(worker)
        assert not found.training
        assert torch.equal(found(x), net(x))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_net_is_built_by_its_name_without_the_data_it_was_trained_on(tmp_path: Path) -> None:
    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (output - y).square().mean(1)

    experiment = replace(EXPERIMENT, loss=loss)
    made = nets(experiment, (6,))
    save_nets(start(tmp_path, experiment), made, (6,))
    x = torch.randn(7, 6)
    assert torch.equal(Run.open(tmp_path).model(2)(x), made[2](x))
    with refused(tmp_path, "loss is function"):
        _ = Run.open(tmp_path).experiment
    assert Run.open(tmp_path, loss=loss).experiment == experiment


def test_a_wrong_worker_model_or_file_is_said_in_one_line(tmp_path: Path) -> None:
    own = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    experiment = replace(EXPERIMENT, model=own)
    save_nets(start(tmp_path, experiment), nets(experiment, (6,)), (6,))
    for worker in (-1, 4):
        with refused(tmp_path, f"worker {worker} is not in this run: give 0 to 3"):
            Run.open(tmp_path, model=own).model(worker)
    with refused(tmp_path, "model is module Sequential, which cannot be read from a file"):
        Run.open(tmp_path).model(0)
    with refused(tmp_path, "does not fit the weights"):
        Run.open(tmp_path, model=nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))).model(0)
    path = tmp_path / "models.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with refused(tmp_path, r"models\.safetensors cannot be read"):
        Run.open(tmp_path, model=own).model(0)
