"""Records: whole or not there, small, readable as runs, and packed for the way."""

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from manyheads.data import federate, load
from manyheads.errors import UserError
from manyheads.experiment import Runtime
from manyheads.rounds import train
from manyheads.store import Run
from manyheads.studies.records import Records, sizes
from manyheads.studies.trial import PAPER, QUICK, Trial


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trial, Path]:
    """A trial and its finished run directory."""
    trial = QUICK.trial("deprl", "digits", 0.3, seed=1, workers=4, rounds=3, every=1, theory=True, model="mlp:4")
    path = tmp_path_factory.mktemp("made") / "run"
    runtime = Runtime(device="cpu", threads=1, out=path)
    assert len(list(train(trial.experiment, trial.runtime(runtime)))) == 3
    return trial, path


def test_a_record_is_the_run_without_its_weights(made: tuple[Trial, Path], tmp_path: Path) -> None:
    trial, path = made
    records, run = Records(tmp_path), Run.open(path)
    assert not records.have(trial)
    assert records.read(trial) is None
    kept = records.keep(path, trial)
    assert records.have(trial)
    names = {file.name for file in kept.iterdir()}
    assert names == {"experiment.json", "metrics.jsonl", "workers.jsonl", "sizes.json", "summary.json"}
    found = records.read(trial)
    assert found is not None
    summary = run.summary()
    assert summary is not None
    assert found.summary["accuracy_mean"] == pytest.approx(summary["accuracy_mean"], rel=1e-5)
    assert [row["round"] for row in found.metrics] == [1, 2, 3]
    measured = [row["theory_m"] for row in run.metrics()]
    assert found.summary["mean_theory_m"] == pytest.approx(sum(measured) / 3, rel=1e-5)
    assert len(found.workers["accuracy"]) == 4
    held = sizes(found)
    assert (len(held["train"]), sum(held["train"]), sum(held["test"])) == (4, 1438, 359)


def test_what_a_record_does_not_show_is_run_again(made: tuple[Trial, Path], tmp_path: Path) -> None:
    trial, path = made
    records = Records(tmp_path)
    records.keep(path, trial)
    assert records.have(replace(trial, every=3, theory=False))
    assert not records.have(replace(trial, similarity=True))
    records.keep(path, replace(trial, similarity=True))
    assert records.have(replace(trial, similarity=True))
    other = QUICK.trial("deprl", "digits", 0.3, seed=1, workers=4, rounds=3, every=1, model="mlp:4", lr=0.5)
    assert not records.have(replace(trial, experiment=other.experiment, label=trial.name))


@pytest.mark.parametrize("file", ["summary.json", "experiment.json"])
def test_a_damaged_record_is_none(made: tuple[Trial, Path], tmp_path: Path, file: str) -> None:
    trial, path = made
    records = Records(tmp_path)
    kept = records.keep(path, trial)
    (kept / file).write_text("{")
    assert not records.have(trial)
    records.keep(path, trial)
    assert records.have(trial)
    (kept / "summary.json").unlink()
    assert not records.have(trial)


def test_long_runs_are_thinned_to_their_last_round(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    trial = QUICK.trial("deprl", "digits", 0.3, seed=1, rounds=1001, every=1)
    source = Records(tmp_path / "source")
    records_lab.write(source, trial)
    # Of a run directory only the partition is missing.
    held = federate(load("digits"), workers=8, split="dirichlet:0.3", seed=1)
    held.save(source.path(trial) / "partition.safetensors")
    records = Records(tmp_path / "kept")
    records.keep(source.path(trial), trial)
    found = records.read(trial)
    assert found is not None
    rounds = [row["round"] for row in found.metrics]
    assert len(rounds) <= 200
    assert rounds[-1] == 1001
    assert found.summary["evaluated_rounds"] == 1001


def test_packed_and_unpacked_records_are_the_same(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    trials = [PAPER.trial("deprl", "cifar10", 0.1, seed=seed) for seed in (1, 12)]
    here, there = Records(tmp_path / "here"), Records(tmp_path / "there")
    for trial in trials:
        records_lab.write(here, trial)
    here.pack(tmp_path / "out" / "records.zip", trials)
    assert there.unpack(tmp_path / "out" / "records.zip") == sorted(trial.name for trial in trials)
    for trial in trials:
        assert there.have(trial)
        for file in here.path(trial).iterdir():
            assert (there.path(trial) / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("name", ["../summary.json", "a/b/summary.json", "a/evil.sh", "/summary.json", "summary.json"])
def test_foreign_archives_are_refused(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        packed.writestr(name, "{}")
    with pytest.raises(UserError, match="no part of a record"):
        Records(tmp_path / "results").unpack(tmp_path / "a.zip")
    assert not (tmp_path / "results").exists()


def test_damaged_and_partial_archives_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_text("no zip")
    with pytest.raises(UserError, match="cannot be read"):
        Records(tmp_path).unpack(tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as packed:
        packed.writestr("run/experiment.json", json.dumps({}))
    with pytest.raises(UserError, match=r"no summary\.json"):
        Records(tmp_path).unpack(tmp_path / "b.zip")
