"""Table 5 and the speed-up in rounds: times read off the records, equal work in every round."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from manyheads.studies import get_study
from manyheads.studies.published import speeds
from manyheads.studies.records import Records
from manyheads.studies.speedup import convergence_time, time_to_accuracy
from manyheads.studies.trial import PAPER, QUICK, without_repeats


def _run(*accuracies: float) -> SimpleNamespace:
    rows = [{"accuracy_mean": value, "simulated_seconds": 10.0 * k} for k, value in enumerate(accuracies, start=1)]
    return SimpleNamespace(metrics=rows)


def test_times() -> None:
    run = _run(0.2, 0.5, 0.3, 0.6, 0.605, 0.6)
    assert convergence_time(run) == 40.0  # pyright: ignore[reportArgumentType]
    assert time_to_accuracy(run, 0.5) == 20.0  # pyright: ignore[reportArgumentType]
    assert time_to_accuracy(run, 0.7) is None  # pyright: ignore[reportArgumentType]
    assert convergence_time(_run(0.5, 0.5)) == 10.0  # pyright: ignore[reportArgumentType]
    assert convergence_time(_run(0.9, 0.7, 0.6, 0.6)) == 30.0, "from above too"  # pyright: ignore[reportArgumentType]


def test_a_run_for_every_row_of_the_paper() -> None:
    trials = get_study("table5").grid(replace(PAPER, seeds=(1,)))
    places = {(trial.data, trial.experiment.workers, trial.place["algorithm"]) for trial in trials}
    assert places == set(speeds())
    assert len(trials) == 32
    assert {trial.every for trial in trials} == {1}


def test_table_5_sets_ours_beside_the_papers(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    size, records = replace(PAPER, seeds=(1,)), Records(tmp_path)
    for trial in get_study("table5").grid(size):
        if trial.data == "mobiact" and trial.place["algorithm"] == "deprl":
            records_lab.write(records, trial, 0.8)
    text = get_study("table5").write(size, records, tmp_path).read_text()
    rows = list(csv.reader((tmp_path / "table5.csv").read_text().splitlines()))[1:]
    (found,) = (row for row in rows if row[:3] == ["mobiact", "4", "deprl"])
    # Made-up accuracies come to 60 % in round 7 and near their last in round 57; a round of 4 workers takes 0.5 s.
    assert [float(cell) for cell in found[3:]] == pytest.approx([95.98, 319.3, 55.2, 80, 28.5, 3.5])
    assert "| 4 | 50.0 | DePRL | 80.0<br>96.0, −16.0 | 28.5<br>319.3 | 3.5<br>55.2 |" in text
    assert "| –<br>88.6 | –<br>369.1 | –<br>72.6 |" in text, "what was not run"
    assert sum(any(row[6:]) for row in rows) == 4 and len(rows) == 32
    assert "with the paper's below" in text and "35 % (CIFAR-100, ResNet-18) or 60 % (MobiAct for HARBox, DNN)" in text
    text = get_study("table5").write(QUICK, records, tmp_path / "quick").read_text()
    assert "paper's below" not in text and "reaches 60 % (digits)" in text


def test_times_over_seeds_have_a_deviation_and_lines_go_through_shared_seeds(
    tmp_path: Path, records_lab: SimpleNamespace
) -> None:
    size, records = replace(PAPER, seeds=(1, 12)), Records(tmp_path)
    for trial in get_study("table5").grid(size):
        workers, seed = trial.place["workers"], trial.place["seed"]
        if trial.data != "mobiact" or trial.place["algorithm"] != "deprl" or (workers, seed) == (4, 12):
            continue
        records_lab.write(records, trial, 0.8)
        if seed == 12:
            metrics = records.path(trial) / "metrics.jsonl"
            metrics.write_text(metrics.read_text().replace('"simulated_seconds": ', '"simulated_seconds": 1'))
    text = get_study("table5").write(size, records, tmp_path).read_text()
    assert "| 28.5<br>319.3 | 3.5<br>55.2 |" in text, "4 workers have one seed"
    # Of 8 workers 14.25 s and 1.75 s with the first seed, and with the second a 1 before them.
    assert "| 64.2 ± 70.7 (2)<br>195.6 | 6.8 ± 7.1 (2)<br>30.9 |" in text
    assert "± is the deviation over seeds" in text
    assert "DePRL 8.00; linear 8.00" in text


def test_work_in_a_round_does_not_depend_on_workers() -> None:
    trials = get_study("speedup").grid(replace(PAPER, seeds=(1,)))
    assert {
        (vars(t.experiment.algorithm)["head_steps"], vars(t.experiment.algorithm)["body_steps"]) for t in trials
    } == {(16, 8)}
    assert all(trial.theory and trial.experiment.decay == 1.0 for trial in trials)
    assert {trial.experiment.momentum for trial in trials} == {0}
    rates = {(t.place["rates"], t.experiment.workers): t.experiment.lr for t in trials if t.data == "mobiact"}
    assert rates["equal", 4] == rates["equal", 32] == rates["growing", 4] == 0.01
    assert rates["growing", 16] == pytest.approx(0.02)


def test_report(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    size, records = replace(QUICK, seeds=(1, 12)), Records(tmp_path)
    for trial in without_repeats(get_study("speedup").grid(size)):
        if trial.place["seed"] == 1 or trial.place["workers"] == 4:
            records_lab.write(records, trial)
        if trial.place["seed"] == 12 and trial.place["workers"] == 4:
            # A seed that others lack says nothing about them.
            metrics = records.path(trial) / "metrics.jsonl"
            metrics.write_text(metrics.read_text().replace('"train_loss": ', '"train_loss": 9'))
    page = get_study("speedup").write(size, records, tmp_path).read_text()
    assert "±" not in page, "no cell has one"
    assert "DePRL on a ring, Dirichlet 0.3: in each round" in page
    # The made-up losses do not depend on the number of workers.
    last = (tmp_path / "speedup.csv").read_text().splitlines()[-1].split(",")
    assert (last[3:6], float(last[6])) == (["growing", "32", "4"], 0.5)


def test_the_target_is_the_lowest_value_that_all_come_to(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    """The made-up loss of round k is 1 / k, and twice that with 4 workers."""
    records = Records(tmp_path)
    for trial in without_repeats(get_study("speedup").grid(QUICK)):
        records_lab.write(records, trial)
        if trial.place["workers"] == 4:
            metrics = records.path(trial) / "metrics.jsonl"
            rows = [json.loads(line) for line in metrics.read_text().splitlines()]
            higher = [{**row, "train_loss": 2 * row["train_loss"]} for row in rows]
            metrics.write_text("".join(json.dumps(row) + "\n" for row in higher))
    get_study("speedup").write(QUICK, records, tmp_path)
    rows = list(csv.DictReader((tmp_path / "speedup.csv").read_text().splitlines()))
    found = {
        (int(row["workers"]), float(row["target"]), float(row["rounds"]))
        for row in rows
        if row["measure"] == "train loss" and row["rates"] == "equal"
    }
    last = QUICK.rounds
    assert found == {(4, 2 / last, last), *((count, 2 / last, last / 2) for count in (8, 16, 32))}


@pytest.mark.parametrize("rising_with", [(4, 8, 16, 32), (8,)])
def test_a_measure_that_some_never_bring_down_has_no_target(
    tmp_path: Path, records_lab: SimpleNamespace, rising_with: tuple[int, ...]
) -> None:
    records = Records(tmp_path)
    for trial in without_repeats(get_study("speedup").grid(QUICK)):
        records_lab.write(records, trial)
        if trial.place["workers"] not in rising_with:
            continue
        metrics = records.path(trial) / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        rising = [{**row, "theory_grad_phi": float(row["round"])} for row in rows]
        metrics.write_text("".join(json.dumps(row) + "\n" for row in rising))
    page = get_study("speedup").write(QUICK, records, tmp_path).read_text()
    assert "squared gradient norm of the representation\n\nNo target: with some number of workers" in page
    measures = {line.split(",")[1] for line in (tmp_path / "speedup.csv").read_text().splitlines()[1:]}
    assert measures == {"train loss"}
