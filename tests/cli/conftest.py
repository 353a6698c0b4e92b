"""A small finished run for the commands that read one."""

from pathlib import Path

import pytest

from manyheads.cli import main


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds of DePRL on the digits, 3 workers. Not to be written into."""
    out = tmp_path_factory.mktemp("finished") / "run"
    words = ["--workers", "3", "--rounds", "2", "--head-epochs", "1", "--graph", "full", "--quiet", "--out", str(out)]
    assert main(["train", "deprl", *words]) == 0
    return out
