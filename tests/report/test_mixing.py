import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from manyheads.algorithms import DPSGD
from manyheads.metrics.theorem import assess
from manyheads.report.comparison import open_comparison
from manyheads.report.mixing import mixed_by, rows, steady_mixing
from manyheads.rounds import run
from manyheads.topology import build_mixing, edges, spectral


def test_systems_that_mix_alike_share_a_row_whatever_else_differs(tmp_path: Path, write_run):
    for split in ("iid", "shards:2"):
        for name in ("deprl", "d-psgd", "dispfl", "fedavg", "local"):
            write_run(tmp_path / split / name, name, split=split, rounds=1)
    (row,) = rows(open_comparison(tmp_path))
    assert (row.graph, row.workers, row.systems, row.verdict) == ("ring", 8, "DePRL, D-PSGD, DisPFL", "vacuous")
    assert row.gap == f"{spectral(build_mixing('ring', 8)).gap:.2g}"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"graph": "random:0.5", "redraw": True}, "random:0.5, redraw yes"),
        ({"graph": "ring", "link_failure": 0.25}, "ring, link failure 0.25"),
        ({"graph": "star", "weights": "uniform"}, "star, weights uniform"),
    ],
)
def test_the_theorem_has_nothing_to_say_about_some(tmp_path: Path, write_run, options, name):
    write_run(tmp_path / "run", rounds=1, **options)
    comparison = open_comparison(tmp_path)
    (row,) = rows(comparison)
    assert (row.graph, row.verdict) == (name, "does not apply")
    assert 0 < float(row.gap) < 1
    assert mixed_by(comparison.runs[0]).keys() == {"spectral_gap", "theorem_1"}


@dataclass(frozen=True, kw_only=True)
class Apart(DPSGD):
    """Drawn from other random numbers than other runs with the seed."""

    name = "apart"
    title = "Apart"
    stream = "apart"


def test_the_graph_is_the_one_that_the_run_has_drawn(tmp_path: Path, lab):
    session = lab.opened(lab.tiny(Apart(), graph="random:0.5"))
    list(run(replace(session, runtime=replace(lab.cpu, out=tmp_path / "run"))))
    (found,) = open_comparison(tmp_path).runs
    assert edges(steady_mixing(found)) == edges(session.mixing)
    assert edges(session.mixing) != edges(build_mixing("random:0.5", 4, seed=session.experiment.seed))
    assert mixed_by(found) == assess(session.mixing).numbers


def test_without_a_graph_there_is_none(tmp_path: Path, write_run):
    write_run(tmp_path / "run", "fedavg", rounds=1)
    assert rows(open_comparison(tmp_path)) == []


@pytest.mark.parametrize("damage", [{"spectral_gap": None}, {"theorem_1": None}, {"log10_c": None}, {"root": "x"}])
def test_a_summary_without_some_of_it_is_reported_all_the_same(tmp_path: Path, write_run, damage):
    path = write_run(tmp_path / "run", rounds=1) / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    comparison = open_comparison(tmp_path)
    assert len(rows(comparison)) == (not damage.keys() & {"spectral_gap", "theorem_1"})
    assert steady_mixing(comparison.runs[0]).num_workers == 8
