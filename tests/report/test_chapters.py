import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from manyheads.algorithms import REGISTRY, DePRL
from manyheads.report.chapters import Chapter, of_setting, of_systems
from manyheads.report.comparison import open_comparison


def names(chapters: list[Chapter]) -> dict[str, list[str]]:
    return {chapter.title: [picture.name for _, row in chapter.rows for picture in row] for chapter in chapters}


@pytest.fixture(scope="module")
def chapters(tmp_path_factory, write_run) -> list[Chapter]:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "a", "deprl", similarity=True, theory=True, clock=True)
    write_run(folder / "b", "fedavg", clock=True)
    return of_setting(open_comparison(folder), 0)


def test_every_chapter_has_its_pictures(chapters: list[Chapter]):
    assert names(chapters) == {
        "Learning curves": ["learning-rounds", "learning-bytes", "learning-time"],
        "The workers": ["workers"],
        "The graph": ["graph-deprl", "graph-fedavg"],
        "How alike the workers are": [f"similarity-deprl-{kind}" for kind in ("data", "heads", "representations")],
        "Consensus": ["consensus-error", "consensus-error-relative"],
        "Convergence": ["theory-deprl"],
    }


def test_the_bands_of_accuracies_end_at_100_percent(tmp_path: Path, write_run, monkeypatch: pytest.MonkeyPatch):
    for seed, level in ((1, 1.2), (2, 0.6)):
        write_run(tmp_path / str(seed), "fedavg", seed=seed, level=level, rounds=3)
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.fill_between", lambda axes, x, low, high, **look: drawn.append(high))
    of_setting(open_comparison(tmp_path), 0)
    # Of the learning curves by rounds and by bytes, and of the workers; a server leaves no consensus error.
    assert [max(high) for high in drawn[:3]] == [100] * 3


def test_what_was_not_recorded_has_no_chapter(tmp_path: Path, write_run):
    run = write_run(tmp_path / "a", "fedavg")
    (run / "workers.jsonl").unlink()
    assert names(of_setting(open_comparison(tmp_path), 0)) == {"Learning curves": ["learning-rounds", "learning-bytes"]}


def test_a_line_whose_records_end_early_is_not_labelled_with_what_it_ends_with(tmp_path: Path, write_run):
    write_run(tmp_path / "a", "local", level=0.8)
    metrics = write_run(tmp_path / "b", "deprl", level=0.9) / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:4]))
    (row,) = (row for _, row in of_setting(open_comparison(tmp_path), 0)[0].rows)
    assert row and all("At the end: DePRL unknown; Local " in picture.alt for picture in row)
    for picture in row:
        labels = re.findall(r">((?:DePRL|Local)[^<]*)</text>", picture.inline)
        assert labels[0] == "DePRL" and re.fullmatch(r"Local · \d\d\.\d %", labels[1])


def test_what_sends_nothing_is_not_drawn_against_bytes_alone(tmp_path: Path, write_run):
    write_run(tmp_path / "a", "local")
    (learning, *_, consensus) = of_setting(open_comparison(tmp_path), 0)
    assert names([learning]) == {"Learning curves": ["learning-rounds"]}
    assert "dot" not in learning.text and "No line" not in consensus.text
    write_run(tmp_path / "b", "deprl")
    said = of_setting(open_comparison(tmp_path), 0)[0].text
    assert "A dotted level is a system that sends nothing." in said and "Fine dots" not in said


def test_times_are_told_in_the_unit_of_their_axis(tmp_path: Path, write_run):
    """A tenth of a second is too coarse for rounds that take less."""
    run = write_run(tmp_path / "a", "deprl", clock=True, rounds=3)
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(re.sub(r'"simulated_seconds": (\d)\.0', r'"simulated_seconds": 0.0\g<1>4', text))
    *_, times = of_setting(open_comparison(tmp_path), 0)[0].rows[0][1]
    assert "simulated time, ms" in times.alt
    assert [text.split(" · ")[1] for _, _, text in times.hover["points"]] == ["14.0 ms", "24.0 ms", "34.0 ms"]


def test_a_guessed_time_of_a_mini_batch_is_said_where_time_is_drawn(tmp_path: Path, write_run):
    for name, options in (("known", {}), ("own", {"model": "my.module:net"}), ("undrawn", {"model": "my.module:net"})):
        run = write_run(tmp_path / name / "a", "deprl", clock=name != "undrawn", rounds=2, **options)
        said = "The time of a mini-batch is a guess" in of_setting(open_comparison(run), 0)[0].text
        assert said == (name == "own")
    given = write_run(tmp_path / "given", "deprl", clock=True, rounds=2, model="my.module:net", step_seconds=0.5)
    assert "guess" not in of_setting(open_comparison(given), 0)[0].text


def test_dots_that_lead_to_a_name_are_explained(tmp_path: Path, write_run):
    write_run(tmp_path / "a", "deprl", clock=True)
    write_run(tmp_path / "b", "local", clock=True)
    assert "Fine dots lead from a line that ends early to its name." in of_setting(open_comparison(tmp_path), 0)[0].text


def test_a_system_keeps_its_colour_whoever_stands_beside_it(tmp_path: Path, write_run):
    write_run(tmp_path / "a", "local", rounds=1)
    for epochs in (1, 2):
        write_run(tmp_path / str(epochs), "deprl", {"head_epochs": epochs}, rounds=1)
    assert "var(--c7)" in of_setting(open_comparison(tmp_path), 0)[0].rows[0][1][0].inline


def test_an_algorithm_of_ones_own_has_another_colour_and_is_dashed_where_it_needs_a_server(tmp_path: Path, write_run):
    write_run(tmp_path / "a", "d-psgd")
    description = write_run(tmp_path / "b", "fedavg") / "experiment.json"
    description.write_text(description.read_text().replace('"name": "fedavg"', '"name": "mine"'))
    learning = of_setting(open_comparison(tmp_path), 0)[0]
    assert {"var(--c0)", "var(--c1)"} <= set(re.findall(r"var\(--c\d\)", learning.rows[0][1][0].inline))
    assert "Dashed: needs a server." in learning.text


def test_a_ninth_algorithm_in_the_registry_has_another_colour_than_the_first(
    tmp_path: Path, write_run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(REGISTRY, "mine", DePRL)
    write_run(tmp_path / "a", "deprl")
    description = write_run(tmp_path / "b", "deprl") / "experiment.json"
    description.write_text(description.read_text().replace('"name": "deprl"', '"name": "mine"'))
    inline = of_setting(open_comparison(tmp_path), 0)[0].rows[0][1][0].inline
    assert {"var(--c0)", "var(--c1)"} <= set(re.findall(r"var\(--c\d\)", inline))


def test_the_texts_explain_what_there_is_to_see(chapters: list[Chapter]):
    learning, workers, _, similar, *_ = chapters
    assert "Dashed: needs a server." in learning.text
    assert "sends nothing" not in learning.text
    assert chapters[4].title == "Consensus" and "No line: FedAvg, whose workers" in chapters[4].text
    assert "over seeds" not in learning.text + workers.text
    assert "(seed 1)" in similar.text and "the diagonal, each worker beside itself" in similar.text
    assert similar.rows[0][0].startswith("DePRL (correlation of heads with data: ")


def test_cosines_that_are_no_numbers_do_no_harm(tmp_path: Path, write_run):
    run = write_run(tmp_path / "a")
    values = np.full((8, 8), np.nan, dtype=np.float32)
    save_file({"data": values, "heads": values}, run / "similarity.safetensors")
    (chapter,) = (found for found in of_setting(open_comparison(tmp_path), 0) if found.title.startswith("How alike"))
    assert chapter.rows[0][0] == "DePRL"
    assert all(json.dumps(picture.hover, allow_nan=False) for picture in chapter.rows[0][1])


def test_a_grid_shows_how_each_system_depends_on_it(tmp_path: Path, write_run):
    for graph in ("ring", "full"):
        write_run(tmp_path / graph, "deprl", graph=graph, rounds=2)
    write_run(tmp_path / "server", "fedavg", rounds=2)
    found = of_systems(open_comparison(tmp_path))
    assert names(found) == {"DePRL": ["deprl-by-setting-rounds", "deprl-by-setting-bytes"]}
    assert "full" in found[0].rows[0][1][0].alt


def test_a_system_is_named_by_the_settings_that_it_looks_at(tmp_path: Path, write_run):
    """Local training is on no graph: its lines are those of the splits."""
    for graph, split in itertools.product(("ring", "full"), ("iid", "dirichlet:0.1")):
        write_run(tmp_path / f"{graph}{split}", "deprl", graph=graph, split=split, rounds=2)
        if graph == "ring":
            write_run(tmp_path / f"local{split}", "local", split=split, rounds=2)
    deprl, local = (set(_labels(found)) for found in of_systems(open_comparison(tmp_path)))
    assert deprl >= {"dirichlet:0.1, full", "iid, full", "dirichlet:0.1, ring", "iid, ring"}
    assert local >= {"dirichlet:0.1", "iid"} and not any("full" in label for label in local)


def _labels(chapter: Chapter) -> list[str]:
    return re.findall(r">([^<]+?)(?: · [\d.]+ %)?</text>", chapter.rows[0][1][0].inline)
