"""Figures: written whole, in every format, from ordinary and from odd input."""

from pathlib import Path

import numpy as np
import pytest

from manyheads import figures
from manyheads.errors import UserError

MAGIC = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", figures.FORMATS)
def test_formats(tmp_path: Path, suffix: str) -> None:
    out = tmp_path / "new" / f"map{suffix}"
    figures.class_map(np.eye(3), out)
    assert out.read_bytes().startswith(MAGIC[suffix])
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_the_same_picture_is_the_same_file(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        figures.graph(np.array([[0.0, 0], [1, 0]]), [(0, 1)], tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize("shape", [(1, 1), (3, 10), (70, 66)])
def test_class_map(tmp_path: Path, shape: tuple[int, int]) -> None:
    figures.class_map(np.arange(np.prod(shape)).reshape(shape), tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 1000


@pytest.mark.parametrize("num_workers", [1, 64, 65])
def test_graph(tmp_path: Path, num_workers: int) -> None:
    places = np.random.default_rng(0).random((num_workers, 2))
    edges = [(i, i + 1) for i in range(num_workers - 1)]
    figures.graph(places, edges, tmp_path / "g.svg")
    numbers = (tmp_path / "g.svg").read_text().count(f"<!-- {num_workers - 1} -->")
    assert numbers == (1 if num_workers <= 64 else 0)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"graph\.jpeg .*\.png, \.svg"):
        figures.graph(np.zeros((1, 2)), [], tmp_path / "graph.jpeg")
    assert not list(tmp_path.iterdir())
