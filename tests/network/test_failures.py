"""What goes wrong between processes is said in one line that names the process, in time, and nothing is overwritten."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import manyheads

PROGRAM = Path(manyheads.__file__).with_name("__main__.py")
TRAIN = ("train", "deprl", "--workers", 5, "--model", "mlp:8", "--device", "cpu", "--threads", 1, "--quiet")


def output(started: list[Any]) -> list[str]:
    """All lines of processes that must have ended, in no order."""
    statuses = [process.status() for process in started]
    assert None not in statuses and 0 not in statuses, statuses
    return [line for process in started for line in process.text().splitlines()]


def only_line(started: list[Any]) -> str:
    """What processes that must have ended have said, which must be one line."""
    lines = output(started)
    assert len(lines) == 1, lines
    return lines[0]


def test_more_processes_than_workers(start_together, tmp_path: Path) -> None:
    started = start_together(3, PROGRAM, *TRAIN, "--workers", 2, "--out", tmp_path / "run")
    line = only_line(started)
    assert line.endswith("3 processes for 2 workers: start at most 2.")
    assert not (tmp_path / "run").exists()


SMALL = """
import os, sys
from manyheads import memory
from manyheads.cli import main

os.environ["LOCAL_WORLD_SIZE"] = sys.argv.pop(1)
memory.total = lambda: 20_000
sys.exit(main())
"""


def test_the_workers_of_all_processes_share_a_hosts_memory(start_together, tmp_path: Path) -> None:
    """Two copies of the rows of five workers take 24,400 bytes, of three 14,640."""
    (tmp_path / "small.py").write_text(SMALL)
    words = (*TRAIN, "--rounds", 1, "--out", tmp_path / "run")
    together = start_together(2, tmp_path / "small.py", 2, *words)
    assert "5 workers of this model need about 36.6 kB of memory" in only_line(together)
    assert not (tmp_path / "run").exists()
    for process in start_together(2, tmp_path / "small.py", 1, *words):
        assert process.status() == 0, process.text()


def test_processes_with_different_options(start_together, tmp_path: Path) -> None:
    started = start_together(2, PROGRAM, *TRAIN, "--out", tmp_path / "run", own={1: ["--seed", 2]})
    line = only_line(started)
    assert "process 1 was started with seed 2, process 0 with seed 1" in line
    assert not (tmp_path / "run").exists()


def test_every_machine_shows_the_line_once(start_together, tmp_path: Path) -> None:
    words = (*TRAIN, "--out", tmp_path / "run")
    started = start_together(3, PROGRAM, *words, own={2: ["--seed", 2]}, machines=(0, 0, 1))
    first, other = only_line(started[:2]), only_line(started[2:])
    assert first == other and "process 2 was started with seed 2, process 0 with seed 1" in first


def test_processes_with_different_data(start_together, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        x = np.random.default_rng(rank).normal(size=(60, 4))
        np.savez(tmp_path / str(rank) / "mine.npz", x=x, y=np.arange(60) % 3)
    words = ("--data", "mine.npz", "--out", tmp_path / "run")
    started = start_together(2, PROGRAM, *TRAIN, *words, folders=[tmp_path / "0", tmp_path / "1"])
    line = only_line(started)
    assert "process 1 does not have the same samples as process 0: give all processes the same data; to leave" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("held", [True, False])
def test_processes_whose_nets_begin_otherwise(start_together, tmp_path: Path, held: bool) -> None:
    """As where each reads a file of weights of its own."""
    lines = [
        "import os",
        "from torch import nn",
        "def net():",
        f"    first = nn.Linear(64, 6).requires_grad_({not held})",
        "    first.weight.data.mul_(1 + int(os.environ['RANK']) / 1000)",
        "    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 10))",
    ]
    (tmp_path / "pretrained.py").write_text("\n".join(lines))
    words = ("--model", "pretrained:net", "--out", tmp_path / "run")
    line = only_line(start_together(2, PROGRAM, *TRAIN, *words, folders=[tmp_path] * 2))
    assert (
        "the net of process 1 does not start from the same weights as that of process 0 (representation.1.weight"
        in line
    )
    assert not (tmp_path / "run").exists()


def test_processes_whose_nets_are_other_code(start_together, tmp_path: Path) -> None:
    """As where each site keeps a copy of its own: the weights that the nets begin with are the same."""
    for rank, activation in enumerate(("ReLU", "Tanh")):
        lines = [
            "from torch import nn",
            "def net():",
            f"    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.{activation}(), nn.Linear(5, 10))",
        ]
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "copied.py").write_text("\n".join(lines))
    words = ("--model", "copied:net", "--out", tmp_path / "run")
    folders = [tmp_path / "0", tmp_path / "1"]
    line = only_line(start_together(2, PROGRAM, *TRAIN, *words, folders=folders))
    assert line.endswith("process 1 does not have the same code in its model as process 0: give all of them the same.")
    assert not (tmp_path / "run").exists()


def test_a_process_with_a_single_worker_keeps_its_counters_of_batches(start_together, tmp_path: Path) -> None:
    lines = [
        "from torch import nn",
        "def net():",
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 10))",
    ]
    (tmp_path / "normed.py").write_text("\n".join(lines))
    words = ("--model", "normed:net", "--workers", 2, "--rounds", 1, "--out", tmp_path / "run")
    started = start_together(2, PROGRAM, *TRAIN, *words, folders=[tmp_path] * 2)
    assert [process.status() for process in started] == [0, 0], [process.text() for process in started]


def test_other_commands_are_for_one_process(start, tmp_path: Path) -> None:
    line = only_line([start(PROGRAM, "compare", "deprl", "--out", tmp_path / "runs", RANK=0, WORLD_SIZE=2)])
    assert line == "manyheads: only manyheads train runs in several processes: start this command without torchrun."
    assert not (tmp_path / "runs").exists()


def test_a_process_that_never_comes(start, tmp_path: Path) -> None:
    alone = {"RANK": 0, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    began = time.monotonic()
    line = only_line([start(PROGRAM, *TRAIN, "--timeout", 1, "--out", tmp_path / "run", **alone)])
    assert "processes 1, 2 of 3 did not join within 1 s" in line
    assert time.monotonic() - began < 60
    assert not (tmp_path / "run").exists()


def test_some_come_and_one_does_not(start_together, tmp_path: Path) -> None:
    words = (*TRAIN, "--timeout", 3, "--out", tmp_path / "run")
    line = only_line(start_together(3, PROGRAM, *words, ranks=(0, 2)))
    assert "process 1 of 3 did not join within 3 s" in line


def test_the_next_on_its_host_speaks_for_a_first_process_that_never_comes(start, tmp_path: Path) -> None:
    meeting = {"WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 9}
    words = (*TRAIN, "--timeout", 1, "--out", tmp_path / "run")
    line = only_line([start(PROGRAM, *words, RANK=rank, LOCAL_RANK=rank, **meeting) for rank in (1, 2)])
    assert "process 1 found no process 0 at 127.0.0.1:9 within 1 s" in line


def test_a_first_process_that_never_comes(start, tmp_path: Path) -> None:
    alone = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 9}
    line = only_line([start(PROGRAM, *TRAIN, "--timeout", 1, "--out", tmp_path / "run", **alone)])
    assert "process 1 found no process 0 at 127.0.0.1:9 within 1 s" in line


def test_a_folder_that_not_all_of_them_see(start_together, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    words = ("--timeout", 3, "--out", "run")
    started = start_together(2, PROGRAM, *TRAIN, *words, folders=[tmp_path / "0", tmp_path / "1"])
    line = only_line(started)
    assert "process 1 does not see what process 0 writes to run/checkpoint" in line


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_hangs_is_named(start_together, tmp_path: Path, rank: int) -> None:
    """Process 0 keeps the store: when it hangs, the others cannot ask it who is to speak."""
    words = ("--rounds", 500, "--timeout", 4, "--out", tmp_path / "run")
    started = start_together(3, PROGRAM, *TRAIN, *words)
    wait_for(lambda: rounds_done(tmp_path / "run") >= 2)
    os.kill(started[rank].process.pid, signal.SIGSTOP)
    line = only_line([started[other] for other in range(3) if other != rank])
    # Whoever had waited less finds that those who had waited long enough close the connection.
    assert f"process {rank} of 3 did not answer within 4 s" in line or f"process {rank} of 3 was lost" in line


def test_a_process_0_that_is_killed_is_named_once(start_together, tmp_path: Path) -> None:
    started = start_together(3, PROGRAM, *TRAIN, "--rounds", 500, "--timeout", 4, "--out", tmp_path / "run")
    wait_for(lambda: rounds_done(tmp_path / "run") >= 2)
    started[0].process.kill()
    line = only_line(started)
    assert "process 0 of 3 was lost" in line


BROKEN = """
import os
from torch import nn

class Broken(nn.Module):
    def forward(self, x):
        if os.environ["RANK"] == "1" and len(x) > 4:  # more than it is tried on
            raise ZeroDivisionError("of all things")
        return x

def net(input_shape, num_outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), Broken(), nn.Linear(8, num_outputs))
"""


def test_a_failure_of_the_users_code_is_one_line(start_together, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    words = ("--model", "broken:net", "--out", tmp_path / "run")
    started = start_together(2, PROGRAM, *TRAIN, *words, folders=[tmp_path] * 2)
    where = f"in round 1 of deprl your code fails in {tmp_path / 'broken.py'}, line 8"
    assert only_line(started) == f"manyheads (process 1): {where}: ZeroDivisionError: of all things"


OURS = """
import os, sys
from manyheads import rounds
from manyheads.cli import main

if os.environ["RANK"] == "1":
    rounds.checked_loss = None
sys.exit(main())
"""


def test_an_error_is_shown_whole_and_once(start_together, tmp_path: Path) -> None:
    program = tmp_path / "ours.py"
    program.write_text(OURS)
    started = start_together(4, program, *TRAIN, "--out", tmp_path / "run", machines=(0, 0, 1, 1))
    assert only_line(started[2:]) == "manyheads (process 1): TypeError: 'NoneType' object is not callable"
    text = "\n".join(output(started[:2]))
    assert text.count("TypeError: 'NoneType' object is not callable") == 1
    assert text.count("Traceback") == 1 and "in _rounds" in text
    assert "was lost" not in text


SLOW = """
import os, sys, time
from manyheads import snapshot
from manyheads.cli import main

def slow(path, sha256=snapshot.sha256):
    time.sleep(4 if os.environ["RANK"] == "1" else 0)
    return sha256(path)

snapshot.sha256 = slow
sys.exit(main())
"""


def test_damage_that_only_one_finds_and_a_slow_disk(start, start_together, tmp_path: Path) -> None:
    """Each process reads its own part of a checkpoint; all go on from the same one, and wait for each other."""
    plain, damaged, slow = tmp_path / "plain", tmp_path / "damaged", tmp_path / "slow.py"
    slow.write_text(SLOW)
    words = (*TRAIN, "--checkpoint-every", 1, "--timeout", 5)
    undisturbed = start(PROGRAM, *words, "--rounds", 6, "--out", plain)
    assert {process.status() for process in start_together(2, PROGRAM, *words, "--rounds", 4, "--out", damaged)} == {0}
    (last,) = damaged.glob("checkpoint/round-000004/rows-*-00004.safetensors")
    last.write_bytes(last.read_bytes()[:-1])
    for process in start_together(2, slow, *words, "--rounds", 6, "--out", damaged):
        assert process.status() == 0, process.text()
    note = f"checkpoint of round 4 is damaged (sha mismatch in {last.name}): continuing from round 3"
    assert note in json.loads((damaged / "summary.json").read_text())["notes"]
    assert undisturbed.status() == 0
    assert (plain / "models.safetensors").read_bytes() == (damaged / "models.safetensors").read_bytes()


# Under torchrun


@contextmanager
def torchrun(*words: object) -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, words)]
    with subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            yield process
        finally:
            process.terminate()


def wait_for(happened: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def rounds_done(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def child_of_rank(parent: int, rank: int) -> int:
    """The process that torchrun has started last for a rank."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            of_parent = f"\nPPid:\t{parent}\n" in (path / "status").read_text()
            if of_parent and f"\0RANK={rank}\0".encode() in (path / "environ").read_bytes():
                return int(path.name)
        except OSError:
            continue
    raise AssertionError(f"torchrun has no process of rank {rank}")


@pytest.mark.slow
def test_a_killed_process_costs_nothing_but_time(start, start_together, tmp_path: Path) -> None:
    """Three processes stopped, two that go on, one of them killed: the same bits as one process undisturbed."""
    plain, disturbed = tmp_path / "plain", tmp_path / "disturbed"
    words = (*TRAIN, "--rounds", 40, "--checkpoint-every", 4)
    undisturbed = start(PROGRAM, *words, "--out", plain)
    stopped = start_together(3, PROGRAM, *words, "--out", disturbed)
    wait_for(lambda: rounds_done(disturbed) >= 6)
    for process in stopped:
        process.process.kill()
    assert all(process.status() for process in stopped)
    begun = rounds_done(disturbed)
    assert 6 <= begun < 40
    program = ("-m", "manyheads", *words, "--out", disturbed)
    with torchrun("--standalone", "--nproc-per-node", 2, "--max-restarts", 2, *program) as going_on:
        wait_for(lambda: begun + 4 <= rounds_done(disturbed) < 40)
        os.kill(child_of_rank(going_on.pid, 1), signal.SIGKILL)
        text, _ = going_on.communicate(timeout=240)
    assert going_on.returncode == 0, text
    assert undisturbed.status() == 0, undisturbed.text()
    for name in ("models.safetensors", "workers.jsonl", "experiment.json"):
        assert (plain / name).read_bytes() == (disturbed / name).read_bytes()
    summary = json.loads((disturbed / "summary.json").read_text())
    assert summary["rounds"] == 40 and summary["runtime"]["processes"] == 2
    assert summary["bytes_on_wire"] > 0
