"""``inspect speed``: what to give the simulated clock."""

from pathlib import Path

import pytest

from manyheads.cli import main


def test_the_last_line_is_the_option(capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", "speed", "--model", "mlp:8", "--batch-size", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    flag, seconds = lines[-1].split()
    assert flag == "--step-seconds"
    assert 0 < float(seconds) < 1
    assert "measured on one core" in lines[-2]


def test_weights_that_are_not_trained_are_said_apart(
    capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        "from torch import nn",
        "def net():",
        "    first = nn.Linear(64, 6).requires_grad_(False)",
        "    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(6, 10))",
    ]
    (tmp_path / "half_held.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["inspect", "speed", "--model", "half_held:net"]) == 0
    assert "parameters               70, and 390 with requires_grad=False\n" in capsys.readouterr().out


def test_an_unknown_net_is_one_line(capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", "speed", "--model", "mlpp"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_batches_that_no_batchnorm_can_be_trained_on_are_one_line(capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", "speed", "--model", "resnet18", "--batch-size", "1"]) == 2
    assert "--batch-size 1 with BatchNorm" in capsys.readouterr().err
