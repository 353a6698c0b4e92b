"""Progress that is live for people and sparse for files, and waiting that says what for."""

import re
import sys
import threading
import time
from dataclasses import MISSING, fields

import pytest
import rich

from manyheads.cli import terminal
from manyheads.engine.phase import Progress
from manyheads.record import Record
from manyheads.rounds import Step


def _record(round: int, **changes) -> Record:
    values = {spec.name: 0.0 for spec in fields(Record) if spec.default is spec.default_factory is MISSING}
    return Record(**{**values, "round": round, "algorithm": "deprl", "accuracy_mean": 0.912, **changes})


def _steps(rounds: int, every: int = 1, first: int = 0):
    for k in range(first + 1, rounds + 1):
        yield Step(k, 0.5, _record(k) if k % every == 0 or k == rounds else None)


def test_a_regressions_progress_is_no_accuracy(capsys: pytest.CaptureFixture) -> None:
    list(terminal.follow([Step(1, 0.5, _record(1, majority_floor=None, accuracy_mean=-0.25))], 1, []))
    assert capsys.readouterr().out.startswith("round 1/1  score -0.2500  loss")


def test_progress_without_test_samples_has_no_score(capsys: pytest.CaptureFixture) -> None:
    record = _record(1, majority_floor=None, accuracy_mean=float("nan"), workers_without_test=3)
    list(terminal.follow([Step(1, 0.5, record)], 1, []))
    assert capsys.readouterr().out.startswith("round 1/1  no test samples  loss 0.500")


def test_quiet_shows_nothing_and_passes_everything_on(capsys: pytest.CaptureFixture) -> None:
    assert [s.round for s in terminal.follow(_steps(5), 5, ["a note"], quiet=True)] == [1, 2, 3, 4, 5]
    assert capsys.readouterr().out == ""


def test_lines_are_sparse(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(i * 1.4 / 3 for i in range(10_000))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    notes = ["known before"]

    def steps():
        notes.append("came with the first round")
        yield from _steps(30, every=3, first=4)
        notes.append("came at the end")

    assert len(list(terminal.follow(steps(), 30, notes))) == 26
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("note:")] == [f"note: {note}" for note in notes]
    rounds = [int(line.split("/")[0].split()[-1]) for line in lines if line.startswith("round")]
    # A round takes three readings of the clock, 1.4 s. Round 6 is evaluated, but comes too soon after the first line.
    assert rounds == [5, *range(9, 31, 3)]
    assert re.fullmatch(r"round 30/30  accuracy 91.2 %  loss 0.500  .* s/round  0.0 s left", lines[-2])


def test_the_first_round_says_little_about_the_others(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def steps():
        nonlocal now
        for step in _steps(10, every=1):
            # The first one compiles.
            now += 3 if step.round > 1 else 100
            yield step

    list(terminal.follow(steps(), 10, []))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("1:40 min/round  15:00 min left")
    assert lines[1].endswith("3.0 s/round  24 s left")


def test_a_long_first_round_is_announced(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_PATIENCE_SECONDS", 0.01)

    def steps():
        time.sleep(0.1)
        yield from _steps(2)

    assert [step.round for step in terminal.follow(steps(), 2, [])] == [1, 2]
    assert capsys.readouterr().out.splitlines()[0] == "preparing, and the first round ..."


def test_in_a_long_round_one_hears_how_far_it_is(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "_PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(terminal, "_LONG_PATIENCE_SECONDS", 0.05)
    heard: list[str] = []

    def steps():
        for step in _steps(2):
            before, heard[:] = capsys.readouterr().out, []
            while "mini-batches" not in before:
                time.sleep(0.01)
                before += capsys.readouterr().out
            heard.append(before)
            yield step

    within = Progress(30, 1200)
    for step in terminal.follow(steps(), 2, [], within=lambda: str(within)):
        what = "preparing, and the first round" if step.round == 1 else "round 2/2"
        assert f"{what}: 30 of 1,200 mini-batches ...\n" in heard[0]


def test_no_more_lines_than_evaluations(capsys: pytest.CaptureFixture) -> None:
    list(terminal.follow(_steps(500), 500, []))
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_bar(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert len(list(terminal.follow(_steps(4), 4, ["[odd] note"]))) == 4
    out = capsys.readouterr().out
    assert "4/4" in out
    assert "note: [odd] note" in out
    assert "accuracy 91.2 %" in out
    # A round may take minutes: the clock shows that it goes on.
    assert "0:00:00" in out


def test_a_narrow_bar_says_all_in_two_lines(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "50")
    # A console keeps the width that it began with.
    monkeypatch.setattr(rich, "_console", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(terminal, "human_seconds", lambda _: "59 min")
    list(terminal.follow(_steps(40), 40, []))
    *_, first, second = (line for line in capsys.readouterr().out.splitlines() if "accuracy" in line or "left" in line)
    assert "40/40 0:00:00 accuracy 91.2 %  loss 0.500" in first
    assert second.rstrip().endswith("rounds/s  59 min left") and "…" not in first + second


def test_waiting_speaks_only_when_it_takes_long(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal.waiting("loading digits"):
        pass
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(terminal, "_PATIENCE_SECONDS", 0.01)
    with terminal.waiting("loading cifar10") as downloading:
        time.sleep(0.1)
        downloading("cifar.tar.gz", 5_000_000, 10_000_000)
    assert capsys.readouterr().out == "loading cifar10 ...\ndownloading cifar.tar.gz: 5.0 MB of 10.0 MB\n"
    with terminal.waiting("loading cifar10", quiet=True) as downloading:
        time.sleep(0.03)
        downloading("cifar.tar.gz", 1, None)
    assert capsys.readouterr().out == ""


def test_what_takes_long_is_not_said_to_nobody(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def closed(*_: object, **__: object) -> None:
        raise BrokenPipeError

    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    monkeypatch.setattr(terminal, "_PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr("builtins.print", closed)
    with terminal.waiting("drawing"):
        time.sleep(0.1)
    assert not failed
