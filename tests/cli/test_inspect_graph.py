"""``inspect graph``: the facts and the picture of a graph."""

from pathlib import Path

import pytest

from manyheads.cli import main


def test_ring(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "graph", "--graph", "random:0.25", "--workers", "9"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "graph-random-0.25-9.png"
    assert Path(last).read_bytes().startswith(b"\x89PNG")
    facts = {line[:16].strip(): line[16:].strip() for line in lines}
    assert facts["graph"] == "random:0.25"
    assert 0 < float(facts["spectral gap"]) < 1
    assert "vacuous" in facts["theorem 1"]
    assert facts["fewest rounds"].startswith("10^")


def test_very_many_links_are_not_all_drawn(
    capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyheads.drawing.MOST_LINKS", 20)
    words = ["--graph", "full", "--workers", "9", "--out", str(tmp_path / "graph.svg")]
    assert main(["inspect", "graph", *words]) == 0
    assert "20 of the links, chosen at random" in capsys.readouterr().out
    text = (tmp_path / "graph.svg").read_text()
    assert text.split('<g id="LineCollection_1">')[1].split("</g>")[0].count("<path") == 20


@pytest.mark.parametrize("what", ["graph", "data"])
def test_a_picture_of_no_known_kind_is_refused_at_once(what: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", what, "--workers", "9", "--out", "picture.gif"]) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    assert "end its name with .png, .svg, .pdf." in caught.err


def test_a_graph_that_only_some_algorithms_take(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    out = tmp_path / "graph.svg"
    words = ["--graph", "in-neighbours:2", "--workers", "8", "--link-failure", "0.1", "--out", str(out)]
    assert main(["inspect", "graph", *words]) == 0
    text = capsys.readouterr().out
    assert "row-stochastic" in text
    assert text.splitlines()[-1] == str(out)
    assert out.exists()
