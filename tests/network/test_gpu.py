"""Processes with GPUs: NCCL as far as one process goes, and processes that share one GPU."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]

_ALONE = """
import numpy as np, torch
import torch.distributed as dist
from manyheads.network.distributed import Distributed
from manyheads.network.in_process import InProcess
from manyheads.network.processes import Processes
from manyheads.topology import build_mixing

device = torch.device("cuda", 0)
torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
sent = torch.arange(5.0, device=device)
dist.broadcast(sent, 0)
dist.all_reduce(sent)
assert sent.tolist() == [0, 1, 2, 3, 4]
generator = torch.Generator(device).manual_seed(1)
shapes = {"a": (3, 2), "b": (7,)}
rows = {name: torch.randn(6, *shape, generator=generator, device=device) for name, shape in shapes.items()}
mask = {"a": (torch.rand(6, 3, 2, generator=generator, device=device) < 0.5).to(torch.uint8)}
rows["a"] *= mask["a"]
for graph in ("ring", "full"):
    mixing = build_mixing(graph, 6)
    processes = Processes(None, 0, 1, "one", 60.0, device)
    networks = [Distributed(mixing, frozenset(), processes, (range(6),)), InProcess(mixing, frozenset())]
    for call in (
        lambda network: network.mix(rows, 0),
        lambda network: network.mix(rows, 0, mask),
        lambda network: network.average(rows, np.arange(6.0)),
        lambda network: network.mean(rows),
        lambda network: {"gathered": network.gather(rows["b"])},
    ):
        ours, expected = (call(network) for network in networks)
        for name, leaf in expected.items():
            assert ours[name].device == device
            torch.testing.assert_close(ours[name], leaf)
dist.destroy_process_group()
"""


def environment(**more: object) -> dict[str, str]:
    return {**os.environ, "MANYHEADS_COMPILE": "0", **{name: str(value) for name, value in more.items()}}


def test_one_process_with_nccl() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ALONE], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_two_processes_share_a_gpu(tmp_path: Path) -> None:
    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))
        port = end.getsockname()[1]

    def start(out: str, **more: object) -> subprocess.Popen:
        words = ["--workers", "6", "--rounds", "2", "--precision", "float64", "--device", "cuda", "--quiet"]
        command = [sys.executable, "-m", "manyheads", "train", "deprl", *words, "--out", str(tmp_path / out)]
        return subprocess.Popen(command, env=environment(**more), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    shared = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [start("alone"), *(start("two", RANK=rank, LOCAL_RANK=rank, **shared) for rank in range(2))]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()[-2000:]
    alone, two = (load_file(tmp_path / out / "models.safetensors") for out in ("alone", "two"))
    for name, leaf in alone.items():
        torch.testing.assert_close(two[name], leaf, rtol=1e-9, atol=1e-9)
