"""Records: whole or not there, small and readable as runs."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from manyheads.data import federate, load
from manyheads.errors import UserError
from manyheads.experiment import Runtime
from manyheads.new_workers import NewWorkers
from manyheads.rounds import train
from manyheads.store import Run
from manyheads.studies import get_study
from manyheads.studies.cost import Costs
from manyheads.studies.records import Records, sizes
from manyheads.studies.trial import PAPER, QUICK, Trial, joined

RESULTS = Records(Path(__file__).parents[2] / "results")
"""Those of this repository."""


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
    assert found.summary["seconds"] == float(f"{summary['seconds']:.6g}"), "no more digits than anybody reads"
    assert [row["round"] for row in found.metrics] == [1, 2, 3]
    measured = [row["theory_m"] for row in run.metrics()]
    assert found.summary["mean_theory_m"] == pytest.approx(sum(measured) / 3, rel=1e-5)
    assert len(found.workers["accuracy"]) == 4
    held = sizes(found)
    assert (len(held["train"]), sum(held["train"]), sum(held["test"])) == (4, 1438, 359)


def test_new_workers_follow_a_run_that_is_missing_too(made: tuple[Trial, Path], tmp_path: Path) -> None:
    recorded, path = made
    source, other = (replace(recorded, experiment=replace(recorded.experiment, seed=seed)) for seed in (12, 123))
    on = ((recorded, 0.5), (source, 0.5), (source, 0.1))
    new = [joined(trial, NewWorkers(workers=2, split=f"dirichlet:{a}")) for trial, a in on]
    records = Records(tmp_path)
    records.keep(path, recorded)
    assert records.missing([recorded, source, other, *new]) == [source, new[1], new[2], other, new[0]]
    assert records.missing([new[1], source]) == [source, new[1]]
    assert records.missing([new[1], other]) == [new[1], other], "nobody asked for its run"
    assert records.missing([recorded]) == []


def test_new_workers_have_the_seed_of_their_trial_in_older_records_too() -> None:
    """Where another number stands, which followed from it; by it no two methods would share a seed."""
    trials = [trial for trial in get_study("table2").grid(PAPER) if trial.data == "mobiact"]
    found = [(trial.place["seed"], run.seed) for trial in trials[:12] if (run := RESULTS.read(trial))]
    assert found and all(seed == stored for seed, stored in found)


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


def test_rounds_and_terms_that_were_not_measured_are_run_again(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    trial = QUICK.trial("deprl", "digits", 0.3, seed=1, rounds=6, every=3)
    records = Records(tmp_path)
    records_lab.write(records, trial)
    assert records.have(trial) and records.have(replace(trial, every=6))
    assert not records.have(replace(trial, every=1))
    assert not records.have(replace(trial, theory=True))


@pytest.mark.parametrize("content", ["{", "{}", None])
@pytest.mark.parametrize("file", ["summary.json", "experiment.json"])
def test_a_damaged_record_is_none(made: tuple[Trial, Path], tmp_path: Path, file: str, content: str | None) -> None:
    trial, path = made
    records = Records(tmp_path)
    kept = records.keep(path, trial)
    (kept / file).unlink() if content is None else (kept / file).write_text(content)
    assert not records.have(trial)
    assert not Costs(records.folder, "cpu")(trial).measured
    records.keep(path, trial)
    assert records.have(trial)
    (kept / "summary.json").unlink()
    assert not records.have(trial)


@pytest.mark.parametrize("file", ["metrics.jsonl", "workers.jsonl", "sizes.json"])
def test_a_record_of_which_something_is_lost_is_none(made: tuple[Trial, Path], tmp_path: Path, file: str) -> None:
    trial, path = made
    records = Records(tmp_path)
    kept = records.keep(path, trial) / file
    whole = kept.read_bytes()
    shorter = whole[: whole.rindex(b"\n", 0, -1) + 1] if b"\n" in whole[:-1] else b"[]\n"
    for content in (b"", whole[:-3], shorter, b"x" + whole):
        kept.write_bytes(content)
        assert not records.have(trial)
        assert records.read(trial) is None
    kept.write_bytes(whole)
    assert records.have(trial)
    kept.unlink()
    assert not records.have(trial)


def test_long_runs_are_thinned_to_their_last_round(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    trial = QUICK.trial("deprl", "digits", 0.3, seed=1, rounds=1001, every=1, theory=True)
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
    assert len(rounds) <= 100
    assert rounds[-1] == 1001
    assert found.summary["evaluated_rounds"] == 1001
    means = sum(1 / round for round in range(1, 1002)) / 1001
    assert found.summary["mean_theory_m"] == pytest.approx(means, rel=1e-5), "over all rounds, not those that are left"


def test_a_record_made_anew_keeps_nothing_of_the_one_before(tmp_path: Path, made: tuple[Trial, Path]) -> None:
    trial, path = made
    records, there = Records(tmp_path), set()
    for similarity in (True, False):
        records.keep(path, replace(trial, similarity=similarity))
        there ^= {file.name for file in records.path(trial).iterdir()}
    assert there == {"similarity.safetensors"}


def test_making_a_record_anew_halfway_leaves_none(
    tmp_path: Path, made: tuple[Trial, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, path = made
    records = Records(tmp_path)
    records.keep(path, trial)

    def full(path: Path, content: bytes) -> None:
        raise UserError(f"cannot write {path}")

    monkeypatch.setattr("manyheads.studies.records.write_atomically", full)
    with pytest.raises(UserError, match="cannot write"):
        records.keep(path, trial)
    assert not records.have(trial)
