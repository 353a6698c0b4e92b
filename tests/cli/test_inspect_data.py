"""``inspect data``: the facts of a split, its map in the terminal and its picture."""

from pathlib import Path

import numpy as np
import pytest

from manyheads.cli import main
from manyheads.cli.inspect_data import text_map


def test_digits(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "data", "--workers", "8", "--split", "dirichlet:0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "data-digits-dirichlet-0.1-8.png"
    assert Path(lines[-1]).read_bytes().startswith(b"\x89PNG")
    assert any(line.startswith("majority floor") for line in lines)
    assert sum("│" in line for line in lines) == 8


def test_a_regression_has_no_map(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    np.savez(tmp_path / "r.npz", x=np.random.default_rng(0).random((60, 2)), y=np.linspace(0, 1, 60))
    out = tmp_path / "map.png"
    words = ["--data", str(tmp_path / "r.npz"), "--workers", "3", "--split", "iid", "--out", str(out)]
    assert main(["inspect", "data", *words]) == 0
    assert "│" not in capsys.readouterr().out
    assert not out.exists()


def test_a_split_by_users_says_who_each_worker_is(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    names = ["ben", "ann", "zoë", "\x1b[2J", "eve", "tom", "ida", "max"]
    x, y = np.random.default_rng(0).random((64, 2)), np.arange(64) / 64
    np.savez(tmp_path / "mine.npz", x=x, y=y, user=np.repeat(names, 8))

    def told(workers: int, split: str) -> dict[str, str]:
        words = ["--data", str(tmp_path / "mine.npz"), "--workers", str(workers), "--split", split]
        assert main(["inspect", "data", *words]) == 0
        lines = [line.strip().partition("  ") for line in capsys.readouterr().out.splitlines()]
        return {worker: users for worker, _, users in lines if worker.isdecimal()}

    shown = sorted(name.replace("\x1b", "?") for name in names)
    assert told(8, "natural") == {str(worker): name for worker, name in enumerate(shown)}
    three = [name for users in told(3, "natural").values() for name in users.split(", ")]
    assert sorted(three) == shown, "grouped"
    assert all(users.endswith(", 1 more") for users in told(2, "natural").values())
    assert told(8, "iid") == {}


def test_text_map_shades_by_share() -> None:
    lines = text_map(np.array([[10, 0, 0], [1, 1, 98], [0, 0, 0]])).splitlines()
    assert lines == [
        "worker  samples  classes 0 to 2",
        "     0       10  │███      │",
        "     1      100  │░░░░░░███│",
        "     2        0  │         │",
        "of the worker's samples: ░ below 25 %, ▒ below 50 %, ▓ below 75 %, █ more",
    ]
    quarters = text_map(np.array([[24, 26, 50], [25, 75, 0]])).splitlines()
    assert [line[18:27] for line in quarters[1:3]] == ["░░░▒▒▒▓▓▓", "▒▒▒███   "]


def test_text_map_fits_a_screen() -> None:
    lines = text_map(np.ones((500, 130), int)).splitlines()
    assert "3 in a column" in lines[0]
    assert "461 more workers" in lines[-2]
    assert text_map(np.ones((40, 2), int)).splitlines()[-2].endswith("and 1 more worker in the picture")
    assert len(lines) <= 42
    assert max(map(len, lines)) <= 80
