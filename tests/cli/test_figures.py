"""Figures: written whole, in every format, from ordinary and from odd input."""

import re
from pathlib import Path

import numpy as np
import pytest

from manyheads.cli import figures
from manyheads.drawing import FORMATS
from manyheads.errors import UserError

MAGIC = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.mark.parametrize("kind", FORMATS)
def test_formats(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "new" / f"map.{kind}"
    figures.class_map(np.eye(3), out)
    assert out.read_bytes().startswith(MAGIC[kind])
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_the_same_picture_is_the_same_file(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        figures.graph(np.array([[0.0, 0], [1, 0]]), [(0, 1)], tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize(("shape", "most"), [((1, 1), 1), ((3, 10), 123_456), ((2, 1000), 1), ((70, 66), 9)])
def test_no_word_of_a_class_map_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], most: int
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    drawn = []
    monkeypatch.setattr("manyheads.drawing.as_file", lambda figure, kind: drawn.append(figure) or b"")
    figures.class_map(np.full(shape, most), tmp_path / "map.png")
    (figure,) = drawn
    box = figure.get_tightbbox(FigureCanvasAgg(figure).get_renderer())
    assert box.x0 >= 0 and box.y0 >= 0
    assert box.x1 <= figure.get_figwidth() and box.y1 <= figure.get_figheight()


def test_the_scale_of_a_class_map_names_whole_samples(tmp_path: Path) -> None:
    for most, scale in ((0, ["0 samples", "1 sample", "2 samples"]), (35, ["0 samples", "18 samples", "36 samples"])):
        figures.class_map(np.array([[0, most]]), tmp_path / "map.svg")
        assert re.findall(r">(\d+ samples?)</text>", (tmp_path / "map.svg").read_text()) == scale


@pytest.mark.parametrize("num_workers", [1, 64, 65])
def test_graph(tmp_path: Path, num_workers: int) -> None:
    places = np.random.default_rng(0).random((num_workers, 2))
    edges = [(i, i + 1) for i in range(num_workers - 1)]
    figures.graph(places, edges, tmp_path / "g.svg")
    numbers = (tmp_path / "g.svg").read_text().count(f">{num_workers - 1}</text>")
    assert numbers == (1 if num_workers <= 64 else 0)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UserError, match=r"graph\.jpeg .*\.png, \.svg"):
        figures.check_name(Path("graph.jpeg"))
