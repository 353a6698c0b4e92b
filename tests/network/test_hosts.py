"""Three hosts, each a network namespace of its own: one's link is cut in the middle of a run, the others recover."""

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
REST = ("--graph", "random:0.5", "--rounds", 80, "--checkpoint-every", 4, "--timeout", 5)
HOSTS = 3
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


def torchrun(host: str, number: int, meeting_place: int, out: Path, log: Path) -> subprocess.Popen[bytes]:
    """A host's part of the run."""
    is_host = int(number == meeting_place)
    meeting = f"is_host={is_host},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=4"
    options = (
        *("--nnodes", f"1:{HOSTS}", "--nproc-per-node", 1, "--max-restarts", 3),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"10.77.0.{meeting_place + 1}:{PORT}", "--rdzv-id", "hosts"),
        *("--rdzv-conf", meeting, "--local-addr", f"10.77.0.{number + 1}"),
    )
    program = (sys.executable, "-m", "torch.distributed.run", *options, "-m", "manyheads", *TRAIN, *REST, "--out", out)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth",
        # Else torchrun goes on asking the store of a first host that is gone.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    command = ["ip", "netns", "exec", host, *map(str, program)]
    with log.open("wb") as file:
        return subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


@pytest.mark.slow
@pytest.mark.parametrize(("meeting_place", "cut_off"), [(0, 2), (1, 0)])
def test_a_host_whose_link_is_cut(hosts: list[str], start, tmp_path: Path, meeting_place: int, cut_off: int) -> None:
    """Any host but the one where they meet; the first in the order of addresses has process 0."""
    plain, cut = tmp_path / "plain", tmp_path / "cut"
    undisturbed = start(PROGRAM, *TRAIN, *REST, "--out", plain)
    logs = [tmp_path / f"log-{number}" for number in range(HOSTS)]
    with ExitStack() as stack:
        running = []
        for number, host in enumerate(hosts):
            running.append(torchrun(host, number, meeting_place, cut, logs[number]))
            stack.callback(end, running[-1])
        lines = cut / "metrics.jsonl"
        deadline = time.monotonic() + 180
        while not (lines.exists() and lines.read_bytes().count(b"\n") >= 10):
            assert time.monotonic() < deadline and None in [process.poll() for process in running], texts(logs)
            time.sleep(0.02)
        ip("-n", hosts[cut_off], "link", "set", "eth", "down")
        assert lines.read_bytes().count(b"\n") < 80
        for number, process in enumerate(running):
            assert number == cut_off or process.wait(180) == 0, texts(logs)
    assert f"process {cut_off} of 3 did not answer within 5 s" in texts(logs)
    # Cut off as it is, that process ends too, and says why; its torchrun waits for the network to come back.
    assert "of 3 did not answer within 5 s" in logs[cut_off].read_text()
    assert undisturbed.status() == 0
    for name in ("models.safetensors", "workers.jsonl", "experiment.json"):
        assert (plain / name).read_bytes() == (cut / name).read_bytes()


def end(process: subprocess.Popen[bytes]) -> None:
    """torchrun ends what it has started before it ends itself."""
    process.terminate()
    process.wait(60)


def texts(logs: list[Path]) -> str:
    return "\n".join(log.read_text(errors="replace") for log in logs)
