import itertools
import json
from pathlib import Path

from manyheads.report import table
from manyheads.report.comparison import open_comparison
from manyheads.report.findings import verdict
from manyheads.report.latex import tabular


def test_the_table_is_sorted_marks_the_best_and_shows_the_floor(tmp_path: Path, write_run):
    for seed in (1, 2):
        for algorithm, level in (("local", 0.5), ("deprl", 0.9), ("d-psgd", 0.7)):
            write_run(tmp_path / f"{algorithm}{seed}", algorithm, seed=seed, level=level)
    comparison = open_comparison(tmp_path)
    titles, rows = table.headers(comparison), table.rows(comparison)
    assert titles[:3] == ["accuracy, %", "behind the best, points", "spread over workers, %"]
    assert [row.label for row in rows] == ["DePRL", "D-PSGD", "majority floor", "Local"]
    assert all(len(row.cells) == len(titles) for row in rows)
    assert [[cell.best for cell in row.cells[:2]] for row in rows] == [[True, False], *[[False, False]] * 3]
    for column in (titles.index("worst tenth, %"), titles.index("spread over workers, %")):
        assert sum(row.cells[column].best for row in rows) == 1
    assert not any(row.cells[titles.index("time")].best for row in rows), "no merit of a system"
    assert (rows[0].cells[1].text, rows[0].cells[1].order) == ("–", 0)
    assert " ± " in rows[1].cells[1].text
    assert [row.floor for row in rows] == [False, False, True, False]
    assert rows[3].cells[titles.index("sent per worker")].text == "0 B"


def test_a_single_run_has_no_best_no_deviation_and_no_column_for_them(tmp_path: Path, write_run):
    write_run(tmp_path / "run")
    comparison = open_comparison(tmp_path)
    (row, _) = table.rows(comparison)
    assert "behind the best, points" not in table.headers(comparison)
    assert not any(cell.best or "±" in cell.text for cell in row.cells)


def test_a_regressions_scores_are_no_accuracies(tmp_path: Path, write_run):
    for algorithm in ("deprl", "local"):
        summary = write_run(tmp_path / algorithm, algorithm) / "summary.json"
        summary.write_text(json.dumps({**json.loads(summary.read_text()), "majority_floor": None}))
    assert table.headers(open_comparison(tmp_path))[:3] == ["score", "behind the best", "spread over workers"]
    assert [row.label for row in table.rows(open_comparison(tmp_path))] == ["DePRL", "Local"]


def test_a_deviation_is_no_finer_than_its_mean_wherever_it_is_shown(tmp_path: Path, write_run):
    for algorithm, scores in (("deprl", (0.0556, 0.0562)), ("local", (0.0353, 0.0352))):
        for seed, score in enumerate(scores):
            summary = write_run(tmp_path / f"{algorithm}{seed}", algorithm, seed=seed) / "summary.json"
            values = {**json.loads(summary.read_text()), "majority_floor": None, "accuracy_mean": score}
            summary.write_text(json.dumps(values))
    comparison = open_comparison(tmp_path)
    (best, second) = table.rows(comparison)
    assert best.cells[0].text == "0.0559 ± 0.0004"
    assert second.cells[1].text == "0.0206 ± 0.0003"
    assert verdict(comparison).startswith("DePRL reaches 0.0559 ± 0.0004, 0.0206 (standard error 0.0003) ahead")
    assert r"DePRL & $\mathbf{0.0559} \pm 0.0004$" in tabular(comparison)


def test_a_column_of_scores_has_one_number_of_decimals(tmp_path: Path, write_run):
    scores = {"deprl": (-0.632, -0.65), "local": (-1.12, -1.14), "d-psgd": (-12.0, -12.2)}
    for algorithm, of_seeds in scores.items():
        for seed, score in enumerate(of_seeds):
            summary = write_run(tmp_path / f"{algorithm}{seed}", algorithm, seed=seed) / "summary.json"
            values = {**json.loads(summary.read_text()), "majority_floor": None, "accuracy_mean": score}
            summary.write_text(json.dumps({**values, "accuracy_std": 0.5, "accuracy_worst10": 100 * score}))
    comparison = open_comparison(tmp_path)
    columns = list(zip(*(row.cells for row in table.rows(comparison)), strict=True))
    assert [[cell.text for cell in column] for column in columns[:4]] == [
        ["-0.641 ± 0.013", "-1.130 ± 0.014", "-12.100 ± 0.141"],
        ["–", "0.489 ± 0.001", "11.459 ± 0.091"],
        ["0.500"] * 3,
        ["-64.1 ± 1.3", "-113.0 ± 1.4", "-1210.0 ± 14.1"],
    ]
    lines = [line.split(" & ")[1] for line in tabular(comparison).splitlines() if " & $" in line]
    assert lines == [r"$\mathbf{-0.641} \pm 0.013$ \\", r"$-12.100 \pm 0.141$ \\", r"$-1.130 \pm 0.014$ \\"]


def test_seeds_are_shown_where_they_differ(tmp_path: Path, write_run):
    for seed in (1, 2):
        write_run(tmp_path / str(seed), seed=seed)
    assert table.headers(open_comparison(tmp_path))[-1] == "time"
    write_run(tmp_path / "local", "local")
    comparison = open_comparison(tmp_path)
    assert table.headers(comparison)[-1] == "seeds"
    assert [row.cells[-1].text for row in table.rows(comparison)] == ["1, 2", "1", "–"]


def test_the_time_says_what_it_measures():
    (time,) = (column for column in table.COLUMNS if column.label == "time")
    assert "shared that machine" in time.meaning and "--threads 1" in time.meaning


def test_the_best_is_marked_in_every_setting(tmp_path: Path, write_run):
    for split, levels in {"iid": (0.9, 0.7), "shards:2": (0.7, 0.9)}.items():
        for algorithm, level in zip(("deprl", "local"), levels, strict=True):
            write_run(tmp_path / f"{algorithm}-{split}", algorithm, split=split, level=level)
    best = [(row.label, row.setting) for row in table.rows(open_comparison(tmp_path)) if row.cells[0].best]
    assert best == [("DePRL", ("iid",)), ("Local", ("shards:2",))]


def test_where_a_setting_begins_is_known(tmp_path: Path, write_run):
    for algorithm, split in itertools.product(("deprl", "local"), ("iid", "shards:2")):
        write_run(tmp_path / f"{algorithm}{split}", algorithm, split=split)
    found = table.rows(open_comparison(tmp_path))
    assert [(row.setting, row.begins) for row in found] == [
        *[(("iid",), False)] * 3,
        (("shards:2",), True),
        *[(("shards:2",), False)] * 2,
    ]


def test_a_system_without_neighbours_stands_on_no_graph(tmp_path: Path, write_run):
    for graph in ("ring", "full"):
        write_run(tmp_path / graph, "deprl", graph=graph)
    write_run(tmp_path / "server", "fedavg")
    comparison = open_comparison(tmp_path)
    graphs = [(row.label, row.setting) for row in table.rows(comparison) if not row.floor]
    on_graphs = [("DePRL", ("full",)), ("DePRL", ("ring",))]
    assert sorted(graphs) == [*on_graphs, ("FedAvg", ("server",)), ("FedAvg", ("server",))]
    assert "% The same runs in several columns, since what differs does not concern them: FedAvg." in tabular(
        comparison
    )
