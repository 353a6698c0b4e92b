"""``inspect memory``: what a run takes of a GPU, on a machine that need not have one."""

import pytest
import torch

from manyheads.cli import inspect_memory, main


def facts(text: str) -> dict[str, str]:
    return {line[:60].split("  ")[0]: line.split("  ")[-1].strip() for line in text.splitlines() if "  " in line}


def test_the_plan_of_a_run(capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", "memory", "deprl", "--workers", "12", "--memory", "24"]) == 0
    found = facts(capsys.readouterr().out)
    assert any("rows of 12 workers" in label and "device memory" in label for label in found)
    assert int(found["workers whose rows fit on the device"].replace(",", "")) > 1000
    assert "device memory in all" in found
    assert found["part of 24.0 GB that a run takes"] == "at most 80 %"


def test_rows_that_do_not_fit_go_to_the_host(capsys: pytest.CaptureFixture) -> None:
    words = ["inspect", "memory", "deprl", "--model", "mlp:4000,4000", "--workers", "60", "--memory"]
    assert main([*words, "12"]) == 0
    found = facts(capsys.readouterr().out)
    assert any("in host memory" in label for label in found)
    assert 30 < int(found["workers whose rows fit on the device"]) < 60
    assert main([*words, "2"]) == 2
    error = capsys.readouterr().err
    assert "are free, which is enough for 0" in error and len(error.splitlines()) == 1
    for amount in ("-1", "1e+300"):
        assert main([*words, amount]) == 2
        assert f"--memory {amount} is not an amount of memory" in capsys.readouterr().err


def test_rows_that_the_host_does_not_hold(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU that is elsewhere the host may be larger; of the one here it is known."""
    words = ["inspect", "memory", "deprl", "--model", "mlp:4000,4000", "--workers", "60"]
    monkeypatch.setattr("manyheads.memory.available", lambda: 10**9)
    assert main([*words, "--memory", "12"]) == 0
    found = facts(capsys.readouterr().out)
    assert found["rows of 60 workers, 3 copies, in host memory"].endswith(" GB, and this machine has 1.0 GB free")
    assert found["workers whose rows fit into this machine's free memory"] == "5 (1.0 GB)"
    assert main(words) == 0, "without a GPU there is nothing to compare with"
    assert "5 (1.0 GB)" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(inspect_memory, "pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(inspect_memory, "free_memory", lambda _: 12 * 10**9)
    assert main(words) == 2
    error = capsys.readouterr().err
    most = found["workers whose rows fit on the device"]
    assert "the rows of 60 workers" in error and f"its host 1.0 GB, which is enough for {most}: lower" in error
    assert len(error.splitlines()) == 1


def test_a_machine_that_cannot_say_its_memory(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyheads.memory.available", lambda: None)
    assert main(["inspect", "memory", "deprl", "--workers", "12", "--memory", "24"]) == 0
    assert "this machine" not in capsys.readouterr().out
