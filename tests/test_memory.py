"""What machine and control groups leave, and rows that can never fit."""

from pathlib import Path

import pytest
import torch

from manyheads import memory
from manyheads.errors import UserError

MEMINFO = """MemTotal:       64000000 kB
MemFree:         1000000 kB
MemAvailable:   50000000 kB
SwapTotal:       8000000 kB
HugePages_Total:       0
"""


@pytest.mark.parametrize(
    ("files", "free", "most"),
    [
        ({}, 50_000, 72_000),
        # Version 2: the group's own limit, less what it holds beside files that can be dropped.
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/step/memory.max": 30_000,
                "sys/fs/cgroup/job/step/memory.current": 9_000,
                "sys/fs/cgroup/job/step/memory.stat": {"anon": 4_000, "inactive_file": 3_000, "active_file": 2_000},
            },
            26_000,
            38_000,
        ),
        # Its group has no limit, the one above has.
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/step/memory.max": "max",
                "sys/fs/cgroup/job/step/memory.current": 1_000,
                "sys/fs/cgroup/job/memory.max": 20_000,
                "sys/fs/cgroup/job/memory.current": 21_000,
            },
            0,
            28_000,
        ),
        # Version 1 in a container, whose root is a group that has another path on the host.
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/docker/a:b\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": 10_000,
                "sys/fs/cgroup/memory/memory.usage_in_bytes": 6_000,
                "sys/fs/cgroup/memory/memory.stat": {"inactive_file": 1, "total_inactive_file": 2_000},
            },
            6_000,
            18_000,
        ),
        # A limit above what the machine has.
        (
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": 9 * 10**9,
                "sys/fs/cgroup/memory/memory.usage_in_bytes": 6_000,
            },
            50_000,
            72_000,
        ),
    ],
)
def test_the_least_of_machine_and_groups_counts(
    files: dict, free: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers in thousands of kilobytes, as they are in the groups' files in bytes."""
    unit = 1_024_000
    monkeypatch.setattr(memory, "_SYSTEM", tmp_path)
    for name, content in {"proc/meminfo": MEMINFO, **files}.items():
        if isinstance(content, dict):
            content = "".join(f"{kind} {number * unit}\n" for kind, number in content.items())
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content * unit}\n" if isinstance(content, int) else content)
    assert (memory.available(), memory.total()) == (free * unit, most * unit)


def test_a_machine_that_cannot_say_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_SYSTEM", tmp_path)
    assert memory.available() is None and memory.total() is None
    memory.check_memory({"w": torch.ones(1, 10)}, 10**12, 0.0)


def test_rows_that_can_never_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"head.w": torch.ones(1, 250_000).expand(4, -1)}
    monkeypatch.setattr(memory, "total", lambda: 6 * 10**9)
    memory.check_memory(params, 3_000, 0.0)
    with pytest.raises(
        UserError, match=r"^3001 workers of this model need about 9\.0 GB of memory and this machine has 6\.0 GB,"
    ):
        memory.check_memory(params, 3_001, 0.0)
    with pytest.raises(UserError, match=r"which is enough for about 1000: lower --workers\.$"):
        memory.check_memory(params, 1_501, 1.0)
