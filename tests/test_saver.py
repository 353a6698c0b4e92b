"""When a run is kept, and what is kept of it at its end."""

import json
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from manyheads import saver as module
from manyheads.algorithms import DPSGD, REGISTRY, DePRL, Local
from manyheads.checkpoint import Checkpoints, latest_round
from manyheads.rounds import run, train
from manyheads.saver import Saver
from manyheads.start import open_directory
from manyheads.store import RunDirectory


@pytest.fixture
def made(lab, tmp_path: Path):
    """A saver of a run of a hundred rounds, and its first state."""

    def make(**runtime: object) -> tuple[Saver, object]:
        session = lab.opened(lab.tiny(DePRL(), rounds=100))
        session = replace(session, runtime=replace(session.runtime, **runtime))
        with ExitStack() as held:
            directory = open_directory(session, tmp_path / "run", held)
        return Saver(session, directory), session.experiment.algorithm.init(session.ctx)

    return make


def kept(saver: Saver) -> int:
    return latest_round(saver.directory.path / "checkpoint")


def test_checkpoints_take_a_twentieth_of_the_time(made):
    saver, state = made()
    saver.next_cost = 1.0
    saver.keep(1, state, 19.9, 0.0, None)
    assert kept(saver) == 0
    saver.keep(2, state, 20.1, 0.0, None)
    assert kept(saver) == 2
    assert 0 < saver.spent < 1, "what it really took is counted, not the guess"
    saver.spent = saver.next_cost = 1.0
    saver.keep(3, state, 39.9, 0.0, None)
    assert kept(saver) == 2
    saver.keep(4, state, 40.1, 0.0, None)
    assert kept(saver) == 4
    assert saver.spent > 1, "all of them count"


def test_checkpoints_of_a_resumed_run_take_a_twentieth_of_its_own_time(made):
    first, state = made(checkpoint_every=1)
    first.keep(1, state, 1000.0, 0.0, None)
    saver, _ = made()
    saver.load()
    saver.next_cost = 1.0
    saver.keep(2, state, 1019.9, 0.0, None)
    assert kept(saver) == 1
    saver.keep(3, state, 1020.1, 0.0, None)
    assert kept(saver) == 3


def test_a_power_cut_leaves_no_checkpoint_without_the_records_before_it(lab, tmp_path: Path, monkeypatch):
    out, fsync, complete = tmp_path / "run", os.fsync, Checkpoints.complete
    on_disk: dict[int, int] = {}

    def watched(handle: int) -> None:
        fsync(handle)
        found = os.fstat(handle)
        on_disk[found.st_ino] = found.st_size

    def checked(checkpoints: Checkpoints, round: int, seconds: float) -> None:
        for name in ("metrics.jsonl", "workers.jsonl"):
            written = (out / name).stat()
            assert on_disk.get(written.st_ino) == written.st_size, f"{name} in round {round}"
        complete(checkpoints, round, seconds)

    monkeypatch.setattr(os, "fsync", watched)
    monkeypatch.setattr(Checkpoints, "complete", checked)
    runtime = replace(lab.cpu, out=out, checkpoint_every=1)
    assert len(list(train(lab.tiny(DePRL(), rounds=2), runtime))) == 2


def test_checkpoints_are_written_as_often_as_asked_for(made):
    saver, state = made(checkpoint_every=3)
    found = []
    for round in range(1, 8):
        saver.keep(round, state, 1e-9, 0.0, None)
        found.append(kept(saver))
    assert found == [0, 0, 3, 3, 3, 6, 6]


def test_the_last_round_is_always_kept(lab, tmp_path: Path):
    runtime = replace(lab.cpu, out=tmp_path, checkpoint_every=2)
    assert len(list(train(lab.tiny(DePRL(), rounds=3), runtime))) == 3
    assert latest_round(tmp_path / "checkpoint") == 3


@pytest.mark.parametrize("name", REGISTRY)
def test_similarities_of_every_algorithm(name: str, lab, tmp_path: Path):
    out = tmp_path / "run"
    list(train(lab.tiny(REGISTRY[name]()), replace(lab.cpu, out=out)))
    maps = load_file(out / "similarity.safetensors")
    assert maps.keys() == {"data", "heads", "representations"}
    summary = json.loads((out / "summary.json").read_text())
    rounds = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for kind in ("heads", "representations"):
        assert rounds[-1][f"similarity_{kind}"] == summary[f"similarity_{kind}"]
    for kind, matrix in maps.items():
        assert matrix.shape == (4, 4)
        assert torch.equal(matrix, matrix.T)
        assert torch.allclose(matrix.diagonal(), torch.ones(4))
        every_two = matrix[~torch.eye(4, dtype=torch.bool)]
        assert summary[f"similarity_{kind}"] == pytest.approx(float(every_two.double().mean()), abs=1e-7)


def test_of_many_workers_there_are_means_and_no_maps(lab, tmp_path: Path, monkeypatch):
    kept = {}
    for most in (4, 3):
        monkeypatch.setattr(module, "_MOST_MAPPED", most)
        out = tmp_path / str(most)
        list(train(lab.tiny(DePRL()), replace(lab.cpu, out=out)))
        assert (out / "similarity.safetensors").exists() == (most == 4)
        summary = json.loads((out / "summary.json").read_text())
        kept[most] = {name: value for name, value in summary.items() if name.startswith("similarity")}
    assert kept[3] == kept[4] and len(kept[3]) == 3


def test_workers_of_one_process_are_compared_where_their_models_lie(lab, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(RunDirectory, "models", lambda *_: pytest.fail("they were read back from the disk"))
    list(train(lab.tiny(DePRL()), replace(lab.cpu, out=tmp_path)))
    assert load_file(tmp_path / "similarity.safetensors").keys() == {"data", "heads", "representations"}


def test_a_server_makes_all_alike_and_training_alone_does_not(lab, tmp_path: Path):
    kept = {}
    for algorithm in (REGISTRY["fedrep"](), Local(), DePRL()):
        out = tmp_path / algorithm.name
        list(train(lab.tiny(algorithm), replace(lab.cpu, out=out)))
        kept[algorithm.name] = json.loads((out / "summary.json").read_text())
    assert kept["fedrep"]["similarity_representations"] == pytest.approx(1, abs=1e-12)
    assert kept["local"]["similarity_representations"] < kept["deprl"]["similarity_representations"] < 1
    assert kept["fedrep"]["similarity_data"] == kept["local"]["similarity_data"]
    # Only a graph mixes: P of a ring of four has the eigenvalues 1, 1/3, 1/3 and -1/3.
    assert kept["deprl"]["spectral_gap"] == pytest.approx(2 / 3)
    assert kept["deprl"]["theorem_1"] == "vacuous" and kept["deprl"]["log10_c"] > 0
    assert not any("spectral_gap" in kept[name] for name in ("fedrep", "local"))


def test_a_net_that_is_all_head_has_no_representations(lab, tmp_path: Path):
    out = tmp_path / "run"
    list(train(lab.tiny(DPSGD(), head="all"), replace(lab.cpu, out=out)))
    assert load_file(out / "similarity.safetensors").keys() == {"data", "heads"}


def test_private_heads_stay_where_they_are(lab, tmp_path: Path):
    session = lab.opened(lab.tiny(DePRL()))
    session.ctx.network.may_gather_private = False
    out = tmp_path / "run"
    list(run(replace(session, runtime=replace(lab.cpu, out=out))))
    assert not (out / "similarity.safetensors").exists()
    summary = json.loads((out / "summary.json").read_text())
    assert not [name for name in summary if name.startswith("similarity")]
    assert any("heads stay" in note for note in summary["notes"])
