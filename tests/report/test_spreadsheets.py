import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from manyheads.report.chapters import of_setting
from manyheads.report.comparison import open_comparison
from manyheads.report.spreadsheets import csv_files


@pytest.fixture
def tables(tmp_path: Path, write_run) -> dict[str, list[dict[str, str]]]:
    for seed in (1, 2):
        write_run(tmp_path / "runs" / f"deprl {seed}", "deprl", seed=seed)
        write_run(tmp_path / "runs" / f"local {seed}", "local", seed=seed)
    return {name: list(csv.DictReader(io.StringIO(text))) for name, text in csv_files(open_comparison(tmp_path))}


def test_the_names_of_similarities_are_those_of_their_pictures(tmp_path: Path, write_run):
    for split in ("iid", "shards:2"):
        write_run(tmp_path / split, split=split, similarity=True)
    names = [name for name, _ in csv_files(open_comparison(tmp_path)) if "similarity" in name]
    assert names[0] == "split-iid-similarity-deprl-data.csv"
    assert len(names) == 6


def test_systems_that_a_file_name_cannot_tell_apart_have_the_same_number_in_both(tmp_path: Path, write_run):
    for lam, similarity in ((1e-6, False), (1e6, True)):
        write_run(tmp_path / f"{lam}", "ditto", {"lam": lam}, similarity=similarity)
    comparison = open_comparison(tmp_path)
    tables = [name for name, _ in csv_files(comparison) if "similarity" in name]
    pictures = [picture.name for chapter in of_setting(comparison, 0) for _, row in chapter.rows for picture in row]
    assert tables[0] == "similarity-ditto-lam-1e-06-2-data.csv"
    assert {name.removesuffix(".csv") for name in tables} <= set(pictures)


def test_every_round_and_every_worker_of_every_run_is_there(tables):
    assert len(tables["rounds.csv"]) == 4 * 10
    assert len(tables["workers.csv"]) == 4 * 8
    assert len(tables["runs.csv"]) == len(tables["options.csv"]) == 4
    assert {row["folder"] for row in tables["runs.csv"]} == {
        f"runs/{a} {s}" for a in ("deprl", "local") for s in (1, 2)
    }


def test_every_worker_has_its_own_values(tmp_path: Path, tables):
    last = json.loads((tmp_path / "runs" / "local 2" / "workers.jsonl").read_text().splitlines()[-1])
    rows = [row for row in tables["workers.csv"] if row["folder"] == "runs/local 2"]
    assert [row["worker"] for row in rows] == [str(worker) for worker in range(8)]
    for name in ("accuracy", "train_loss"):
        assert [float(row[name]) for row in rows] == last[name]


def test_means_are_those_of_the_runs(tables):
    finals = [float(row["accuracy_mean"]) for row in tables["runs.csv"] if row["system"] == "DePRL"]
    (line,) = (row for row in tables["comparison.csv"] if row["system"] == "DePRL")
    assert float(line["accuracy_mean"]) == pytest.approx(sum(finals) / 2)
    assert float(line["accuracy_mean_deviation"]) == pytest.approx(abs(finals[0] - finals[1]) / 2**0.5)
    assert line["seeds"] == "2"
    last = [
        row
        for row in tables["curves.csv"]
        if (row["system"], row["metric"], row["round"]) == ("DePRL", "accuracy_mean", "10")
    ]
    assert float(last[0]["mean"]) == pytest.approx(float(line["accuracy_mean"]))


def test_every_row_of_the_comparison_names_its_runs(tmp_path: Path, write_run):
    """No option of the grid does: one run without a graph stands beside every graph."""
    for seed in (1, 2):
        for graph in ("ring", "full"):
            write_run(tmp_path / f"{graph}-{seed}", "deprl", graph=graph, seed=seed)
        write_run(tmp_path / f"local-{seed}", "local", seed=seed)
    tables = {name: list(csv.DictReader(io.StringIO(text))) for name, text in csv_files(open_comparison(tmp_path))}
    assert {(row["system"], row["graph"]): row["folders"] for row in tables["comparison.csv"]} == {
        ("DePRL", "ring"): "ring-1; ring-2",
        ("DePRL", "full"): "full-1; full-2",
        ("Local", "ring"): "local-1; local-2",
        ("Local", "full"): "local-1; local-2",
    }
    assert [row["graph"] for row in tables["runs.csv"] if row["folder"] == "local-1"] == ["none"]
    named = {folder for row in tables["comparison.csv"] for folder in row["folders"].split("; ")}
    assert named == {row["folder"] for row in tables["workers.csv"]}


def test_the_mixing_of_every_run_on_a_graph_is_there(tables):
    rows = tables["mixing.csv"]
    assert [(row["system"], row["seed"]) for row in rows] == [("DePRL", "1"), ("DePRL", "2")]
    assert {row["theorem_1"] for row in rows} == {"vacuous"}
    assert float(rows[0]["log10_rounds_repaired"]) > float(rows[0]["log10_rounds_printed"]) > 9


def test_similarities_are_written_as_they_are(tmp_path: Path, write_run):
    run = write_run(tmp_path / "a", similarity=True)
    text = dict(csv_files(open_comparison(tmp_path)))["similarity-deprl-heads.csv"]
    found = np.loadtxt(io.StringIO(text), delimiter=",")
    np.testing.assert_allclose(found, load_file(run / "similarity.safetensors")["heads"], atol=1e-5)


def test_a_text_that_looks_like_a_formula_is_quoted(tmp_path: Path, write_run):
    path = write_run(tmp_path / "a")
    description = json.loads((path / "experiment.json").read_text())
    (path / "experiment.json").write_text(json.dumps({**description, "model": "=cmd()"}))
    assert "'=cmd()" in dict(csv_files(open_comparison(tmp_path)))["options.csv"]
