"""The same runs in one process and over two and three: the same bits, as many bytes as the graph says, no secrets sent.

Started with the environment that torchrun gives, this file trains every case; one start serves all checks.
"""

import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyheads.algorithms import DPSGD, REGISTRY, Algorithm, DePRL, DisPFL, FedAvg
from manyheads.algorithms.dispfl import SHARED
from manyheads.data import Dataset
from manyheads.data.arrays import from_workers
from manyheads.experiment import Experiment, Runtime
from manyheads.network.base import message_bytes
from manyheads.network.distributed import Distributed
from manyheads.network.placement import blocks
from manyheads.network.processes import Processes
from manyheads.randomness import torch_seed
from manyheads.rounds import run
from manyheads.session import Session, open_session
from manyheads.store import Run
from manyheads.topology import build_mixing
from manyheads.tree import Params, group, nbytes, strip_prefix

WORKERS, ROUNDS = 7, 3
COUNTS = (2, 3)


def points(num_tested: int = WORKERS) -> Dataset:
    """A handful of points for each worker, no two with the same number; the last have none for test."""
    rng = np.random.default_rng(0)
    sizes = [8 + 3 * worker % 10 for worker in range(WORKERS)]
    parts = [
        (rng.normal(size=(n, 6)), rng.integers(3, size=n), rng.normal(size=(t, 6)), rng.integers(3, size=t))
        for n, t in zip(sizes, [4] * num_tested + [0] * (WORKERS - num_tested), strict=True)
    ]
    return from_workers(parts, num_classes=3)


def normed() -> nn.Module:
    with torch_seed(0):
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 3))


def case(algorithm: Algorithm, **changes: Any) -> Experiment:
    small = {
        "data": points(),
        "model": "mlp:5",
        "split": "natural",
        "workers": WORKERS,
        "rounds": ROUNDS,
        "batch_size": 4,
    }
    return Experiment(algorithm=algorithm, **{**small, **changes})  # pyright: ignore[reportArgumentType]


CASES = {
    **{name: case(kind()) for name, kind in REGISTRY.items()},
    "random heads": case(DePRL(heads="random"), graph="random:0.5", precision="float64"),
    "mixing first": case(DePRL(order="mix-train"), graph="star"),
    "full": case(DePRL(), graph="full"),
    "time-varying": case(DePRL(), graph="one-peer-exponential", rounds=4),
    "redrawn": case(DePRL(), graph="random:0.4", redraw=True),
    "failing": case(DePRL(), graph="random:0.6", link_failure=0.3, worker_failure=0.2),
    "statistics": case(DPSGD(), model=normed(), graph="exponential"),
    "mean model": case(DPSGD(evaluate="mean-model"), graph="torus", workers=6, split="iid"),
    "masks on the full graph": case(DisPFL(density=0.9), graph="full"),
    "few masks on the full graph": case(DisPFL(density=0.1), graph="full", workers=3, split="iid"),
    "directed masks": case(DisPFL(), graph="in-neighbours:2", redraw=True, model=normed()),
    "half of them": case(FedAvg(participation=0.5), worker_failure=0.3, validation=0.2),
    "a process without test samples": case(DePRL(), data=points(num_tested=2)),
}
WITH_THEORY = ("deprl", "mixing first", "failing")
"""The cases whose terms of M(k) are measured too."""


def main(folder: Path) -> None:
    """What each process does."""
    train_cases(folder)
    spied(case(DePRL(), graph="random:0.5"), folder)


def train_cases(folder: Path) -> None:
    for number, (name, experiment) in enumerate(CASES.items()):
        theory_every = ROUNDS if name in WITH_THEORY else 0
        for _ in run(open_session(experiment, replace(runtime(folder / str(number)), theory_every=theory_every))):
            pass


def runtime(out: Path | None) -> Runtime:
    return Runtime(out=out, device="cpu", threads=1, checkpoint_every=2, timeout=120)


# What crosses the wire


def spied(experiment: Experiment, folder: Path) -> None:
    """Train while everything handed to torch.distributed is looked through for what must stay where it is."""
    session = open_session(experiment, runtime(None))
    private, shared, payloads = set[bytes](), set[bytes](), []
    for row in session.federation.train.x:
        private.add(content(row))
    watch_training(session, private, shared)
    for name in ("all_gather", "all_reduce", "broadcast"):
        watch(name, payloads)
    watch_exchange(payloads)
    for _ in run(session):
        pass
    assert payloads and shared
    leaked = sum(secret in payload for secret in private for payload in payloads)
    seen = sum(any(row in payload for payload in payloads) for row in shared)
    (folder / f"spy-{session.processes.rank}").write_text(f"{leaked} {seen} {len(private)}")


def watch_training(session: Session, private: set[bytes], shared: set[bytes]) -> None:
    """Note every row that local training has made."""
    engine: Any = session.ctx.engine
    fit = engine.fit

    def noted(*args: Any, **options: Any) -> Any:
        result = fit(*args, **options)
        for name, leaf in result.params.items():
            secret = group(name) in session.experiment.algorithm.private
            (private if secret else shared).update(content(row) for row in leaf)
        return result

    engine.fit = noted


def watch(name: str, payloads: list[bytes]) -> None:
    call: Callable[..., Any] = getattr(dist, name)

    def noted(*args: Any, **options: Any) -> Any:
        payloads.extend(content(tensor) for tensor in args if isinstance(tensor, Tensor))
        return call(*args, **options)

    setattr(dist, name, noted)


def watch_exchange(payloads: list[bytes]) -> None:
    call = dist.batch_isend_irecv

    def noted(operations: list[Any]) -> Any:
        payloads.extend(content(operation.tensor) for operation in operations if operation.op is dist.isend)
        return call(operations)

    dist.batch_isend_irecv = noted


def content(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


# The comparison


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, start_together: Any) -> dict[int, Path]:
    """The cases trained by one process, by two and by three: number of processes -> folder."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    made = {count: shared / f"over-{count}" for count in (1, *COUNTS)}
    with (shared / "over.lock").open("w") as lock:
        # Of several test processes the first trains for all.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "over.done").exists():
            train_all(made, start_together)
            (shared / "over.done").touch()
    return made


def train_all(made: dict[int, Path], start_together: Any) -> None:
    for folder in made.values():
        folder.mkdir()
    started = [process for count in COUNTS for process in start_together(count, __file__, made[count])]
    train_cases(made[1])
    assert all(process.status() == 0 for process in started), [process.text() for process in started]


@pytest.fixture(params=[(count, name) for count in COUNTS for name in CASES], ids=lambda both: f"{both[0]}-{both[1]}")
def pair(request: pytest.FixtureRequest, folders: dict[int, Path]) -> tuple[int, str, Path, Path]:
    """Number of processes, case, its folder from one process and from several."""
    count, name = request.param
    place = str(list(CASES).index(name))
    return count, name, folders[1] / place, folders[count] / place


def opened(name: str, folder: Path) -> Run:
    experiment = CASES[name]
    return Run.open(folder, data=experiment.data, model=experiment.model)


def test_the_state_is_the_same_to_the_bit(pair) -> None:
    _, name, one, several = pair
    a, b = opened(name, one).state(), opened(name, several).state()
    for mine, other in ((a.params, b.params), (a.buffers, b.buffers)):
        assert list(mine) == list(other)
        assert all(torch.equal(mine[leaf], other[leaf]) for leaf in mine)
    assert np.array_equal(a.sent, b.sent) and np.array_equal(a.received, b.received)
    assert (one / "models.safetensors").read_bytes() == (several / "models.safetensors").read_bytes()


def test_the_run_directory_is_the_same_to_the_bit(pair) -> None:
    _, name, one, several = pair
    of_the_machine = {"bytes_on_wire", "seconds", "peak_memory_bytes", "runtime"}
    # Heads never go through the network, so that round by round one process alone can compare them.
    alike = {"similarity_heads", "similarity_representations"}
    mine, others = (
        [
            *({name: row[name] for name in row.keys() - of_the_machine - alike} for row in run.metrics()),
            {name: value for name, value in (run.summary() or {}).items() if name not in of_the_machine},
        ]
        for run in (opened(name, one), opened(name, several))
    )
    assert mine == others
    assert not any(alike & row.keys() for row in opened(name, several).metrics())
    assert ("theory_m" in mine[-1]) == (name in WITH_THEORY)
    files = {path.name for path in one.iterdir()}
    assert files == {path.name for path in several.iterdir()}
    for file in files - {"metrics.jsonl", "summary.json", "checkpoint"}:
        assert (one / file).read_bytes() == (several / file).read_bytes(), file


def test_the_bytes_on_the_wire_follow_from_graph_and_placement(pair) -> None:
    count, name, one, several = pair
    assert opened(name, one).metrics()[-1]["bytes_on_wire"] == 0
    assert opened(name, several).metrics()[-1]["bytes_on_wire"] == sum(expected_bytes(name, one, count))


def expected_bytes(name: str, folder: Path, count: int) -> Iterator[int]:
    """Round by round, from P, from who is where, and from the size of a worker's message."""
    session = open_session(CASES[name], runtime(None))
    algorithm, workers = session.experiment.algorithm, session.experiment.workers
    state = opened(name, folder).state()
    sent: Params = {leaf: v for leaf, v in state.params.items() if group(leaf) not in algorithm.private | {SHARED}}
    statistics = {leaf: v for leaf, v in state.buffers.items() if v.is_floating_point()}
    mask = strip_prefix(state.params, SHARED)
    # Masks change from round to round, but never how much of a layer they keep.
    sizes = message_bytes(sent, mask) if sent else np.zeros(workers, dtype=int)
    of_the_sum = nbytes(sent) + nbytes({name: sent[name] for name in mask})
    placement = blocks(session.everyone.train.sizes, count)
    home = [next(rank for rank in range(count) if worker in placement[rank]) for worker in range(workers)]
    for round in range(session.ctx.rounds):
        matrix = session.mixing.rows(round).dense()
        if algorithm.exchange == "server" or (sent and (matrix == matrix[0]).all() and 2 * of_the_sum < sizes.sum()):
            yield count * (of_the_sum + nbytes(statistics))
            continue
        crossing = {(worker, home[hearer]) for hearer, worker in zip(*np.nonzero(matrix), strict=True)}
        crossing = [worker for worker, process in crossing if home[worker] != process]
        yield sum(int(sizes[worker]) + nbytes(statistics) for worker in crossing)


def test_of_nothing_nothing_is_sent() -> None:
    """As of the representation of a net that is all head."""
    alone = Processes(None, 0, 1, "start", 60, torch.device("cpu"))
    network = Distributed(build_mixing("ring", WORKERS), frozenset(), alone, [range(WORKERS)])
    assert network.mix({}, 0) == network.average({}, np.ones(WORKERS)) == {}
    assert not network.traffic.sent.any()


def test_a_worker_that_no_process_hosts_counts_in_nothing() -> None:
    """As one whose site is away: its share of an average goes to the others, and what it has is not known."""
    alone = Processes(None, 0, 1, "0", 1.0, torch.device("cpu"))
    network = Distributed(build_mixing("full", 3), frozenset(), alone, (range(2),))
    params = {"head.w": torch.tensor([[1.0], [3.0]])}
    assert network.average(params, np.array([1.0, 3.0, 96.0]))["head.w"].tolist() == [[2.5], [2.5]]
    assert network.mean(params)["head.w"].tolist() == [2.0]
    torch.testing.assert_close(
        network.gather(torch.tensor([1.0, 3.0])), torch.tensor([1.0, 3.0, torch.nan]), equal_nan=True
    )
    assert network.gather(torch.tensor([1, 3])).tolist() == [1, 3, 0]


def test_no_mean_over_all_is_taken_of_what_belongs_to_several() -> None:
    alone = Processes(None, 0, 1, "0", 1.0, torch.device("cpu"))
    network = Distributed(build_mixing("full", 2), frozenset(), alone, (range(2),), one_owner=False)
    with pytest.raises(RuntimeError, match="would show rows to those who are not neighbours"):
        network.mean({"head.w": torch.ones(2, 1)})


def test_a_site_alone_puts_nothing_on_the_wire() -> None:
    params = {"representation.a": torch.arange(6.0).view(3, 2)}
    placement, alone = (range(3),), Processes(None, 0, 1, "start", 60, torch.device("cpu"))
    network = Distributed(build_mixing("full", 3), frozenset(), alone, placement, one_owner=False)
    for found in (network.mix(params, 0), network.average(params, np.ones(3))):
        assert found["representation.a"].tolist() == [[2, 3]] * 3
    assert network.traffic.on_wire == 0 and network.traffic.sent.all()


@pytest.mark.parametrize("count", COUNTS)
def test_neither_a_head_nor_a_sample_is_sent(folders: dict[int, Path], count: int) -> None:
    for rank in range(count):
        leaked, seen, secrets = map(int, (folders[count] / f"spy-{rank}").read_text().split())
        assert leaked == 0 and secrets > 10
        assert seen > 0, "the spy sees what is meant to be sent"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
