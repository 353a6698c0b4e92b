import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from manyheads.errors import UserError
from manyheads.report import open_comparison, write

VOID = {"meta", "link", "br", "path", "image", "use", "rect"}


class Checker(HTMLParser):
    """Whether elements nest and ids are unique."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]
        self.addresses += [value for name, value in attrs if name in ("href", "src", "xlink:href") and tag != "use"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def test_the_page_is_sound_and_needs_nothing_from_elsewhere(reported: Path):
    text = (reported / "report.html").read_text()
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    assert "Content-Security-Policy" in text
    for address in checker.addresses:
        assert address.startswith("data:") or (reported / address).is_file(), address


def test_figures_are_svg_png_and_pdf_and_numbers_are_csv(reported: Path):
    figures = {path.name for path in (reported / "figures").iterdir()}
    names = {path.rpartition(".")[0] for path in figures}
    assert {"learning-rounds", "graph-deprl"} <= names
    assert figures == {f"{name}.{kind}" for name in names for kind in ("svg", "png", "pdf")}
    page = (reported / "report.html").read_text()
    assert all(f'<a href="figures/{name}">' in page for name in figures)
    assert {
        "comparison.tex",
        "comparison.csv",
        "curves.csv",
        "rounds.csv",
        "workers.csv",
        "runs.csv",
        "options.csv",
        "mixing.csv",
    } <= {path.name for path in (reported / "csv").iterdir()}


def test_constants_that_nobody_can_read_are_only_in_their_file(reported: Path):
    page = (reported / "report.html").read_text()
    assert "<td>vacuous</td>" in page and "<sup>" not in page
    assert "log10_rounds_repaired" in (reported / "csv" / "mixing.csv").read_text()


def test_the_numbers_of_a_map_are_linked_beside_it(reported: Path):
    links = re.findall(r'<a href="(csv/[^"]*)">([^<]*)', (reported / "report.html").read_text())
    assert ("csv/similarity-deprl-heads.csv", "CSV") in links
    assert ("csv/comparison.csv", "csv/comparison.csv") in links
    assert sorted(name for name, _ in links) == sorted(f"csv/{path.name}" for path in (reported / "csv").iterdir())


def test_the_page_says_what_ran_what_was_left_out_and_what_accuracy_is(reported: Path):
    text = re.sub(r"<svg.*?</svg>|<[^>]*>", " ", (reported / "report.html").read_text(), flags=re.DOTALL)
    for words in (
        "DePRL, Ditto and Local on digits",
        "2 seeds (1, 2)",
        "1 unfinished run is left out.",
        "majority floor",
        "Which accuracy is this?",
        "3 passes for each of 2 models (Ditto)",
        "torch 2.6.0",
        "7 workers hold fewer than 3 classes.",
        "csv/rounds.csv",
        "vacuous",
    ):
        assert words in text, words


def test_a_second_report_replaces_the_first_and_is_the_same(tmp_path: Path, write_run):
    write_run(tmp_path / "run", rounds=2)
    before = write(open_comparison(tmp_path)).read_bytes()
    assert write(open_comparison(tmp_path)).read_bytes() == before


def test_whatever_comes_from_a_file_is_escaped(tmp_path: Path, write_run):
    evil = "<script>alert(1)</script>"
    run = write_run(tmp_path / "a<b>&", rounds=2)
    description = json.loads((run / "experiment.json").read_text())
    description |= {"model": evil, "data": evil, "split": f'"{evil}'}
    description["algorithm"] |= {"name": evil, "order": evil}
    (run / "experiment.json").write_text(json.dumps(description))
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "notes": [evil], "run_id": evil, "runtime": {evil: evil}}))
    text = write(open_comparison(tmp_path)).read_text()
    assert "&lt;script&gt;alert(1)" in text
    assert evil not in text
    assert text.count("<script") == 1


def test_nothing_is_written_when_runs_are_refused(tmp_path: Path, write_run):
    write_run(tmp_path / "a", "deprl")
    write_run(tmp_path / "b", "local", split="iid")
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(UserError, match="--split"):
        write(open_comparison(tmp_path))
    assert (tmp_path / "report.html").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "report.html"]


def test_a_grid_has_a_part_for_each_setting(tmp_path: Path, write_run):
    for split in ("iid", "shards:2"):
        write_run(tmp_path / split, split=split, rounds=2)
    text = write(open_comparison(tmp_path)).read_text()
    assert [f"<h2>split {split}</h2>" in text for split in ("iid", "shards:2")] == [True, True]
    assert (tmp_path / "figures" / "split-shards-2-learning-rounds.png").is_file()


def test_a_regression_is_reported_without_percent(tmp_path: Path, write_run):
    run = write_run(tmp_path / "a", rounds=2)
    for name in ("summary.json", "metrics.jsonl"):
        text = re.sub(r'"majority_floor": [\d.]+', '"majority_floor": null', (run / name).read_text())
        (run / name).write_text(text)
    text = write(open_comparison(tmp_path)).read_text()
    assert "accuracy, %" not in text
    assert "score, mean over workers" in text and "score after the last round" in text
    assert "Which score is this?" in text
    assert "majority floor" not in text


@pytest.mark.parametrize("content", [b"\xe9\xff<html>", b'<a href="figures/mine.png">'])
def test_a_page_that_is_none_of_ours_stays_with_its_pictures(tmp_path: Path, write_run, content: bytes):
    write_run(tmp_path / "a")
    page, picture = tmp_path / "report.html", tmp_path / "figures" / "mine.png"
    picture.parent.mkdir()
    page.write_bytes(content)
    picture.write_bytes(b"")
    with pytest.raises(UserError, match=r"report\.html is no report of manyheads .* move it away"):
        write(open_comparison(tmp_path))
    assert page.read_bytes() == content and [*picture.parent.iterdir()] == [picture]


def test_what_an_earlier_report_has_left_goes_with_it(tmp_path: Path, write_run):
    def files() -> set[str]:
        return {path.name for folder in ("figures", "csv") for path in (tmp_path / folder).iterdir()}

    write_run(tmp_path / "a", "deprl")
    write_run(tmp_path / "b", "deprl", graph="full")
    write(open_comparison(tmp_path))
    both, own = files(), tmp_path / "figures" / "mine.png"
    own.write_bytes(b"")
    shutil.rmtree(tmp_path / "b")
    write(open_comparison(tmp_path))
    assert any("full" in name for name in both) and not any("full" in name for name in files())
    assert own.exists(), "it is not the report's"
    assert '<meta name="generator" content="manyheads ' in (tmp_path / "report.html").read_text()
    alone = write_run(tmp_path / "alone" / "a", "deprl").parent
    write(open_comparison(alone))
    assert files() - {"mine.png"} == {path.name for part in ("figures", "csv") for path in (alone / part).iterdir()}
