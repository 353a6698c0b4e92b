"""Where a process runs: the cores it may use, homes in its paths, its place among those that torchrun has started."""

import os
import sys
from pathlib import Path

from manyheads.errors import UserError


def cores() -> int:
    """Cores this process may use: a scheduler, or taskset, may leave it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def expanded(path: str | Path) -> Path:
    """A path with the home that its ~ stands for; a slash forgotten after it names a user who does not exist."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path} begins with nobody's home: write ~/ for your own, or the whole path.") from None


def started_together() -> bool:
    """Whether torchrun, or whoever sets the same environment, has started this process beside others."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def rank() -> int:
    """This process's number among all; 0 alone, and where the environment holds no number."""
    return _number("RANK")


def local_rank() -> int:
    """The same among the processes on this host."""
    return _number("LOCAL_RANK")


def _number(name: str) -> int:
    given = os.environ.get(name, "0") if started_together() else "0"
    return int(given) if given.isdecimal() else 0
