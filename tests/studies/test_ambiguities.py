"""Other readings: what is counted anew comes from the same records, and what moved is said."""

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from manyheads.experiment import flat
from manyheads.studies import get_study
from manyheads.studies.records import Records
from manyheads.studies.trial import PAPER

SIZE = replace(PAPER, seeds=(1,))


def test_readings_are_other_experiments_on_the_same_cells() -> None:
    trials = get_study("ambiguities").grid(SIZE)
    base = {t.name for t in trials if t.place["reading"] == "as read"}
    others = {t.name for t in trials} - base
    assert (len(base), len(others)) == (14 + 7 + 14, 24 + 12 + 14)
    # What is read as everywhere else is what table 3 runs.
    assert base <= {trial.name for trial in get_study("table3").grid(SIZE)}
    # A comma would part what --only is to choose.
    assert not any("," in t.place["reading"] for t in trials)
    assert {t.experiment.head for t in trials if "classifier" in t.place["reading"]} == {"fc9"}
    raw = [t for t in trials if t.experiment.data == "cifar10:raw"]
    assert {t.place["data"] for t in raw} == {"cifar10"}
    assert {t.experiment.model for t in raw} == {"vgg11"}
    uncapped = {t.experiment.split for t in trials if "cap" in t.place["reading"]}
    assert uncapped == {"dirichlet:0.1:uncapped", "dirichlet:0.5:uncapped"}
    # The constant rate is the control of another study.
    assert others & {trial.name for trial in get_study("consensus").grid(SIZE)} == {
        "cifar100-deprl-dirichlet0.1-ring-128-decay1.0-seed1"
    }


def test_readings_change_what_they_say() -> None:
    """And nothing else, or the number would not say what moved it."""
    trials = [t for t in get_study("ambiguities").grid(SIZE) if t.place["data"] == "cifar100"]
    as_read = {t.place["algorithm"]: t.experiment for t in trials if t.place["reading"] == "as read"}
    found: dict[str, dict[str, object]] = {}
    for trial in trials:
        here, usual = (flat(one.describe()) for one in (trial.experiment, as_read[trial.place["algorithm"]]))
        # A smaller batch takes less simulated time.
        changed = {name: value for name, value in here.items() if value != usual[name] and name != "step_seconds"}
        assert found.setdefault(f"{trial.place['reading']}, {trial.place['algorithm']}", changed) == changed
    three = "the representation trains for three passes"
    assert {name: changed for name, changed in found.items() if changed} == {
        **{f"the representation's rate is three times as high, {name}": {"lr": 0.03} for name in ("deprl", "fedrep")},
        **{f"{three}, {name}": {"body_epochs": 3} for name in ("deprl", "fedrep")},
        f"{three} on the random graph, deprl": {"body_epochs": 3, "graph": "random:0.25"},
        f"{three} and the server weighs workers alike, fedrep": {"body_epochs": 3, "weighting": "uniform"},
        **{f"heads train in eval mode, {name}": {"frozen": "eval"} for name in ("deprl", "fedrep")},
        "rates do not fall, deprl": {"decay": 1.0},
        "statistics of BatchNorm are not mixed, deprl": {"norm": "local"},
        **{f"batches of 16, {name}": {"batch_size": 16} for name in ("deprl", "fedrep")},
    }


def test_report(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    records = Records(tmp_path)
    for trial in get_study("ambiguities").grid(SIZE):
        records_lab.write(records, trial, 0.6 if "classifier" in trial.place["reading"] else 0.7)
        path = records.path(trial) / "workers.jsonl"
        # The first worker, which has 10 test samples, gets nothing right; the second cannot be scored.
        path.write_text(path.read_text().replace("[0.7, 0.7,", "[0.0, null,"))
    page = get_study("ambiguities").write(SIZE, records, tmp_path).read_text()
    assert "| as read | DePRL | 50.0 | 70.0 | – | 89.6 | −19.6 |" in page
    rows = list(csv.DictReader((tmp_path / "ambiguities.csv").read_text().splitlines()))

    def row(reading: str, algorithm: str = "deprl", data: str = "cifar10") -> dict[str, str]:
        place = {"data": data, "dirichlet": "0.1", "algorithm": algorithm}
        (found,) = (r for r in rows if place.items() <= r.items() and r["reading"].startswith(reading))
        return found

    assert (row("as read")["ours"], row("as read")["moved"], row("as read")["paper"]) == ("70", "", "89.57")
    assert row("no cap")["floor"] and not row("mean weighted")["floor"]
    assert row("scored before mixing")["floor"] == row("best evaluated round")["floor"] == row("as read")["floor"]
    assert float(row("the head is")["moved"]) == pytest.approx(-10)
    assert float(row("without workers of at most 10")["ours"]) == pytest.approx(70)
    assert float(row("mean weighted")["ours"]) == pytest.approx(70 * 126 * 20 / (126 * 20 + 10), abs=1e-3)
    assert float(row("scored before mixing", "d-psgd")["moved"]) == pytest.approx(1)
    assert float(row("best evaluated round")["moved"]) == pytest.approx(0, abs=0.1)
    assert row("rates do not fall", data="cifar100")["paper"] == "60.72"
    # A reading on another graph stands beside the paper's number for that graph.
    assert row("the representation trains for three passes on", data="cifar100")["paper"] == "61.51"


def test_a_reading_is_compared_over_the_seeds_that_both_have(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    records, size = Records(tmp_path), replace(PAPER, seeds=(1, 12))
    scores = {("as read", 1): 0.7, ("as read", 12): 0.9, ("rates do not fall", 1): 0.75}
    for trial in get_study("ambiguities").grid(size):
        score = scores.get((trial.place["reading"], trial.place["seed"]))
        if trial.place["data"] == "cifar100" and trial.place["algorithm"] == "deprl" and score:
            records_lab.write(records, trial, score)
    get_study("ambiguities").write(size, records, tmp_path)
    rows = {row["reading"]: row for row in csv.DictReader((tmp_path / "ambiguities.csv").read_text().splitlines())}
    assert (rows["as read"]["ours"], rows["rates do not fall"]["ours"]) == ("80", "75")
    assert float(rows["rates do not fall"]["moved"]) == pytest.approx(5)
    assert float(rows["scored before mixing"]["moved"]) == pytest.approx(1)
