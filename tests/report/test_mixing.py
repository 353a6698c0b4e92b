from pathlib import Path

import pytest

from manyheads.metrics.theorem import of_mixing
from manyheads.report.comparison import open_comparison
from manyheads.report.mixing import mixed_by, rows
from manyheads.topology import build_mixing, spectral


def test_systems_that_mix_alike_share_a_row_whatever_else_differs(tmp_path: Path, write_run):
    for split in ("iid", "shards:2"):
        for name in ("deprl", "d-psgd", "dispfl", "fedavg", "local"):
            write_run(tmp_path / split / name, name, split=split, rounds=1)
    (row,) = rows(open_comparison(tmp_path))
    assert (row.graph, row.workers, row.systems, row.verdict) == ("ring", 8, "DePRL, D-PSGD, DisPFL", "vacuous")
    assert row.gap == f"{spectral(build_mixing('ring', 8)).gap:.2g}"
    found = of_mixing(build_mixing("ring", 8))
    assert found is not None
    assert row.powers[0] == f"{found.c:.1f}" and row.powers[-1] == f"{found.rounds_repaired:.1f}"


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
    assert (row.graph, row.powers, row.verdict) == (name, (), "does not apply")
    assert 0 < float(row.gap) < 1
    mixed = mixed_by(comparison.runs[0])
    assert mixed is not None
    assert mixed.numbers.keys() == {"spectral_gap", "theorem_1"}


def test_without_a_graph_there_is_none(tmp_path: Path, write_run):
    write_run(tmp_path / "run", "fedavg", rounds=1)
    assert rows(open_comparison(tmp_path)) == []
