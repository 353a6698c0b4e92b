"""How much memory this machine can give, and whether the workers' rows fit into it."""

from collections.abc import Iterator
from pathlib import Path

from manyheads.errors import UserError
from manyheads.tree import Params, nbytes
from manyheads.units import human_bytes

_SYSTEM = Path("/")
"""Where proc and sys are."""

LEAST_COPIES = 2
"""Copies of every worker's row that any run needs: as the round began, and as training or mixing makes it."""
_USUAL_COPIES = 3
"""One more while a checkpoint is written."""


def available() -> int | None:
    """Bytes that this machine can still give, within the limits of the control groups; None where it cannot say."""
    free = _numbers("proc/meminfo").get("MemAvailable")
    return None if free is None else max(0, min([free, *(limit - held for limit, held in _limits())]))


def total() -> int | None:
    """Bytes that this machine can give at the very most, its swap among them; None where it cannot say."""
    known = _numbers("proc/meminfo")
    if "MemTotal" not in known:
        return None
    return min([known["MemTotal"], *(limit for limit, _ in _limits())]) + known.get("SwapTotal", 0)


def check_memory(params: Params, num_workers: int, extra_rows: float) -> None:
    """Refuse more workers than this machine can ever hold the rows of, when they train on the CPU.

    ``params``: of any workers. ``extra_rows``: what the algorithm's state holds besides, in multiples of a row.
    """
    room, row = total(), nbytes(params) * (1 + extra_rows)
    if room is not None and num_workers * row * LEAST_COPIES > room:
        each = row * _USUAL_COPIES
        raise UserError(
            f"{num_workers} workers of this model need about {human_bytes(num_workers * each)} of memory and this "
            f"machine has {human_bytes(room)}, which is enough for about {int(room / each)}: lower --workers."
        )


def _limits() -> Iterator[tuple[int, int]]:
    """For every control group of this process: the bytes it may hold, and those it holds and cannot give back."""
    for line in _lines("proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names, old = "sys/fs/cgroup", ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):
            root, names, old = "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
        else:
            continue
        # The groups above it count too. In a container the path may be the host's, and only the root exists.
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            group = "/".join([root, *parts[:depth]])
            limit, held = (next(iter(_lines(f"{group}/{name}")), "") for name in names)
            if limit.isdecimal() and held.isdecimal():
                kinds = _numbers(f"{group}/memory.stat")
                files = sum(kinds.get(f"{old}{kind}_file", 0) for kind in ("active", "inactive"))
                yield int(limit), int(held) - files


def _numbers(path: str) -> dict[str, int]:
    """The bytes in a file with a name and a number in every line."""
    words = (line.split() for line in _lines(path))
    known = (line for line in words if len(line) > 1 and line[1].isdecimal())
    return {name.rstrip(":"): int(number) * (1024 if unit else 1) for name, number, *unit in known}


def _lines(path: str) -> list[str]:
    """The lines of one of the system's files; none if it does not exist."""
    try:
        return (_SYSTEM / path).read_text().splitlines()
    except OSError:
        return []
