"""``train`` end to end: a new run, the same command again, more rounds, other options; what people and scripts see."""

import errno
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from manyheads.algorithms import REGISTRY
from manyheads.cli import main, train
from manyheads.store import Run

SMALL = ["--model", "mlp:16", "--workers", "4", "--rounds", "2"]


@pytest.fixture(autouse=True)
def _in_tmp_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def _train(capsys: pytest.CaptureFixture, *words: str) -> list[str]:
    """The lines that a training prints."""
    assert main(["train", *words]) == 0
    caught = capsys.readouterr()
    assert caught.err == ""
    return caught.out.splitlines()


def test_a_finished_run_is_shown_where_nothing_can_be_written(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = _train(capsys, "deprl", *SMALL)
    (Path(lines[-1]) / ".models.safetensors.12ab34cd.part").touch()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("manyheads.files.os.open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert _train(capsys, "deprl", *SMALL)[-3:] == lines[-3:]
    assert main(["train", "deprl", *SMALL, "--rounds", "3"]) == 2
    assert "Read-only file system" in capsys.readouterr().err


def test_train_again_and_further(capsys: pytest.CaptureFixture) -> None:
    lines = _train(capsys, "deprl", *SMALL)
    out = Path(lines[-1])
    experiment = Run.open(out).experiment
    assert out == Path("runs", f"digits-deprl-{experiment.run_id}")
    assert lines[0].startswith("DePRL on digits: 4 workers, dirichlet:0.3, ring, ")
    assert lines[0].endswith(", 2 rounds (batched engine, cpu)")
    assert lines[1].startswith("round 1/2  accuracy ")
    summary = Run.open(out).summary()
    assert summary is not None
    assert f"{100 * summary['accuracy_mean']:.1f} %" in lines[-3]
    assert [row["round"] for row in Run.open(out).metrics()] == [1, 2]

    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    again = _train(capsys, "deprl", *SMALL)
    assert f"note: {out} already holds the 2 rounds asked for: nothing to do." in again
    assert again[-3:] == lines[-3:]
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before

    fewer = _train(capsys, "deprl", *SMALL, "--rounds", "1")
    assert f"note: {out} already holds 2 rounds, and its result is that of the last: nothing to do." in fewer
    assert fewer[-3:] == lines[-3:]

    further = _train(capsys, "deprl", *SMALL, "--rounds", "3")
    assert f"note: Continuing the run in {out} from round 2." in further
    assert further[-1] == str(out)
    direct = _train(capsys, "deprl", *SMALL, "--rounds", "3", "--out", "direct")
    assert direct[-1] == "direct"
    assert (out / "models.safetensors").read_bytes() == Path("direct", "models.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["dispfl", "--weights", "metropolis"], "--weights"),
        (["fedavg", "--redraw"], "--redraw"),
        (["fedavg", "--link-failure", "0.5"], "--link-failure"),
        (["local", "--weights", "lazy"], "--weights"),
    ],
)
def test_an_option_that_the_algorithm_does_not_look_at_is_refused(
    capsys: pytest.CaptureFixture, words: list[str], option: str
) -> None:
    assert main(["train", *words, *SMALL]) == 2
    assert capsys.readouterr().err == f"manyheads: {option} is not used by {words[0]}: leave it out.\n"


@pytest.mark.parametrize(("algorithm", "graph"), [("fedavg", "server"), ("local", "none")])
def test_without_a_graph_the_option_is_passed_over(capsys: pytest.CaptureFixture, algorithm: str, graph: str) -> None:
    out = Path(_train(capsys, algorithm, "--graph", "full", *SMALL)[-1])
    assert out == Path(_train(capsys, algorithm, *SMALL)[-1])
    assert json.loads((out / "experiment.json").read_text())["graph"] == graph


def test_an_option_that_says_what_the_algorithm_does_is_taken(capsys: pytest.CaptureFixture) -> None:
    _train(capsys, "dispfl", "--weights", "uniform", *SMALL, "--quiet")
    words = ["--graph", "server", "--no-redraw", "--weights", "auto", "--link-failure", "0", "--worker-failure", "0.5"]
    out = Path(_train(capsys, "fedavg", *words, *SMALL, "--quiet")[-1])
    taken = json.loads((out / "experiment.json").read_text())
    assert (taken["graph"], taken["link_failure"], taken["worker_failure"]) == ("server", 0, 0.5)


def test_the_record_of_a_run_is_a_command(capsys: pytest.CaptureFixture) -> None:
    _train(capsys, "d-psgd", "--epochs", "1", *SMALL, "--out", "first", "--quiet")
    _train(capsys, "--from", "first/experiment.json", "--out", "second", "--quiet")
    assert Path("first/experiment.json").read_bytes() == Path("second/experiment.json").read_bytes()
    assert Path("first/models.safetensors").read_bytes() == Path("second/models.safetensors").read_bytes()
    _train(capsys, "--from", "first/experiment.json", "--seed", "2", "--out", "third", "--quiet")
    changed = json.loads(Path("third/experiment.json").read_text())
    assert (changed["seed"], changed["algorithm"]["epochs"]) == (2, 1)


def test_another_experiment_is_not_overwritten(capsys: pytest.CaptureFixture) -> None:
    _train(capsys, "local", *SMALL, "--out", "run", "--quiet")
    kept = Path("run/summary.json").read_bytes()
    assert main(["train", "local", *SMALL, "--seed", "2", "--out", "run"]) == 2
    caught = capsys.readouterr()
    (line,) = caught.err.splitlines()
    assert "run holds another experiment (seed 1 there, 2 here)" in line
    assert caught.out == ""
    assert Path("run/summary.json").read_bytes() == kept


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--out", "file"], "file is a file"),
        (["--out", "file/run"], "Not a directory"),
        (["--out", "folder"], "folder is not empty and not a run directory"),
        (["--out", "nowhere", "--resume"], "there is no nowhere"),
    ],
)
def test_a_mistake_about_the_directory_is_all_that_is_said(
    capsys: pytest.CaptureFixture, words: list[str], said: str
) -> None:
    Path("file").touch()
    Path("folder").mkdir()
    Path("folder", "thesis.tex").touch()
    assert main(["train", "local", *SMALL, *words]) == 2
    caught = capsys.readouterr()
    (line,) = caught.err.splitlines()
    assert said in line and caught.out == ""


def _files(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_data_that_changed_under_their_name_are_another_experiment(capsys: pytest.CaptureFixture) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(80, 5)), rng.integers(3, size=80)
    np.savez("mine.npz", x=x, y=y)
    words = ["local", "--data", "mine.npz", *SMALL, "--split", "iid", "--out", "run"]
    _train(capsys, *words)
    before = _files(Path("run"))
    # The same arrays in another file are the same data.
    np.savez_compressed("mine.npz", y=y, x=x)
    _train(capsys, *words)
    # One number in one sample, which no shard's labels show.
    x[7, 2] += 1
    np.savez("mine.npz", x=x, y=y)
    for more in ([], ["--rounds", "3"]):
        assert main(["train", *words, *more]) == 2
        said = (
            "run was not begun on the data that mine.npz holds now: put the old data back, or choose another --out.\n"
        )
        assert capsys.readouterr().err.endswith(said)
        assert _files(Path("run")) == before


@pytest.mark.parametrize("name", REGISTRY)
def test_every_algorithm_trains_quietly(name: str, capsys: pytest.CaptureFixture) -> None:
    first, last = _train(capsys, name, *SMALL, "--out", name, "--quiet")
    assert first.startswith(f"{name}: accuracy ")
    assert last == name


def test_a_net_of_ones_own(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    net = "from torch import nn\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    Path("net_of_mine.py").write_text(net)
    monkeypatch.setattr("sys.path", [place for place in sys.path if place])
    _train(capsys, "local", *SMALL, "--model", "net_of_mine:net", "--out", "run", "--quiet")
    assert Run.open("run").experiment.model == "net_of_mine:net"


@pytest.mark.parametrize(("rate", "said"), [("1e-9", True), ("0.2", False)])
def test_a_run_that_learned_nothing_says_so(rate: str, said: bool, capsys: pytest.CaptureFixture) -> None:
    words = ["--workers", "4", "--split", "iid", "--rounds", "3", "--lr", rate, "--head-lr", rate]
    assert main(["train", "deprl", *words]) == 0
    assert ("most frequent class" in capsys.readouterr().out) == said


def test_rates_that_a_schedule_sets_are_not_the_advice(capsys: pytest.CaptureFixture) -> None:
    words = ["--workers", "16", "--split", "iid", "--rounds", "1", "--schedule", "corollary"]
    (advice,) = (line for line in _train(capsys, "d-psgd", *words) if line.startswith("No better than"))
    assert advice.endswith("most frequent class: try more --rounds.")


def test_where_nothing_is_left_to_learn_more_rounds_are_not_the_advice(capsys: pytest.CaptureFixture) -> None:
    lines = _train(capsys, "deprl", "--workers", "10", "--split", "shards:1", "--rounds", "2", "--lr", "1e-9")
    (advice,) = (line for line in lines if line.startswith("No better than"))
    assert advice.endswith("most frequent class: try a less unequal --split, which leaves more to learn.")


def test_stopping_by_hand(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    real = train.rounds_of

    def interrupted(session):
        for step in real(session):
            yield step
            if step.round == 3:
                raise KeyboardInterrupt

    words = ["deprl", *SMALL, "--rounds", "4", "--out", "run"]
    for every, goes_on in ((9, "begins it again"), (2, "continues it from round 2")):
        monkeypatch.setattr(train, "rounds_of", interrupted)
        assert main(["train", *words, "--checkpoint-every", str(every)]) == 130
        assert capsys.readouterr().err == f"manyheads: stopped at round 3; the same command {goes_on}.\n"
    monkeypatch.setattr(train, "rounds_of", real)
    out = _train(capsys, *words)
    assert "note: Continuing the run in run from round 2." in out and out[-1] == "run"
    assert [row["round"] for row in Run.open("run").metrics()] == [1, 2, 3, 4]


def test_a_folder_may_begin_in_the_home_of_the_user(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves the ~ of --out=~/run alone."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert main(["train", "local", "--workers", "2", "--rounds", "1", "--quiet", "--out=~/run"]) == 0
    assert main(["inspect", "run", "~/run"]) == 0
    assert (tmp_path / "home/run/summary.json").exists() and not (tmp_path / "~").exists()
