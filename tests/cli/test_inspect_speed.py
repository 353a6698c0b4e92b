"""``inspect speed``: what to give the simulated clock."""

import pytest

from manyheads.cli import main


def test_the_last_line_is_the_option(capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", "speed", "--model", "mlp:8", "--batch-size", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    flag, seconds = lines[-1].split()
    assert flag == "--step-seconds"
    assert 0 < float(seconds) < 1
    assert "measured on one core" in lines[-2]


def test_an_unknown_net_is_one_line(capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", "speed", "--model", "mlpp"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
