from pathlib import Path

import numpy as np
import pytest

from manyheads import from_workers
from manyheads.recipes import step_seconds
from manyheads.report.comparison import open_comparison
from manyheads.report.options import options_apart, own_options, shared_options
from manyheads.report.spreadsheets import csv_files


def test_what_is_not_the_default_is_marked(tmp_path: Path, write_run):
    write_run(tmp_path / "run", own={"head_epochs": 5, "body_steps": 3}, workers=8, lr=0.123, precision="tf32")
    comparison = open_comparison(tmp_path)
    shared = {option.name: option for option in shared_options(comparison)}
    assert {name for name, option in shared.items() if option.changed} == {"workers", "split", "rounds", "lr"}
    assert shared["lr"].value == "0.123"
    assert shared["precision"].value == "tf32"
    assert "head" not in shared
    assert next(iter(shared)) == "data"
    own = {option.name: (option.value, option.changed) for option in own_options(comparison.systems[0])}
    assert own["head epochs"] == ("5", True)
    assert own["body steps"] == ("3", True)
    assert own["body epochs"] == ("1", False)
    assert "head steps" not in own


def test_rates_that_a_schedule_does_not_use_are_not_said_to_be_a_runs(tmp_path: Path, write_run):
    write_run(tmp_path / "run", schedule="corollary")
    comparison = open_comparison(tmp_path)
    shown = {option.name for option in shared_options(comparison)}
    assert "schedule" in shown and not {"lr", "head lr", "decay"} & shown
    header, _ = dict(csv_files(comparison))["options.csv"].splitlines()
    assert "schedule" in header.split(",") and not {"lr", "head_lr", "decay"} & {*header.split(",")}


ARRAYS = from_workers([(np.eye(6), np.arange(6) % 2)] * 2)
OWN = {"data": "mine.npz", "model": "mlp", "lr": 0.01, "head_lr": 0.01, "rounds": 50}


@pytest.mark.parametrize(
    ("options", "marked"),
    [
        (OWN, {"split"}),
        ({**OWN, "model": "cnn"}, {"split"}),
        ({**OWN, "model": "mynet:Net", "lr": 0.1, "batch_size": 8}, {"model", "split", "lr", "batch size"}),
        ({**OWN, "data": "site-{worker}.npz", "split": "natural"}, set()),
        ({**OWN, "data": ARRAYS, "split": "natural"}, set()),
        ({**OWN, "data": ARRAYS, "split": "iid"}, {"split"}),
    ],
)
def test_own_data_have_a_recipe_and_a_split_too(tmp_path: Path, write_run, options: dict, marked: set[str]):
    model, batch_size = options["model"], options.get("batch_size", 16)
    write_run(tmp_path / "run", step_seconds=step_seconds(model, batch_size), **options)
    changed = {option.name for option in shared_options(open_comparison(tmp_path)) if option.changed}
    assert changed == {"data", "workers", *marked}


def test_nothing_a_recipe_would_have_chosen_is_marked_where_there_are_several(tmp_path: Path, write_run):
    for data in ("digits", "mine.npz"):
        write_run(tmp_path / data, data=data)
    changed = {option.name for option in shared_options(open_comparison(tmp_path)) if option.changed}
    assert changed == {"workers", "split"}


def test_rates_chosen_for_each_algorithm_are_listed(tmp_path: Path, write_run):
    write_run(tmp_path / "a", "deprl", lr=0.1)
    write_run(tmp_path / "b", "local", lr=0.2)
    assert options_apart(open_comparison(tmp_path)) == {"lr": {"DePRL": "0.1", "Local": "0.2"}}
