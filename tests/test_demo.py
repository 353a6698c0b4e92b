"""The demo: its command is a valid one, its last line is its picture, and a second call does nothing again."""

import argparse
from pathlib import Path

import pytest

from manyheads import demo
from manyheads.cli.compare import fill
from manyheads.cli.options import experiments
from manyheads.cli.parser import Parser


def test_the_command_is_the_one_that_is_promised() -> None:
    parser = Parser(prog="test")
    fill(parser)
    args: argparse.Namespace = parser.parse(demo.COMMAND[1:])
    found = experiments(args)
    assert [e.algorithm.name for e in found[::8]] == ["deprl", "d-psgd", "local"]
    assert {e.seed for e in found} == set(range(1, 9)), "enough to tell a lead from noise"
    assert {(e.data, e.workers, e.graph, e.split, e.relabel) for e in found} == {
        ("digits", 32, "ring", "dirichlet:1", True)
    }
    assert demo.COMMAND[0] == "compare" and len(args.tune) > 1


def test_the_last_line_is_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--workers", "4", "--rounds", "4", "--tune", "1", "--seeds", "1", "2", "--threads", "1"]
    monkeypatch.setattr(demo, "COMMAND", [*demo.COMMAND, *small])
    assert demo.main() == 0
    lines = capsys.readouterr().out.splitlines()
    picture = Path(lines[-1])
    assert picture.is_relative_to("runs/demo") and picture.read_bytes().startswith(b"\x89PNG")
    assert "runs/demo/report.html" in lines
    runs = {path: path.read_bytes() for path in Path("runs/demo").glob("*-*/*.jsonl")}
    assert len(runs) == 2 * 2 * 3
    monkeypatch.setattr("manyheads.report.write", lambda comparison: comparison.folder / "report.html")
    assert demo.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == lines[-1]
    assert {path: path.read_bytes() for path in runs} == runs


def test_a_failure_is_the_demos_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "COMMAND", ["compare", "deprl", "--graph", "rong", "--out", "runs/demo"])
    assert demo.main() == 2
    assert "unknown graph 'rong'" in capsys.readouterr().err
