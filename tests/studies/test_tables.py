"""Tables 1 to 4: one run for every cell and seed, and reports that set ours beside the paper's."""

import csv
import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from manyheads.studies import get_study
from manyheads.studies.published import accuracies
from manyheads.studies.records import Records
from manyheads.studies.trial import PAPER, QUICK, Trial

ONE_SEED = replace(PAPER, seeds=(1,))


def _cell(trial: Trial) -> tuple[object, ...]:
    return tuple(trial.place[key] for key in ("data", "dirichlet", "graph", "algorithm"))


@pytest.mark.parametrize("table", [1, 2, 3, 4])
def test_a_run_for_every_cell(table: int) -> None:
    trials = get_study(f"table{table}").grid(ONE_SEED)
    cells = set(accuracies(table))
    local = {cell for cell in map(_cell, trials) if cell[3] == "local"}
    assert len(local) == (12 if table == 3 else 0)
    assert set(map(_cell, trials)) - local == cells
    assert len({trial.name for trial in trials}) == len(trials) == len(cells) + len(local)
    for trial in trials:
        if table in (2, 4):
            assert trial.experiment.split == "dirichlet:0.3"
            assert trial.new is not None
            assert (trial.new.workers, trial.new.split) == (64, f"dirichlet:{trial.place['dirichlet']}")
        else:
            assert trial.experiment.split == f"dirichlet:{trial.place['dirichlet']}"


def test_all_seeds_and_a_small_size() -> None:
    study = get_study("table1")
    assert len(study.grid(replace(PAPER, seeds=(1, 12)))) == 2 * len(study.grid(ONE_SEED))
    small = study.grid(QUICK)
    assert len(small) == 27
    assert {(trial.data, trial.experiment.workers, trial.experiment.rounds) for trial in small} == {("digits", 8, 4)}


def test_new_workers_on_one_run_stand_together() -> None:
    sources = [trial.source.name for trial in get_study("table2").grid(ONE_SEED)]
    changes = sum(one != other for one, other in itertools.pairwise(sources))
    assert changes == len(set(sources)) - 1 == 35


def test_the_report_sets_ours_beside_the_papers(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    size, records = replace(PAPER, seeds=(1, 12)), Records(tmp_path)
    scores = {"deprl": 0.9, "d-psgd": 0.8, "dispfl": 0.7}
    for trial in get_study("table1").grid(size):
        if _cell(trial)[:3] in {("cifar10", 0.1, "ring"), ("cifar10", 0.5, "full")}:
            bonus = 0.01 if trial.place["seed"] == 12 else -0.01
            records_lab.write(records, trial, scores[trial.place["algorithm"]] + bonus)
    page = get_study("table1").write(size, records, tmp_path)
    text = page.read_text()
    assert "12 of 216 runs are recorded." in text
    assert "Computed on cpu (float32, engine batched, torch 2.6.0): 10:00 min in all." in text
    assert "mobiact" in text
    assert "## CIFAR-10, VGG-11\n\n| Dirichlet | graph | floor | D-PSGD | DisPFL | DePRL |" in text, "narrow tables"
    assert "**90.0 ± 1.4 (2)**<br>89.6, +0.4" in text
    lines = [line for line in text.splitlines() if " ± 1.4 (2)" in line]
    assert [line.split(" | ")[:2] for line in lines] == [["| 0.1", "ring"], ["| 0.5", "full"]]
    assert "80.0 ± 1.4 (2)<br>53.9, +26.1" in text
    assert "| CIFAR-10, VGG-11 | 4 | 0 | 2 |" in text
    assert "| CIFAR-10, VGG-11 | 0.1 | ring | D-PSGD over DisPFL | +10.0 | −32.5 |" in text
    assert (
        "![CIFAR-10, VGG-11, accuracy in percent. Dirichlet 0.1 (majority floor 50.0): ring: D-PSGD 80.0 (paper 53.9)"
        in text
    )
    assert {file.name for file in tmp_path.glob("*.png")} == {"table1-cifar10.png"}, "where there is something to show"
    assert not list(tmp_path.glob("*.pdf")), "they would make the repository grow"
    rows = list(csv.DictReader((tmp_path / "table1.csv").read_text().splitlines()))
    assert len(rows) == 108
    (row,) = (row for row in rows if row["ours"] and (row["dirichlet"], row["algorithm"]) == ("0.1", "deprl"))
    assert (row["paper"], row["ours"], row["seeds"], row["floor"]) == ("89.57", "90", "2", "50")
    assert float(row["difference"]) == pytest.approx(0.43)


def test_methods_are_compared_over_seeds_that_both_have(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    """DePRL is ahead of D-PSGD with the seed of both, behind in the mean over all; DisPFL shares none with either."""
    size, records = replace(PAPER, seeds=(1, 12, 123)), Records(tmp_path)
    scores = {("deprl", 1): 0.8, ("deprl", 12): 0.4, ("d-psgd", 1): 0.7, ("dispfl", 123): 0.9}
    for trial in get_study("table1").grid(size):
        score = scores.get((trial.place["algorithm"], trial.place["seed"]))
        if _cell(trial)[:3] == ("cifar10", 0.1, "ring") and score is not None:
            records_lab.write(records, trial, score)
    text = get_study("table1").write(size, records, tmp_path).read_text()
    assert "| CIFAR-10, VGG-11 | 1 | 0 | 0 |" in text
    assert "**" not in text.split("Dirichlet", 1)[1], "no seed tells which of the three is best"


def test_a_method_alone_is_not_the_best(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    records = Records(tmp_path)
    (trial,) = (one for one in get_study("table1").grid(ONE_SEED) if _cell(one) == ("cifar10", 0.1, "ring", "deprl"))
    records_lab.write(records, trial, 0.9)
    assert "| 90.0<br>89.6, +0.4 |" in get_study("table1").write(ONE_SEED, records, tmp_path).read_text()


def test_who_is_level_is_not_ahead(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    """It shares the bold type with the best. And every data set is counted by itself: one is no reproduction."""
    records = Records(tmp_path)
    scores = {"deprl": 0.8, "d-psgd": 0.7, "dispfl": 0.7996}
    for trial in get_study("table1").grid(ONE_SEED):
        if _cell(trial)[1:3] == (0.1, "ring") and trial.data in ("cifar10", "mobiact"):
            records_lab.write(records, trial, scores[trial.place["algorithm"]])
    text = get_study("table1").write(ONE_SEED, records, tmp_path).read_text()
    assert "| CIFAR-10, VGG-11 | 2 | 1 | 0 |\n| MobiAct for HARBox, DNN | 2 | 1 | 0 |" in text
    assert "DePRL over DisPFL" not in text, "only pairs the other way round are listed"
    assert "| 70.0<br>53.9, +16.1 | **80.0**<br>86.4, −6.4 | **80.0**<br>89.6, −9.6 |" in text


def test_a_floor_is_that_of_its_line(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    records = Records(tmp_path)
    for trial in get_study("table1").grid(ONE_SEED):
        if trial.data == "cifar10" and trial.place["algorithm"] == "deprl" and trial.place["graph"] == "ring":
            records_lab.write(records, trial, 0.9, majority_floor=trial.place["dirichlet"])
    text = get_study("table1").write(ONE_SEED, records, tmp_path).read_text()
    assert "| 0.1 | ring | 10.0 |" in text and "| 0.5 | ring | 50.0 |" in text


def test_a_gap_of_less_than_a_point_is_one(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    """One of 0.4 points counts, one of 0.04 does not."""
    records, behind = Records(tmp_path), {0.1: 0.796, 0.5: 0.7996}
    for trial in get_study("table1").grid(ONE_SEED):
        data, dirichlet, graph, algorithm = _cell(trial)
        if (data, graph) == ("cifar10", "ring") and dirichlet in behind and algorithm in ("deprl", "d-psgd"):
            records_lab.write(records, trial, 0.8 if algorithm == "deprl" else behind[dirichlet])
    text = get_study("table1").write(ONE_SEED, records, tmp_path).read_text()
    assert "| CIFAR-10, VGG-11 | 1 | 1 | 0 |" in text


def test_a_pair_that_the_paper_has_level_is_not_reversed(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    """Its numbers for FedAvg and Ditto are 75.75 and 75.76."""
    records = Records(tmp_path)
    for trial in get_study("table4").grid(ONE_SEED):
        if _cell(trial)[:2] == ("fashion-mnist", 0.3) and trial.place["algorithm"] in ("fedavg", "ditto"):
            records_lab.write(records, trial, 0.9 if trial.place["algorithm"] == "fedavg" else 0.8)
    text = get_study("table4").write(ONE_SEED, records, tmp_path).read_text()
    assert "| Fashion-MNIST, AlexNet | 0 | 1 | 0 |" in text and "FedAvg over Ditto" not in text


def test_a_report_on_nothing(tmp_path: Path) -> None:
    text = get_study("table4").write(ONE_SEED, Records(tmp_path), tmp_path).read_text()
    assert "0 of 84 runs are recorded." in text and "Computed on" not in text


def test_pictures_say_whose_accuracy_they_show(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    records = Records(tmp_path)
    for table, whose in (("table3", "VGG-11, accuracy"), ("table4", "VGG-11, new workers, accuracy")):
        for trial in get_study(table).grid(ONE_SEED):
            if trial.data == "cifar10":
                records_lab.write(records, trial, 0.8)
        assert f"![CIFAR-10, {whose} in percent." in get_study(table).write(ONE_SEED, records, tmp_path).read_text()
