"""Where a process runs: the cores it may use, and its place among those that torchrun has started with it."""

import os
import sys


def cores() -> int:
    """Cores this process may use: a scheduler, or taskset, may leave it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


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
