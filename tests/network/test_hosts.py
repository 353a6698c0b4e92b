"""Three hosts, each a network namespace of its own: links are cut in the middle of a run, and those left recover."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import manyheads

PROGRAM = Path(manyheads.__file__).with_name("__main__.py")
TRAIN = ("train", "deprl", "--workers", 6, "--model", "mlp:8", "--device", "cpu", "--threads", 1, "--quiet")
ROUNDS = 50
REST = ("--graph", "random:0.5", "--rounds", ROUNDS, "--checkpoint-every", 4, "--timeout", 5)
HOSTS = 3
MEETING_PLACE = 1
"""The host that must stay. Process 0 is on the first in the order of addresses."""
PORT = 29411


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def remove(*words: str) -> None:
    """``ip``, for what may have gone by itself."""
    subprocess.run(["ip", *words], check=False, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Names of namespaces joined by a bridge; host k has the address 10.77.0.(k + 1) on the device ``eth``."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command (Debian: iproute2)")
    mark = f"mh{os.getpid() % 10_000}"
    names, bridge = [f"{mark}h{k}" for k in range(HOSTS)], f"{mark}br"
    with ExitStack() as stack:
        try:
            ip("link", "add", bridge, "type", "bridge")
            stack.callback(remove, "link", "del", bridge)
            ip("link", "set", bridge, "up")
            for k, name in enumerate(names):
                ip("netns", "add", name)
                stack.callback(remove, "netns", "del", name)
                ip("link", "add", f"{mark}v{k}", "type", "veth", "peer", "name", "eth", "netns", name)
                stack.callback(remove, "link", "del", f"{mark}v{k}")
                ip("link", "set", f"{mark}v{k}", "master", bridge, "up")
                for command in (("addr", "add", f"10.77.0.{k + 1}/24", "dev", "eth"), ("link", "set", "eth", "up")):
                    ip("-n", name, *command)
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
        yield names


def torchrun(host: str, number: int, out: Path, log: Path) -> subprocess.Popen[bytes]:
    """A host's part of the run."""
    meeting = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=4"
    options = (
        *("--nnodes", f"1:{HOSTS}", "--nproc-per-node", 1, "--max-restarts", 3),
        *(
            "--rdzv-backend",
            "manyheads",
            "--rdzv-endpoint",
            f"10.77.0.{MEETING_PLACE + 1}:{PORT}",
            "--rdzv-id",
            "hosts",
        ),
        *("--rdzv-conf", meeting),
    )
    program = (sys.executable, "-m", "torch.distributed.run", *options, "-m", "manyheads", *TRAIN, *REST, "--out", out)
    temporary = log.with_suffix(".tmp")
    temporary.mkdir()
    env = {
        **os.environ,
        "TMPDIR": str(temporary),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
    }
    command = ["ip", "netns", "exec", host, *map(str, program)]
    with log.open("wb") as file:
        return subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


@pytest.mark.slow
def test_hosts_whose_links_are_cut(hosts: list[str], start, tmp_path: Path) -> None:
    """One host after another, that of process 0 too, until the one where they meet is left."""
    plain, cut = tmp_path / "plain", tmp_path / "cut"
    undisturbed = start(PROGRAM, *TRAIN, *REST, "--out", plain)
    logs = [tmp_path / f"log-{number}" for number in range(HOSTS)]
    with ExitStack() as stack:
        running = []
        for number, host in enumerate(hosts):
            running.append(torchrun(host, number, cut, logs[number]))
            stack.callback(end, running[-1])

        def cut_off(number: int, after: int) -> None:
            lines, deadline = cut / "metrics.jsonl", time.monotonic() + 180
            while not (lines.exists() and lines.read_bytes().count(b"\n") >= after):
                assert time.monotonic() < deadline and running[MEETING_PLACE].poll() is None, texts(logs)
                time.sleep(0.02)
            ip("-n", hosts[number], "link", "set", "eth", "down")
            assert lines.read_bytes().count(b"\n") < ROUNDS

        cut_off(2, after=6)
        cut_off(0, after=20)
        assert running[MEETING_PLACE].wait(180) == 0, texts(logs)
    here, first, second = (logs[number].read_text(errors="replace") for number in (MEETING_PLACE, 2, 0))
    assert "process 2 of 3 did not answer within 5 s" in here + second
    assert "process 0 of 2 did not answer within 5 s" in here
    # Cut off as they are, those processes end too, and say why; their torchruns wait for the network to come back.
    assert "of 3 did not answer within 5 s" in first and "process 1 of 2 did not answer within 5 s" in second
    assert "terminate called" not in texts(logs)
    assert undisturbed.status() == 0
    for name in ("models.safetensors", "workers.jsonl", "experiment.json"):
        assert (plain / name).read_bytes() == (cut / name).read_bytes()


def end(process: subprocess.Popen[bytes]) -> None:
    """torchrun ends what it has started before it ends itself."""
    process.terminate()
    process.wait(60)


def texts(logs: list[Path]) -> str:
    return "\n".join(log.read_text(errors="replace") for log in logs)
