"""The board: what people see of many runs, live on a terminal and in lines elsewhere."""

import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields

import pytest

from manyheads.cli import board
from manyheads.jobs import News
from manyheads.record import Record

RUNS = [board.Shown(name, 4) for name in ("old", "good", "bad")]
NEWS = [
    News(0, "finished", 4),
    News(1, "running", 1),
    News(2, "running", 1),
    News(1, "running", 2),
    News(2, "failed", error="it broke."),
    News(1, "finished", 4),
]


def test_lines(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "_PATIENCE_SECONDS", 0.0)
    assert board.follow(NEWS, RUNS, "running", finished=1) == {"bad": NEWS[4]}
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["running  1 of 3 runs finished before", "running  1/3 runs  5/12 rounds"]
    assert next(line for line in lines if "failed:" in line).endswith("bad: failed: it broke.")
    assert any("left" in line for line in lines)


def test_of_one_run_of_one_round_it_speaks_as_of_one(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "_PATIENCE_SECONDS", 0.0)
    board.follow([News(0, "running", 1)], [board.Shown("only", 1)], "running", finished=1)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["running  1 of 1 run finished before", "running  0/1 run  1/1 round"]


def test_first_rounds_say_little_about_the_others(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(board.time, "monotonic", lambda: now)

    def news() -> Iterator[News]:
        nonlocal now
        for round in (1, 2, 3):
            # The first one compiles.
            now += 10 if round > 1 else 1000
            yield News(1, "running", round)

    board.follow(news(), RUNS[:2], "running")
    assert capsys.readouterr().out.splitlines() == [
        "running  0/2 runs  1/8 rounds",
        "running  0/2 runs  1:00 min left  2/8 rounds",
        "running  0/2 runs  50 s left  3/8 rounds",
    ]


def test_a_long_run_to_come_counts_for_more(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(board.time, "monotonic", lambda: now)

    def news() -> Iterator[News]:
        nonlocal now
        for round in (1, 2):
            now += 10
            yield News(0, "running", round)

    board.follow(news(), [board.Shown("short", 4, 0.2), board.Shown("long", 4, 0.5)], "running")
    # Two rounds of 10 s, and four of 25 s.
    assert capsys.readouterr().out.splitlines()[-1] == "running  0/2 runs  2:00 min left  2/8 rounds"


@pytest.mark.parametrize(
    ("validation", "floor", "said"),
    [(False, 0.1, "accuracy -25.0 %"), (False, None, "score -0.2500"), (True, 0.1, "validation 50.0 %")],
)
def test_a_score_carries_its_name(capsys: pytest.CaptureFixture, validation: bool, floor: float | None, said: str):
    values = {spec.name: 0.0 for spec in fields(Record) if spec.default is spec.default_factory is MISSING}
    scores = {"accuracy_mean": -0.25, "accuracy_validation": 0.5, "majority_floor": floor}
    record = Record(**{**values, **scores})  # pyright: ignore[reportArgumentType]
    board.follow([News(0, "running", 4, record), News(0, "finished", 4)], RUNS[:1], "running", validation=validation)
    assert capsys.readouterr().out.splitlines()[-1] == f"running  1/1 run  old: {said}"


def test_quiet(capsys: pytest.CaptureFixture) -> None:
    assert board.follow(NEWS, RUNS, "running", quiet=True) == {"bad": NEWS[4]}
    assert capsys.readouterr().out == ""


def test_live(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    assert board.follow(NEWS, RUNS, "running") == {"bad": NEWS[4]}
    shown = capsys.readouterr().out
    assert "bad: failed: it broke." in shown
    assert "3/3 runs  1 failed" in shown


def test_stopped_by_hand() -> None:
    def news() -> Iterator[News]:
        yield NEWS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="stopped; 1 of 3 runs had ended; the same command"):
        board.follow(news(), RUNS, "running", quiet=True)
