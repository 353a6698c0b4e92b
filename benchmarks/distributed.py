"""Several processes against one: speed and the share of mixing on W1 and W2, and a model of many machines.

    python benchmarks/distributed.py [--workers 100] [--rounds 3] [--repeats 3] [--out FILE]

W1 = FedRep's round (1 head epoch, 1 representation epoch), W2 = D-PSGD's on a ring (1 epoch), on Fashion-MNIST
(dirichlet:0.3, batch 16) with an MLP 784-200-100-10, evaluation off. One single-threaded process and two take turns;
only ratios mean something, and only on a machine that does nothing else. The model takes the compute, latency and
bandwidth measured here, and the rows that really cross between 100 machines on graphs of 10,000 workers.
"""

import argparse
import itertools
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from manyheads.algorithms import DPSGD, Algorithm, FedRep
from manyheads.data import Dataset, load
from manyheads.experiment import Experiment, Runtime
from manyheads.network.meeting import join
from manyheads.network.placement import blocks, crossings, owners
from manyheads.rounds import run
from manyheads.session import open_session
from manyheads.topology import Rows, build_mixing
from manyheads.tree import nbytes, select

ALGORITHMS: dict[str, Algorithm] = {"W1": FedRep(head_epochs=1, body_epochs=1), "W2": DPSGD(epochs=1)}
NETWORKS = {
    "1 Gbit/s, 0.2 ms": (125e6, 2e-4),
    "10 Gbit/s, 0.05 ms": (1.25e9, 5e-5),
    "100 Mbit/s, 20 ms": (12.5e6, 2e-2),
}
"""Bytes per second and seconds per message, added to what is measured between processes of this machine."""


def fashion() -> Dataset:
    """Fashion-MNIST in 28 x 28, for the MLP of the comparison: the loader pads images to 32 x 32 for AlexNet."""
    data = load("fashion-mnist")
    inside = slice(2, 30)
    return replace(
        data,
        x_train=data.x_train[:, :, inside, inside].contiguous(),
        x_test=data.x_test[:, :, inside, inside].contiguous(),
    )


# What each process does


def child(work: str, workers: int, rounds: int) -> None:
    """Train; the first process prints the time of every round and of mixing in it, and the bytes of a row."""
    experiment = Experiment(
        algorithm=ALGORITHMS[work],
        data=fashion(),
        model="mlp:200,100",
        workers=workers,
        validation=0.0,
        rounds=rounds + 2,
        batch_size=16,
        lr=0.01,
        head_lr=0.01,
    )
    torch.set_num_threads(1)
    session = open_session(experiment, Runtime(device="cpu", threads=1, eval_every=10**9, timeout=300))
    network, processes = session.ctx.network, session.processes
    mixing: list[float] = []
    for name in ("mix", "average"):
        call = getattr(network, name)

        def timed(*args, call=call):
            # Waiting for processes that train longer is not part of mixing.
            processes.wait()
            began = time.perf_counter()
            result = call(*args)
            mixing.append(time.perf_counter() - began)
            return result

        setattr(network, name, timed)
    ends, work_ends = [], []
    steps = run(session)
    for _ in range(rounds + 1):
        next(steps)
        ends.append(time.perf_counter())
        work_ends.append(time.process_time())
    measured = {
        "seconds": [b - a for a, b in itertools.pairwise(ends)],
        "busy": [b - a for a, b in itertools.pairwise(work_ends)],
        "mixing": mixing[1:],
        "row": nbytes(select(session.ctx.initial.params, {"representation"})),
    }
    everywhere = processes.gather_json(measured)
    busiest = [max(busy) for busy in zip(*(other["busy"] for other in everywhere), strict=True)]
    if processes.rank == 0:
        print(json.dumps({**measured, "busy": busiest}))


def ping(size: int, times: int) -> None:
    """Print the median seconds that a message takes there and back between two processes."""
    import torch.distributed as dist

    processes = join(60, torch.device("cpu"))
    message, found = torch.zeros(size, dtype=torch.uint8), []
    for _ in range(times):
        began = time.perf_counter()
        for sender in (0, 1):
            (dist.send if processes.rank == sender else dist.recv)(message, 1 - processes.rank)
        found.append(time.perf_counter() - began)
    if processes.rank == 0:
        print(json.dumps(statistics.median(found)))


# What the first process does with the others


def start(count: int, *words: object):
    """Run this file in ``count`` processes; gives what the first of them prints."""
    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))
        port = end.getsockname()[1]
    children = []
    for rank in range(count):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": str(count)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, __file__, *map(str, words)]
        children.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in children]
    if any(process.returncode for process in children):
        raise SystemExit("a process failed")
    return json.loads(outputs[0].splitlines()[-1])


def compare(options: argparse.Namespace) -> list[dict[str, object]]:
    rows = []
    for work in ALGORITHMS:
        seconds: dict[int, list[float]] = {1: [], 2: []}
        busy: dict[int, list[float]] = {1: [], 2: []}
        share: list[float] = []
        for _ in range(options.repeats):
            for count in seconds:
                measured = start(count, "--child", work, "--workers", options.workers, "--rounds", options.rounds)
                seconds[count] += measured["seconds"]
                busy[count] += measured["busy"]
                if count == 2:
                    share += [m / s for m, s in zip(measured["mixing"], measured["seconds"], strict=True)]
        one, two = (statistics.median(seconds[count]) for count in (1, 2))
        alone, busier = (statistics.median(busy[count]) for count in (1, 2))
        mixing = statistics.median(share)
        print(
            f"{work}: one process {one:.2f} s, two {two:.2f} s a round: {one / two:.2f}x "
            f"({alone / busier:.2f}x in processor time of the busier one); mixing {mixing:.1%}",
            flush=True,
        )
        rows.append(
            {
                "work": work,
                "ratio": round(one / two, 2),
                "ratio_processor_time": round(alone / busier, 2),
                "mixing": round(mixing, 4),
                "seconds": round(alone, 3),
            }
        )
    return rows


def busiest_machine(matrix: Rows, owner: np.ndarray, machines: int) -> tuple[int, int]:
    """The most rows that a machine sends or receives in a round, and the most machines that one sends to."""
    destinations, senders = crossings(matrix, owner)
    origins = owner[senders]
    most = max(int(np.bincount(ends, minlength=machines).max()) for ends in (origins, destinations))
    partners = np.unique(origins * machines + destinations) // machines
    return most, int(np.bincount(partners, minlength=machines).max())


def model(seconds_per_worker: float, row: int) -> list[dict[str, object]]:
    """Time per round of 10,000 workers on 100 machines of 8 cores, from graphs, placement and the speed of links.

    A round is local training and then mixing. Mixing takes the busiest machine one message's latency for each of its
    partners, one after another, and the time of its rows on one link that carries both directions at once.
    """
    small, large = start(2, "--ping", 1000), start(2, "--ping", 50_000_000)
    networks = {"this machine": (2 * 5e7 / large, small / 2), **NETWORKS}
    workers, machines, cores = 10_000, 100, 8
    owner = owners(blocks([1] * workers, machines), workers)
    compute = workers / machines * seconds_per_worker / cores
    rows = []
    for graph in ("ring", "one-peer-exponential", "exponential", "random:0.002"):
        mixing = build_mixing(graph, workers, seed=1)
        rounds = [busiest_machine(mixing.rows(round), owner, machines) for round in range(mixing.period or 1)]
        for network, (bandwidth, latency) in networks.items():
            seconds = statistics.mean(partners * latency + sent * row / bandwidth for sent, partners in rounds)
            sent, partners = (round(statistics.mean(column), 1) for column in zip(*rounds, strict=True))
            efficiency = compute / (compute + seconds)
            rows.append(
                {
                    "graph": graph,
                    "network": network,
                    "rows": sent,
                    "partners": partners,
                    "compute": round(compute, 3),
                    "mixing": round(seconds, 4),
                    "efficiency": round(efficiency, 3),
                }
            )
            print(
                f"{graph:20} {network:20} {sent:6} rows, {partners:4} partners: "
                f"compute {compute:.2f} s + mixing {seconds:.3f} s = {efficiency:.1%} of perfect",
                flush=True,
            )
    rates = {name: {"bytes_per_second": round(b), "latency": lat} for name, (b, lat) in networks.items()}
    return [{"links": rates, "row_bytes": row}, *rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--ping", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.workers, options.rounds)
        return
    if options.ping:
        ping(options.ping, 10 if options.ping > 1_000_000 else 200)
        return
    load = round(os.getloadavg()[0], 1)
    speed = compare(options)
    border = len(crossings(build_mixing("ring", 128).rows(0), owners(blocks([1] * 128, 4), 128))[0])
    print(f"ring of 128 workers over 4 processes: {border} rows cross a border in a round")
    seconds = float(str(speed[0]["seconds"])) / options.workers
    row = start(1, "--child", "W1", "--workers", 4, "--rounds", 1)["row"]
    scaling = model(seconds, row)
    if options.out:
        record = {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "load_before": load,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "date": time.strftime("%Y-%m-%d"),
            "workers": options.workers,
            "speed": speed,
            "rows_crossing_ring_of_128_over_4": border,
            "scaling": scaling,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
