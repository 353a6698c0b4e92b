"""The machine a process runs on: how many cores it may use."""

import os
import sys


def cores() -> int:
    """Cores this process may use: a scheduler, or taskset, may leave it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
