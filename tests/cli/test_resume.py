"""Killed with -9 in the middle, the same command ends as if nothing had happened, bit for bit."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from manyheads.checkpoint import latest_round
from manyheads.cli import main

NET = """
from torch import nn

def net(input_shape, num_outputs):
    first = [nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)]
    return nn.Sequential(*first, nn.Linear(16, num_outputs))
"""
# Dropout, BatchNorm, momentum, a graph that is redrawn and fails: whatever was drawn must be drawn again.
WORDS = [
    "train", "deprl", "--workers", "5", "--rounds", "29", "--model", "resumed_net:net", "--graph", "random:0.5",
    "--redraw", "--link-failure", "0.2", "--worker-failure", "0.1", "--eval-every", "2", "--checkpoint-every", "3",
    "--head-steps", "2", "--body-steps", "2", "--quiet",
]  # fmt: skip
UNLIKE = ("seconds", "peak_memory_bytes")
"""What may differ between two runs of one experiment."""


def _start(out: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "manyheads", *WORDS, "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=out.parent)


def _wait_for_round(process: subprocess.Popen, out: Path, round: int) -> None:
    deadline = time.monotonic() + 60
    while not any(row["round"] >= round for row in _rows(out)):
        assert process.poll() is None, f"ended before it could be killed: {process.stderr and process.stderr.read()!r}"
        assert time.monotonic() < deadline, f"no round {round} in a minute"
        time.sleep(0.002)


def _rows(out: Path) -> list[dict[str, Any]]:
    """The metrics of a run that another process may be writing: only lines that have their end."""
    path = out / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def _comparable(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in UNLIKE}


def test_kill_and_continue(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    (tmp_path / "resumed_net.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    for round in (4, 10):
        with _start(killed) as process:
            _wait_for_round(process, killed, round)
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        assert not (killed / "summary.json").exists()
        assert latest_round(killed / "checkpoint") >= round // 3 * 3
    assert main([*WORDS, "--out", str(killed)]) == 0
    assert main([*WORDS, "--out", str(whole)]) == 0
    capsys.readouterr()

    one, other = _rows(killed), _rows(whole)
    assert [row["round"] for row in one] == [*range(2, 29, 2), 29]
    assert [_comparable(row) for row in one] == [_comparable(row) for row in other]
    assert all(row["seconds"] > 0 for row in one)
    assert [row["seconds"] for row in one] == sorted(row["seconds"] for row in one)
    for name in ("models.safetensors", "workers.jsonl", "experiment.json", "partition.safetensors", "model.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    summaries = [_comparable(json.loads((out / "summary.json").read_text())) for out in (killed, whole)]
    for summary in summaries:
        summary.pop("notes")
    assert summaries[0] == summaries[1]


def test_a_scheduler_that_stops_a_run_is_answered(tmp_path: Path) -> None:
    (tmp_path / "resumed_net.py").write_text(NET)
    with _start(tmp_path / "stopped") as process:
        _wait_for_round(process, tmp_path / "stopped", 8)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.fullmatch(rb"manyheads: stopped at round \d+; the same command continues it from round \d+\.\n", said)
