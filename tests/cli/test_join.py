"""``join`` end to end: what people see of it, a second call, and runs that cannot be joined."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from manyheads.cli import main
from manyheads.store import Run


def _join(capsys: pytest.CaptureFixture, *words: object) -> list[str]:
    assert main(["join", *map(str, words)]) == 0
    caught = capsys.readouterr()
    assert caught.err == ""
    return caught.out.splitlines()


def test_join_and_join_again(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = (finished, "--workers", 5, "--head-epochs", 2, "--split", "iid")
    lines = _join(capsys, *words)
    out = Path(lines[-1])
    assert out.parent == Path("runs") and out.name.startswith("digits-join-")
    assert lines[0].startswith("New workers on digits: 5 workers, iid, ")
    assert f"note: Representation after 2 rounds of {finished}: of worker i mod 3." in lines
    summary = Run.open(out).summary()
    assert summary is not None and (summary["rounds"], summary["bytes_sent_per_worker"]) == (2, 0)
    assert f"{100 * summary['accuracy_mean']:.1f} %" in lines[-3]

    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    again = _join(capsys, *words)
    assert again[-1] == str(out)
    assert any("nothing to do" in line for line in again)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before

    assert main(["inspect", "run", str(out)]) == 0
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "learned by deprl" in told
    assert [line for line in told if line.startswith("option ")] == ["option --split iid", "option --workers 5"]
    exported = tmp_path / "model.safetensors"
    assert main(["export", str(out), "--worker", "4", "--out", str(exported)]) == 0
    assert exported.exists()


def test_where_and_how_is_said_as_to_train(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "new"
    words = ["--workers", 4, "--head-epochs", 3, "--seed", 0, "--out", out, "--data-dir", tmp_path, "--device", "cpu"]
    words += ["--engine", "loop", "--threads", 1, "--eval-every", 2, "--checkpoint-every", 1, "--deterministic"]
    lines = _join(capsys, finished, *words, "--quiet")
    assert len(lines) == 2 and lines[0].startswith("join: accuracy ") and lines[1] == str(out), "the result alone"
    summary = Run.open(out).summary()
    assert summary is not None
    assert (summary["runtime"]["engine"], summary["runtime"]["deterministic"]) == ("loop", True)
    assert [row["round"] for row in Run.open(out).metrics()] == [2, 3]


def test_heads_that_learn_nothing(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    text = (run / "experiment.json").read_text()
    (run / "experiment.json").write_text(re.sub(r'lr": [\d.]+', 'lr": 1e-9', text))
    lines = _join(capsys, run, "--workers", 4, "--head-epochs", 1, "--split", "iid", "--out", tmp_path / "new")
    assert "No better than naming each worker's most frequent class: try more --head-epochs." in lines


def test_runs_that_cannot_be_joined(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    unfinished, foreign, out = tmp_path / "unfinished", tmp_path / "foreign", tmp_path / "out"
    shutil.copytree(finished, unfinished)
    (unfinished / "summary.json").unlink()
    foreign.mkdir()
    (foreign / "experiment.json").write_text('{"optimizer": "adam"}')
    mistakes = [
        ([unfinished], "is not finished: continue it"),
        ([foreign], "not a manyheads experiment"),
        ([tmp_path / "nowhere"], "is not a run directory"),
        ([finished, "--head-epochs", "0"], "--head-epochs 0 is not positive"),
        ([finished, "--representation", "ours"], "--representation: unknown value 'ours'"),
        ([finished, "--data", tmp_path / "no.npz"], "no.npz"),
    ]
    for words, message in mistakes:
        assert main(["join", *map(str, words), "--out", str(out)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
        assert not out.exists()


def test_a_run_whose_own_data_have_changed_or_are_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here, elsewhere):
        folder.mkdir()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 3)).astype(np.float32), rng.integers(2, size=60)
    np.savez(here / "my.npz", x=x, y=y)
    monkeypatch.chdir(here)
    assert main(["train", "deprl", "--data", "my.npz", "--workers", "3", "--rounds", "1", "--out", "run"]) == 0
    np.savez(here / "my.npz", x=x + 1, y=y)
    assert main(["join", "run", "--workers", "2", "--out", "new"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "run was not trained on the data that my.npz holds now: put the old data back, or give --data."
    )
    monkeypatch.chdir(elsewhere)
    capsys.readouterr()
    assert main(["join", "../here/run", "--out", "new"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "trained on my.npz" in line and "--data" in line
    assert main(["join", "../here/run", "--workers", "2", "--data", "../here/my.npz", "--out", "new"]) == 0


def test_data_in_the_users_home_and_in_a_file_for_each_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    rng = np.random.default_rng(0)
    for worker in range(3):
        np.savez(f"{worker}.npz", x=rng.normal(size=(30, 3)), y=np.arange(30) % 2)
    for data, run in (("~/0.npz", "one"), ("~/{worker}.npz", "each/site-0")):
        words = ["--data", data, "--workers", "2", "--rounds", "1", "--out", run.split("/")[0]]
        assert main(["train", "deprl", *words]) == 0
        capsys.readouterr()
        made = Path(_join(capsys, run, "--workers", 3, "--out", f"new-{run}")[-1])
        assert Run.open(made).experiment.workers == 3
    assert main(["join", "each/site-0", "--workers", "2", "--data", "~/{worker}.npz", "--out", "named"]) == 0
    capsys.readouterr()
    assert main(["join", "each/site-0", "--workers", "4", "--out", "more"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no process sees the file of worker 3 (~/3.npz): start its site too, or give fewer --workers." in line
