"""``inspect memory``: what a run takes of a GPU, on a machine that need not have one."""

import pytest

from manyheads.cli import main


def facts(text: str) -> dict[str, str]:
    return {line[:60].split("  ")[0]: line.split("  ")[-1].strip() for line in text.splitlines() if "  " in line}


def test_the_plan_of_a_run(capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", "memory", "deprl", "--workers", "12", "--memory", "24"]) == 0
    found = facts(capsys.readouterr().out)
    assert any("rows of 12 workers" in label and "device memory" in label for label in found)
    assert int(found["workers whose rows fit on the device"].replace(",", "")) > 1000
    assert "device memory in all" in found
    assert found["of 24.0 GB a run takes"] == "at most 80 %"


def test_rows_that_do_not_fit_go_to_the_host(capsys: pytest.CaptureFixture) -> None:
    words = ["inspect", "memory", "deprl", "--model", "mlp:4000,4000", "--workers", "60", "--memory"]
    assert main([*words, "12"]) == 0
    found = facts(capsys.readouterr().out)
    assert any("in host memory" in label for label in found)
    assert 30 < int(found["workers whose rows fit on the device"]) < 60
    assert main([*words, "2"]) == 2
    error = capsys.readouterr().err
    assert "are free, which is enough for 0" in error and len(error.splitlines()) == 1
    assert main([*words, "-1"]) == 2
    assert "--memory -1 is not positive" in capsys.readouterr().err
