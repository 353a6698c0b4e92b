"""A run over sites: the bits of one that sees all data, on files that no other process opens; lost sites are absent."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import manyheads
from manyheads.agreement import NOT_IN_SITES
from manyheads.algorithms import get_algorithm
from manyheads.data import site_files as files
from manyheads.data.arrays import from_workers
from manyheads.errors import UserError
from manyheads.experiment import Experiment, Runtime
from manyheads.report.collect import find_runs
from manyheads.rounds import run
from manyheads.session import open_session
from manyheads.store import Run

PROGRAM = Path(manyheads.__file__).with_name("__main__.py")
TRAIN = (
    "--data",
    "site-{worker}.npz",
    "--workers",
    3,
    "--model",
    "mlp:4",
    "--device",
    "cpu",
    "--threads",
    1,
    "--quiet",
)
ORDER = (2, 0, 1)
"""The site of each rank: processes need not come in the order of the workers."""


def arrays(worker: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(worker)
    size = 12 + 5 * worker
    return rng.normal(size=(size, 6)), rng.integers(3, size=size), rng.normal(size=(5, 6)), rng.integers(3, size=5)


def write(folder: Path, worker: int) -> None:
    """The file of a worker."""
    x, y, x_test, y_test = arrays(worker)
    split = np.array(["train"] * len(x) + ["test"] * len(x_test))
    x, y = np.concatenate([x, x_test]), np.concatenate([y, y_test])
    user = np.full(len(x), "somebody")
    np.savez(folder / f"site-{worker}.npz", x=x, y=y, split=split, num_classes=3, user=user)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """A folder for each rank, with the file of its own worker and nothing else."""
    made = []
    for worker in ORDER:
        folder = tmp_path / f"host-{worker}"
        folder.mkdir()
        write(folder, worker)
        made.append(folder)
    return made


def at_site(folder: Path, worker: int) -> Path:
    return folder / "run" / f"site-{worker}"


@pytest.mark.parametrize("algorithm", ["deprl", "fedavg"])
def test_sites_compute_what_one_process_with_all_data_does(start_together, folders, tmp_path, algorithm: str) -> None:
    words = ("train", algorithm, *TRAIN, "--rounds", 3, "--out", "run")
    started = start_together(3, PROGRAM, *words, folders=folders)
    assert [process.status() for process in started] == [0, 0, 0], [process.text() for process in started]

    data = from_workers([arrays(worker) for worker in range(3)])
    together = Experiment(
        algorithm=get_algorithm(algorithm)(), data=data, split="natural", workers=3, model="mlp:4", rounds=3
    )
    for _ in run(open_session(together, Runtime(out=tmp_path / "together", device="cpu", threads=1))):
        pass
    whole = Run.open(tmp_path / "together", data=data)
    page = (Path(__file__).parents[2] / "docs/sites.md").read_text(encoding="utf-8")
    for worker, folder in zip(ORDER, folders, strict=True):
        site = Run.open(at_site(folder, worker))
        for (name, mine), other in zip(
            site.model(worker).state_dict().items(), whole.model(worker).state_dict().values(), strict=True
        ):
            assert torch.equal(mine, other), name
        with pytest.raises(UserError, match="give the run of that worker's site"):
            site.model((worker + 1) % 3)
        assert site.workers() == whole.workers()
        record, expected = site.metrics()[-1], whole.metrics()[-1]
        for name in ("accuracy_mean", "majority_floor", "loss", "train_loss", "bytes_sent_per_worker"):
            assert record[name] == expected[name] is not None
        for name in ("consensus_error", "simulated_seconds", "accuracy_by_samples"):
            assert record[name] is None and f"`{name}`" in page, name
        summary = site.summary()
        assert summary is not None and summary["disturbances"] == []
        assert any("consensus error" in note for note in summary["notes"])


def test_every_site_sees_its_own_run(start_together, folders) -> None:
    words = ("train", "deprl", *[word for word in TRAIN if word != "--quiet"], "--rounds", 3, "--out", "run")
    started = start_together(3, PROGRAM, *words, folders=folders, machines=(0, 1, 2))
    for worker, process in zip(ORDER, started, strict=True):
        assert process.status() == 0, process.text()
        first, *_, last = process.text().splitlines()
        assert first.startswith("DePRL on site-{worker}.npz: 3 workers") and "round 1/3" in process.text()
        assert last == f"run/site-{worker}"


def test_sites_with_different_kinds_of_data(start_together, folders) -> None:
    np.savez(folders[1] / f"site-{ORDER[1]}.npz", x=np.zeros((9, 6), np.uint8), y=np.arange(9) % 2)
    started = start_together(3, PROGRAM, "train", "deprl", *TRAIN, "--out", "run", folders=folders)
    assert all(process.status() for process in started)
    (line,) = [line for process in started for line in process.text().splitlines() if line.startswith("manyheads")]
    assert "the process of worker 0 (site-0.npz) was started with samples [6] of bytes in 2 classes, " in line
    assert "the process of worker 2 (site-2.npz) with samples [6] of numbers in 3 " in line
    assert line.endswith("and num_classes where a file lacks the last classes.")


def test_what_is_wrong_with_a_sites_data_is_said_there_alone(start_together, folders) -> None:
    np.savez(folders[1] / f"site-{ORDER[1]}.npz", x=np.full((9, 6), np.nan), y=np.arange(9) % 3, num_classes=3)
    words = ("train", "deprl", *TRAIN, "--out", "run")
    started = start_together(3, PROGRAM, *words, folders=folders, machines=(0, 1, 2))
    assert all(process.status() for process in started)
    lines = [[x for x in process.text().splitlines() if x.startswith("manyheads")] for process in started]
    assert [len(said) for said in lines] == [1, 1, 1]
    assert f"site-{ORDER[1]}.npz" in lines[1][0]
    assert (
        lines[0]
        == lines[2]
        == [f"manyheads: the process of worker {ORDER[1]} (site-{ORDER[1]}.npz) failed: its output says why."]
    )


LARGEST = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.top = nn.Linear(6, 4), nn.Linear(4, 3)
        self.register_buffer("largest", torch.tensor(100.0))

    def forward(self, x):
        if self.training:
            self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
        return self.top(self.body(x / self.largest))
"""


def test_a_statistic_that_moves_at_one_site_only_is_mixed_by_all(start_together, folders) -> None:
    x, y, *_ = arrays(ORDER[1])
    np.savez(folders[1] / f"site-{ORDER[1]}.npz", x=1000 * np.sign(x), y=y, num_classes=3)
    for folder in folders:
        (folder / "own.py").write_text(LARGEST)
    words = ("train", "deprl", *TRAIN, "--model", "own:Net", "--rounds", 1, "--out", "run")
    started = start_together(3, PROGRAM, *words, folders=folders)
    assert [process.status() for process in started] == [0, 0, 0], [process.text() for process in started]
    for worker, folder in zip(ORDER, folders, strict=True):
        kept = load_file(at_site(folder, worker) / "models.safetensors")
        assert kept["representation.largest"].item() == pytest.approx(400.0)


def test_a_site_without_test_samples(start_together, folders) -> None:
    """It trains like the others, and is left out of the accuracies."""
    few, all_for_training = folders[0] / f"site-{ORDER[0]}.npz", folders[1] / f"site-{ORDER[1]}.npz"
    np.savez(few, x=np.ones((1, 6)), y=np.array([1]), num_classes=3)
    np.savez(all_for_training, x=np.ones((9, 6)), y=np.arange(9) % 3, split=np.full(9, "train"), num_classes=3)
    started = start_together(3, PROGRAM, "train", "deprl", *TRAIN, "--rounds", 2, "--out", "run", folders=folders)
    assert [process.status() for process in started] == [0, 0, 0], [process.text() for process in started]
    for worker, folder in zip(ORDER, folders, strict=True):
        site = Run.open(at_site(folder, worker))
        values, record = site.workers()[-1], site.metrics()[-1]
        assert [value is None for value in values["accuracy"]] == [True, False, True]
        assert record["workers_without_test"] == 2 and record["accuracy_mean"] == values["accuracy"][1]
        assert None not in values["train_loss"]


def test_the_clock_of_sites_is_not_called_a_guess(folders) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    experiment = Experiment(data=str(folders[0] / "site-{worker}.npz"), workers=3, model=net)
    notes = open_session(experiment, Runtime(device="cpu", threads=1)).notes
    assert [note for note in notes if "imulated time" in note] == [NOT_IN_SITES]


def test_a_site_that_was_never_there_in_python(folders) -> None:
    experiment = Experiment(data=str(folders[0] / "site-{worker}.npz"), workers=3, model="mlp:4")
    with pytest.raises(UserError, match="no process sees the file of worker 0"):
        next(run(open_session(experiment, Runtime(device="cpu", threads=1))))


def test_a_site_that_was_never_there(start_together, folders) -> None:
    started = start_together(2, PROGRAM, "train", "deprl", *TRAIN, "--out", "run", folders=folders[:2])
    assert all(process.status() for process in started)
    (line,) = [line for process in started for line in process.text().splitlines() if line.startswith("manyheads")]
    assert f"no process sees the file of worker {ORDER[2]} (site-{ORDER[2]}.npz)" in line
    assert not (folders[0] / "run").exists()


def test_a_lost_site_is_absent_until_it_returns(start_together, folders) -> None:
    """Worker 1's site is killed, the others go on without it, and it comes back with the state it had."""
    words = ("train", "deprl", *TRAIN, "--out", "run", "--checkpoint-every", 2, "--rounds")
    started = start_together(3, PROGRAM, *words, 4000, folders=folders)
    lines = at_site(folders[2], 1) / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (lines.exists() and lines.read_bytes().count(b"\n") >= 5):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(started[2].process.pid, signal.SIGKILL)
    assert started[0].status() and started[1].status()
    text = started[0].text() + started[1].text()
    # On a busy machine another that has ended because of it may be named beside it.
    assert re.search(
        r"process(es)? of (worker \d \(site-\d.npz\) and )?worker 1 \(site-1.npz\) w(as|ere) lost", text
    ), text

    lost = Run.open(at_site(folders[2], 1)).state()
    last = Run.open(at_site(folders[0], 2)).state().round
    for process in start_together(2, PROGRAM, *words, last + 20, folders=folders[:2]):
        assert process.status() == 0, process.text()
    for worker, folder in zip(ORDER[:2], folders[:2], strict=True):
        site = Run.open(at_site(folder, worker))
        summary = site.summary()
        assert summary is not None and len(summary["disturbances"]) == 1
        assert "worker 1 was away" in summary["disturbances"][0]
        record = site.workers()[-1]
        assert record["accuracy"][1] is None and None not in record["accuracy"][::2]
        sent = [record["bytes_sent_per_worker"] for record in site.metrics()]
        assert sent == sorted(sent), "what was sent before a site was lost has been sent"

    late = start_together(2, PROGRAM, *words, last + 30, "--site-timeout", 0.001, folders=folders[:2])
    assert all(process.status() for process in late)
    assert sum("worker 1 was away for more than 0.001 s" in process.text() for process in late) == 1
    assert Run.open(at_site(folders[0], 2)).metrics()[-1]["round"] == last + 20, "nothing was trained"

    uneven = start_together(3, PROGRAM, *words, last + 20, folders=folders)
    assert all(process.status() for process in uneven)
    # On one machine one of them says so for all.
    (said,) = filter(None, (process.text() for process in uneven))
    assert re.search(
        rf"(this|other) sites? ha(s|ve) finished the {last + 20} rounds asked for, but .* not: give all", said
    )

    for process in start_together(3, PROGRAM, *words, last + 40, folders=folders):
        assert process.status() == 0, process.text()
    back = Run.open(at_site(folders[2], 1))
    summary = back.summary()
    assert summary is not None and summary["rounds"] == last + 40
    told = f"Worker 1 went on in round {last + 21} with the state of round {lost.round}."
    for worker, folder in zip(ORDER, folders, strict=True):
        everywhere = Run.open(at_site(folder, worker)).summary()
        assert everywhere is not None and everywhere["disturbances"][-1] == told
    assert None not in back.workers()[-1]["accuracy"]
    others = {record["round"]: record["accuracy"] for record in Run.open(at_site(folders[0], 2)).workers()}
    rounds = [record["round"] for record in back.workers()]
    assert rounds == [*range(1, lost.round + 1), *range(last + 21, last + 41)], "it was away in the rounds between"
    assert [record["accuracy"] for record in back.workers()] == [others[round] for round in rounds]
    assert json.loads((at_site(folders[0], 2) / "site.json").read_text())["away"] == {}


def test_a_site_that_returns_without_its_folder_is_told_that_it_begins_with_first_weights(start_together, folders):
    loud = [word for word in TRAIN if word != "--quiet"]
    words = ("train", "deprl", *loud, "--workers", 2, "--out", "run", "--rounds")
    at_hosts = {"folders": folders[1:], "machines": (0, 1)}
    for process in start_together(2, PROGRAM, *words, 2, **at_hosts):
        assert process.status() == 0, process.text()
        assert not re.search("holds no checkpoint|while this site was away", process.text()), "all begin together"
    shutil.rmtree(folders[2] / "run")
    stayed, returned = start_together(2, PROGRAM, *words, 3, **at_hosts)
    assert (stayed.status(), returned.status()) == (0, 0), stayed.text() + returned.text()
    told = (
        "note: run/site-1 holds no checkpoint to go on from, but the other sites have reached round 2: this one starts"
    )
    assert told in returned.text() and "first weights. If it has trained before, stop it" in returned.text()
    assert "holds no checkpoint" not in stayed.text()
    assert "note: Worker 1 went on in round 3 with first weights." in stayed.text()


def test_sites_that_end_a_run_one_after_the_other(start, start_together, folders, tmp_path: Path) -> None:
    """Who returns and finds nobody is told what that may mean; who was there all the time is not."""
    words = ("train", "deprl", *TRAIN, "--workers", 2, "--out", "run", "--rounds")
    for process in start_together(2, PROGRAM, *words, 2, folders=folders[1:]):
        assert process.status() == 0, process.text()
    for worker, restarts in enumerate((1, 0)):
        alone = start(PROGRAM, *words, 4, cwd=folders[1 + worker], TORCHELASTIC_RESTART_COUNT=restarts)
        assert alone.status() == 0, alone.text()
        shutil.copytree(at_site(folders[1 + worker], worker), tmp_path / "both" / f"site-{worker}")
    told = "If worker 0 ended the run while this site was away, stop this one and start all sites with more --rounds"
    stayed, returned = (Run.open(tmp_path / "both" / f"site-{worker}").summary() for worker in range(2))
    assert stayed is not None and returned is not None
    assert [sum(told in note for note in summary["notes"]) for summary in (stayed, returned)] == [0, 1]
    assert not any("while this site was away" in note for note in stayed["notes"])
    assert find_runs(tmp_path / "both").parted == [tmp_path / "both" / "site-1"]

    for process in start_together(2, PROGRAM, *words, 6, folders=folders[1:]):
        assert process.status() == 0, process.text()
    for worker in range(2):
        shutil.copytree(at_site(folders[1 + worker], worker), tmp_path / "again" / f"site-{worker}")
    assert find_runs(tmp_path / "again").parted == []


def test_a_site_that_was_stopped_while_it_wrote_its_result_writes_it_alone(start, start_together, folders) -> None:
    """The others may have theirs: what all have trained must not be lost, where more rounds are another run."""
    words = ("train", "deprl", *TRAIN, "--workers", 2, "--schedule", "corollary", "--rounds", 2, "--out", "run")
    for process in start_together(2, PROGRAM, *words, folders=folders[1:]):
        assert process.status() == 0, process.text()
    stopped = at_site(folders[2], 1)
    noted = json.loads((stopped / "site.json").read_text())
    (stopped / "site.json").write_text(json.dumps({**noted, "disturbances": ["Noted before."]}))
    whole = {name: (stopped / name).read_bytes() for name in ("models.safetensors", "model.json", "workers.jsonl")}
    for name in ("models.safetensors", "model.json", "summary.json"):
        (stopped / name).unlink()
    for process in start_together(2, PROGRAM, *words, folders=folders[1:]):
        assert process.status() == 0, process.text()
    assert {name: (stopped / name).read_bytes() for name in whole} == whole
    summary = Run.open(stopped).summary()
    assert summary is not None and summary["disturbances"] == ["Noted before."]
    # Where it finds nobody, too.
    (stopped / "summary.json").unlink()
    alone = start(PROGRAM, *words, cwd=folders[2])
    assert alone.status() == 0, alone.text()
    again = Run.open(stopped).summary()
    assert again is not None and again["disturbances"] == ["Noted before."]


def test_no_site_writes_its_result_before_all_have_their_last_checkpoint(start_together, folders) -> None:
    """Else one with a full disk would be left behind by others that can never go back to it."""
    words = ("train", "deprl", *TRAIN, "--workers", 2, "--out", "run", "--rounds")
    for process in start_together(2, PROGRAM, *words, 2, folders=folders[1:]):
        assert process.status() == 0, process.text()
    in_the_way = at_site(folders[2], 1) / "checkpoint" / "round-000003"
    in_the_way.touch()
    assert all(process.status() for process in start_together(2, PROGRAM, *words, 3, folders=folders[1:]))
    in_the_way.unlink()
    for process in start_together(2, PROGRAM, *words, 3, folders=folders[1:]):
        assert process.status() == 0, process.text()
    summary = Run.open(at_site(folders[1], 0)).summary()
    assert summary is not None and (summary["rounds"], summary["disturbances"]) == (3, [])


def test_a_site_goes_on_with_as_many_processes_as_before(start_together, tmp_path: Path) -> None:
    for worker in range(2):
        x, y, *_ = arrays(worker)
        np.savez(tmp_path / f"site-{worker}.npz", x=x, y=y, num_classes=3)
    words = ("train", "deprl", *TRAIN, "--workers", 2, "--out", "run", "--rounds")
    (alone,) = start_together(1, PROGRAM, *words, 1, folders=[tmp_path])
    assert alone.status() == 0, alone.text()
    before = (at_site(tmp_path, 0) / "summary.json").read_bytes()
    both = start_together(2, PROGRAM, *words, 2, folders=[tmp_path] * 2)
    assert all(process.status() for process in both)
    (line,) = [line for process in both for line in process.text().splitlines()]
    assert "run/site-0 was begun with workers 0, 1, and this process now has worker 0" in line
    assert (at_site(tmp_path, 0) / "summary.json").read_bytes() == before and not at_site(tmp_path, 1).exists()
    (alone,) = start_together(1, PROGRAM, *words, 2, folders=[tmp_path])
    assert alone.status() == 0, alone.text()


def test_what_is_said_of_many_files_is_said_once(tmp_path: Path) -> None:
    for worker in range(6):
        more = {"users": 0} if worker == 5 else {}
        np.savez(tmp_path / f"w{worker}.npz", x=np.full((6, 1, 4, 4), 255.0), y=np.arange(6) % 2, **more)
    template = str(tmp_path / "w{worker}.npz")
    of_all, of_one = files.load(template, range(6)).notes
    assert of_all.startswith(f"{template} of workers 0 to 5: x looks like bytes")
    assert of_one.startswith(f"{tmp_path / 'w5.npz'}: not read: users")


def test_files_are_named_by_worker(tmp_path: Path) -> None:
    assert files.is_site_path("a/site-{worker}.npz") and not files.is_site_path("digits") and not files.is_site_path(3)
    for worker in (0, 2):
        np.savez(tmp_path / f"w{worker}.npz", x=np.full((6, 2), float(worker)), y=np.arange(6) % 2, users=0)
    template = str(tmp_path / "w{worker}.npz")
    assert [*files.seen(template, 4)] == ["0", "2"]
    data = files.load(template, range(2, 3))
    assert data.num_classes == 2 and (data.x_train == 2).all() and not files.is_site_path(data)
    assert [note.partition(":")[0] for note in data.notes] == [str(tmp_path / "w2.npz")]
    assert data.user_train is not None and set(data.user_train.tolist()) == {2}
    labels = np.arange(6) % 2
    for x, y, said in (
        (np.zeros((6, 2)), np.arange(6) % 3, "[2] of numbers in 3 classes"),
        (np.zeros((6, 3)), labels, "[3] of numbers in 2 classes"),
        # Bytes alone are scaled.
        (np.zeros((6, 2), np.uint8), labels, "[2] of bytes in 2 classes"),
        (np.zeros((6, 2)), np.zeros((6, 4)), "[2] of numbers with numbers [4] to predict"),
    ):
        np.savez(tmp_path / "w1.npz", x=x, y=y)
        holds = rf"w1\.npz holds samples {re.escape(said)}, .*w0\.npz \[2\] of numbers in 2 classes: give all"
        with pytest.raises(UserError, match=holds):
            files.load(template, range(2))


def test_the_files_of_a_site_are_what_its_workers_would_bring_in_python(tmp_path: Path) -> None:
    for worker in (1, 2):
        write(tmp_path, worker)
    found = files.load(str(tmp_path / "site-{worker}.npz"), range(1, 3))
    assert found.users is None, "who they are stays in their files"
    wanted = from_workers([arrays(worker) for worker in (1, 2)])
    for name in ("x_train", "y_train", "x_test", "y_test"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert found.user_train is not None and found.user_test is not None
    assert wanted.user_train is not None and wanted.user_test is not None
    assert torch.equal(found.user_train, 1 + wanted.user_train)
    assert torch.equal(found.user_test, 1 + wanted.user_test)
