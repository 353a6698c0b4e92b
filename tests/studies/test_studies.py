"""Every study: a grid at both sizes, and a report on whatever is recorded."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from manyheads.errors import UserError
from manyheads.studies import STUDIES, get_study
from manyheads.studies.everything import in_order
from manyheads.studies.records import Records
from manyheads.studies.trial import PAPER, QUICK, without_repeats

ONE_SEED = replace(PAPER, seeds=(1,))
RUNS = {
    "table1": 108, "table2": 108, "table3": 96, "table4": 84, "table5": 32, "speedup": 14, "curves": 9, "similarity": 1,
    "loss": 8, "tau": 40, "workers": 32, "consensus": 27, "theory": 32, "ambiguities": 85,
}  # fmt: skip
"""Runs of each study with one seed."""


@pytest.mark.parametrize("name", STUDIES)
def test_grids(name: str) -> None:
    trials = STUDIES[name].grid(ONE_SEED)
    assert len(without_repeats(trials)) == RUNS[name]
    places = [tuple(sorted((key, str(value)) for key, value in trial.place.items())) for trial in trials]
    assert len(set(places)) == len(places)
    quick = STUDIES[name].grid(QUICK)
    assert 0 < len(quick) <= len(trials)
    assert {trial.data for trial in quick} <= {"digits", "quadratic"}
    assert all(trial.experiment.workers <= 32 and trial.source.rounds <= 16 for trial in quick)


@pytest.mark.parametrize("name", STUDIES)
def test_reports_on_all_and_on_nothing(name: str, tmp_path: Path, records_lab: SimpleNamespace) -> None:
    records = Records(tmp_path)
    empty = STUDIES[name].write(QUICK, records, tmp_path)
    assert "0 of " in empty.read_text()
    trials = STUDIES[name].grid(QUICK)
    for trial in without_repeats(trials):
        records_lab.write(records, trial)
    page = STUDIES[name].write(QUICK, records, tmp_path)
    text = page.read_text()
    assert text.startswith(f"# {STUDIES[name].title}\n")
    all_of_them = "1 of 1 run is" if len(trials) == 1 else f"{len(trials)} of {len(trials)} runs are"
    assert f"\n{all_of_them} recorded." in text
    assert "digits" in text or name == "theory", "a small version is on the digits, and says so"
    assert "CIFAR" not in text
    for line in text.splitlines():
        if line.startswith("!["):
            assert (tmp_path / line.rpartition("(")[2].rstrip(")")).exists()


@pytest.mark.parametrize("name", ["consensus", "loss", "tau", "workers", "table1", "table5", "speedup"])
def test_every_picture_stands_under_its_data_set(name: str, tmp_path: Path, records_lab: SimpleNamespace) -> None:
    records = Records(tmp_path)
    for trial in without_repeats(STUDIES[name].grid(ONE_SEED)):
        if trial.data in ("cifar10", "cifar100", "mobiact"):
            records_lab.write(records, trial)
    text = STUDIES[name].write(ONE_SEED, records, tmp_path).read_text()
    titles = {"cifar10": "## CIFAR-10, ", "cifar100": "## CIFAR-100, ", "mobiact": "## MobiAct "}
    shown = set()
    for part in text.split("\n## ")[1:]:
        for line in (line for line in part.splitlines() if line.startswith("![")):
            data = line.rpartition("(")[2].removeprefix(f"{name}-").split("-")[0].split(".")[0]
            assert f"## {part}".startswith(titles[data])
            shown.add(data)
    assert len(shown) > 1 and "![" not in text.split("\n## ")[0]


def test_an_unknown_study() -> None:
    with pytest.raises(UserError, match="Did you mean 'table1'"):
        get_study("tabel1")


def test_the_most_telling_runs_come_first() -> None:
    trials = in_order(STUDIES, ONE_SEED)
    names = [trial.name for trial in trials]
    assert len(set(names)) == len(names)
    assert names[:4] == [
        "cifar10-deprl-dirichlet0.1-ring-128-seed1",
        "cifar10-d-psgd-dirichlet0.1-ring-128-seed1",
        "cifar10-dispfl-dirichlet0.1-ring-128-seed1",
        "cifar10-deprl-dirichlet0.3-ring-128-seed1",
    ]
    first = trials[:24]
    assert {trial.data for trial in first} == {"cifar10"}
    assert {trial.place["algorithm"] for trial in first[9:]} == {"fedavg", "fedrep", "ditto", "fedrod", "local"}
    assert [trial.data for trial in trials[24:96:24]] == ["cifar100", "fashion-mnist", "mobiact"]
    # One run for a cell of Table 1, the curves and the similarities, which all want to see something else of it.
    (wanted,) = (trial for trial in trials if trial.name == "cifar100-deprl-dirichlet0.3-random0.25-128-seed1")
    assert wanted.every == 1 and wanted.similarity


def test_all_is_everything_seed_after_seed() -> None:
    size = replace(QUICK, seeds=(12, 1))
    trials = in_order(STUDIES, size)
    seeds = [trial.place["seed"] for trial in trials]
    assert seeds == sorted(seeds, reverse=True)
    wanted = {trial.name for study in STUDIES.values() for trial in study.grid(size)}
    assert sorted(trial.name for trial in trials) == sorted(wanted)
