"""What a process may use of its machine, and its place among others."""

import os
import sys

import pytest

from manyheads.cli import main
from manyheads.errors import UserError
from manyheads.machine import cores, expanded, local_rank, rank, started_together
from manyheads.store import Run


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which cores a process may use")
def test_only_cores_that_a_process_may_use_are_counted():
    allowed = os.sched_getaffinity(0)
    assert cores() == len(allowed)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_home_that_nobody_has_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(UserError, match=r"^~runs/mine begins with nobody's home: write ~/ for your own"):
        expanded("~runs/mine")
    with pytest.raises(UserError, match="begins with nobody's home"):
        Run.open("~runs/mine")
    for words in ("report ~runs/mine", "train --out ~runs/mine", "train --data ~runs/mine", "train --data-dir ~runs"):
        assert main([*words.split(), *(["deprl"] if "train" in words else [])]) == 2
        assert "begins with nobody's home" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "number", "found"),
    [
        (None, None, (False, 0)),
        ("1", "3", (False, 0)),
        ("4", "3", (True, 3)),
        ("4", None, (True, 0)),
        ("4", "x", (True, 0)),
    ],
)
def test_the_place_among_others_is_what_torchrun_says(monkeypatch, count: str | None, number: str | None, found):
    for name, value in (("WORLD_SIZE", count), ("RANK", number), ("LOCAL_RANK", number)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert (started_together(), rank()) == (started_together(), local_rank()) == found
