import csv
import json
from pathlib import Path

import pytest

from manyheads.report import write
from manyheads.report.comparison import open_comparison
from manyheads.report.rates import chosen_at_edge, tried

pytestmark = pytest.mark.usefixtures("without_pictures")


def score(path: Path, value: float | None) -> None:
    file = path / "summary.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "accuracy_validation": value}))


def test_rates_not_chosen_stand_beside_the_chosen_ones(tmp_path: Path, write_run):
    for seed in (1, 2):
        score(write_run(tmp_path / f"deprl{seed}", "deprl", seed=seed, lr=0.2, head_lr=0.1), 0.9)
        write_run(tmp_path / f"local{seed}", "local", seed=seed, lr=0.2, head_lr=0.1)
    for lr, value in ((0.4, 0.8), (0.1, 0.7)):
        score(write_run(tmp_path / "tuning" / f"{lr}", "deprl", seed=1, lr=lr, head_lr=lr / 2), value)
    score(write_run(tmp_path / "tuning" / "unscored", "deprl", seed=1, lr=0.3, head_lr=0.1), None)
    write_run(tmp_path / "tuning" / "failed", "deprl", seed=1, lr=0.8, head_lr=0.4, finished=False)
    write_run(tmp_path / "tuning" / "of-no-system-here", "d-psgd", seed=1, lr=0.8, head_lr=0.4)
    comparison = open_comparison(tmp_path)
    found = [(one.system, one.lr, one.head_lr, one.seeds, one.score, one.chosen) for one in tried(comparison)]
    assert found == [
        ("DePRL", 0.1, 0.05, 1, 0.7, False),
        ("DePRL", 0.2, 0.1, 2, 0.9, True),
        ("DePRL", 0.4, 0.2, 1, 0.8, False),
        ("DePRL", 0.8, 0.4, 1, None, False),
    ]
    assert chosen_at_edge(tried(comparison)) == []
    page = write(comparison).read_text()
    assert "Rates that were tried" in page and "90.0<span" in page and ">unfinished<" in page
    assert "may lie beyond" not in page
    lines = list(csv.DictReader((tmp_path / "csv" / "rates.csv").read_text().splitlines()))
    assert [line["chosen"] for line in lines] == ["False", "True", "False", "False"]


def test_tunings_before_the_last_are_left_out(tmp_path: Path, write_run):
    for seed in (1, 2):
        score(write_run(tmp_path / f"deprl{seed}", "deprl", seed=seed, lr=0.2), 0.9)
        score(write_run(tmp_path / "tuning" / f"{seed}", "deprl", seed=seed, lr=0.4), 0.8)
    score(write_run(tmp_path / "tuning" / "earlier" / "a", "deprl", seed=1, lr=0.1), 0.95)
    comparison = open_comparison(tmp_path)
    assert [(one.lr, one.chosen) for one in tried(comparison)] == [(0.2, True), (0.4, False)]
    assert chosen_at_edge(tried(comparison)) == ["DePRL"]
    assert "so that better ones may lie beyond: DePRL." in write(comparison).read_text()


def test_means_over_seeds_decide(tmp_path: Path, write_run):
    """As when the best rates of the first seed were not those of all."""
    for seed, chosen, lost in ((1, 0.8, 0.9), (2, 0.8, 0.5)):
        score(write_run(tmp_path / f"deprl{seed}", "deprl", seed=seed, lr=0.2), chosen)
        score(write_run(tmp_path / "tuning" / f"{seed}", "deprl", seed=seed, lr=0.4), lost)
    found = [(one.lr, one.seeds, one.score, one.chosen) for one in tried(open_comparison(tmp_path))]
    assert found == [(0.2, 2, pytest.approx(0.8), True), (0.4, 2, pytest.approx(0.7), False)]

    write_run(tmp_path / "tuning" / "3", "deprl", seed=3, lr=0.4, finished=False)
    assert tried(open_comparison(tmp_path))[1].score is None, "they failed with a seed"


def test_a_choice_by_one_seed_stands(tmp_path: Path, write_run):
    """As when seeds were added to a comparison later."""
    for seed, chosen in ((1, 0.9), (2, 0.5)):
        score(write_run(tmp_path / f"deprl{seed}", "deprl", seed=seed, lr=0.2), chosen)
    score(write_run(tmp_path / "tuning" / "1", "deprl", seed=1, lr=0.4), 0.8)
    found = [(one.lr, one.seeds, one.score, one.chosen) for one in tried(open_comparison(tmp_path))]
    assert found == [(0.2, 2, pytest.approx(0.7), True), (0.4, 1, 0.8, False)]


def test_rates_that_were_given_were_not_chosen(tmp_path: Path, write_run):
    score(write_run(tmp_path / "deprl", "deprl", lr=0.2), 0.7)
    score(write_run(tmp_path / "tuning" / "a", "deprl", lr=0.1), 0.8)
    assert tried(open_comparison(tmp_path)) == []


def test_nothing_is_said_where_nothing_was_tuned(tmp_path: Path, write_run):
    write_run(tmp_path / "run")
    comparison = open_comparison(tmp_path)
    assert tried(comparison) == []
    assert "Rates that were tried" not in write(comparison).read_text()
    assert not (tmp_path / "csv" / "rates.csv").exists()
