"""What a run directory keeps of the metrics at the end of a run."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from manyheads.algorithms import DPSGD, REGISTRY, DePRL, Local
from manyheads.metrics.similarity import mean_off_diagonal
from manyheads.record import Record
from manyheads.rounds import run, train


@pytest.mark.parametrize("name", REGISTRY)
def test_similarities_of_every_algorithm(name: str, lab: SimpleNamespace, tmp_path: Path) -> None:
    out = tmp_path / "run"
    list(train(lab.tiny(REGISTRY[name]()), replace(lab.cpu, out=out)))
    maps = load_file(out / "similarity.safetensors")
    assert maps.keys() == {"data", "heads", "representations"}
    summary = json.loads((out / "summary.json").read_text())
    for kind, matrix in maps.items():
        assert matrix.shape == (4, 4)
        assert torch.equal(matrix, matrix.T)
        assert torch.allclose(matrix.diagonal(), torch.ones(4))
        assert summary[f"similarity_{kind}"] == mean_off_diagonal(matrix)


def test_a_server_makes_all_alike_and_training_alone_does_not(lab: SimpleNamespace, tmp_path: Path) -> None:
    kept = {}
    for algorithm in (REGISTRY["fedrep"](), Local(), DePRL()):
        out = tmp_path / algorithm.name
        list(train(lab.tiny(algorithm), replace(lab.cpu, out=out)))
        kept[algorithm.name] = json.loads((out / "summary.json").read_text())
    assert kept["fedrep"]["similarity_representations"] == 1.0
    assert kept["local"]["similarity_representations"] < kept["deprl"]["similarity_representations"] < 1
    assert kept["fedrep"]["similarity_data"] == kept["local"]["similarity_data"]


def test_a_net_that_is_all_head_has_no_representations(lab: SimpleNamespace, tmp_path: Path) -> None:
    out = tmp_path / "run"
    list(train(lab.tiny(DPSGD(), head="all"), replace(lab.cpu, out=out)))
    assert load_file(out / "similarity.safetensors").keys() == {"data", "heads"}


def test_private_heads_stay_where_they_are(lab: SimpleNamespace, tmp_path: Path) -> None:
    session = lab.opened(lab.tiny(DePRL()))
    session.ctx.network.may_gather_private = False
    out = tmp_path / "run"
    list(run(replace(session, runtime=replace(lab.cpu, out=out))))
    assert not (out / "similarity.safetensors").exists()
    summary = json.loads((out / "summary.json").read_text())
    assert not [name for name in summary if name.startswith("similarity")]
    assert any("heads stay" in note for note in summary["notes"])


def test_a_record_comes_back_from_its_line(lab: SimpleNamespace) -> None:
    for every in (0, 1):
        *_, record = train(lab.tiny(DePRL()), replace(lab.cpu, theory_every=every))
        line = json.loads(json.dumps(record.metrics()))
        assert Record(**line, per_worker=record.per_worker) == record
        assert record.consensus_error_relative > 0
        assert record.simulated_seconds > 0
