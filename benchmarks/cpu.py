"""What the engines are worth on CPU cores, what many workers take in memory, and what the package adds to an import.

    python benchmarks/cpu.py [--sections memory imports speed algorithms] [--out benchmarks/records/cpu.json]

Speed: our engines against one module and one optimiser per worker, called in turn. W1 = FedRep's local work (1 head
epoch, 1 representation epoch), W2 = D-PSGD's (1 epoch), on Fashion-MNIST (dirichlet:0.3, batch 16) with an MLP
784-200-100-10; a small convolutional net stands beside it. Evaluation is off. Both sides run in one process, turn
about; only the ratios mean something. Memory: two rounds of DePRL with 1,000 workers of that MLP, evaluated and kept.
Algorithms: whole rounds of each, with the recipe's settings, against those of local training. Imports: what follows
``import torch`` in a fresh interpreter. A later call with other sections adds to the record.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from manyheads import DePRL, Experiment, Runtime, train
from manyheads.algorithms import REGISTRY
from manyheads.algorithms.phases import HEAD, REPRESENTATION, WHOLE
from manyheads.data import Dataset, federate, load
from manyheads.data.shards import Shards
from manyheads.engine.batches import Source
from manyheads.engine.choose import make_engine
from manyheads.engine.phase import SGD, EngineName, Epochs, Phase, accuracy, cross_entropy, single_head
from manyheads.engine.schedule import schedule
from manyheads.engine.workload import Workload
from manyheads.models import build
from manyheads.models.split import Split
from manyheads.randomness import torch_seed
from manyheads.rounds import run
from manyheads.session import open_session
from manyheads.threads import Threads
from manyheads.tree import repeat

BATCH = 16
OPTIMISERS = {
    "plain SGD": SGD(lr=0.01),
    "momentum, decay, clip": SGD(lr=0.01, momentum=0.9, weight_decay=1e-5, clip=10.0),
}


@dataclass(frozen=True)
class Work:
    """One round's local phases."""

    name: str
    phases: tuple[tuple[str, frozenset[str]], ...]


WORKS = (Work("W1", (("head", HEAD), ("body", REPRESENTATION))), Work("W2", (("body", WHOLE),)))


def phases(work: Work, sgd: SGD) -> list[Phase]:
    return [Phase(stream, update, Epochs(1), sgd, single_head(cross_entropy)) for stream, update in work.phases]


class EagerLoop:
    """What other simulators do: a module and a torch.optim.SGD per worker and phase, worker after worker."""

    def __init__(self, model: Split, train: Shards, source: Source) -> None:
        self.train, self.source = train, source
        with torch_seed(1):
            self.modules = [nn.ModuleDict({"m": _copy(model)}) for _ in range(train.num_workers)]

    def round(self, work: Work, sgd: SGD, number: int) -> None:
        for worker, holder in enumerate(self.modules):
            model = holder["m"]
            model.train()
            for phase in phases(work, sgd):
                moving = [p for n, p in model.named_parameters() if n.split(".")[0] in phase.update]
                for p in model.parameters():
                    p.requires_grad_(False)
                for p in moving:
                    p.requires_grad_(True)
                optimiser = torch.optim.SGD(moving, lr=sgd.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay)
                batches = schedule(self.train, [worker], range(len(self.modules)), phase, self.source, number)
                for padded, count in zip(batches.entries, batches.counts, strict=True):
                    entries = torch.from_numpy(padded[:count])
                    optimiser.zero_grad()
                    outputs = model(self.train.x[self.train.index[entries]])
                    loss = nn.functional.cross_entropy(outputs, self.train.y[entries])
                    loss.backward()
                    if sgd.clip is not None:
                        nn.utils.clip_grad_norm_(moving, sgd.clip)
                    optimiser.step()


def _copy(model: Split) -> Split:
    import copy

    return copy.deepcopy(model)


class Ours:
    """The same phases through an engine."""

    def __init__(self, name: EngineName, workload: Workload, threads: int) -> None:
        self.engine = make_engine(name, workload, threads=Threads(threads))
        self.params = repeat({n: p.detach() for n, p in workload.model.named_parameters()}, len(workload.ids))

    def round(self, work: Work, sgd: SGD, number: int) -> None:
        for phase in phases(work, sgd):
            self.params = self.engine.fit(self.params, {}, phase, number).params


def seconds(run: Callable[..., object], *args: object) -> float:
    began = time.perf_counter()
    run(*args)
    return time.perf_counter() - began


def fashion() -> Dataset:
    """Fashion-MNIST in 28 x 28, for the MLP of the comparison: the loader pads images to 32 x 32 for AlexNet."""
    data = load("fashion-mnist")
    inner = (..., slice(2, 30), slice(2, 30))
    return replace(data, x_train=data.x_train[inner].contiguous(), x_test=data.x_test[inner].contiguous())


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """The ratio of every engine to the eager loop, by net, optimiser and work."""
    torch.set_num_threads(1)
    shards = federate(fashion(), workers=options.workers, split="dirichlet:0.3", seed=1).train
    cores = os.cpu_count() or 1
    rows = []
    for net in options.nets:
        small = net == "cnn"
        hosted = shards.take(range(max(1, options.workers // 10))) if small else shards
        with torch_seed(1):
            model = build(net, (1, 28, 28), 10, head=None, norm="shared")
        source = Source(1, BATCH, False)
        ids = tuple(range(hosted.num_workers))
        workload = Workload(model, hosted, ids, source, cross_entropy, accuracy)
        for optimiser, sgd in OPTIMISERS.items():
            for work in WORKS:
                sides: dict[str, EagerLoop | Ours] = {"eager": EagerLoop(model, hosted, source)}
                for engine in ("loop", "batched"):
                    for threads in sorted({1, cores}):
                        sides[f"{engine}, {threads} thread{'s' * (threads > 1)}"] = Ours(engine, workload, threads)
                times = {name: [] for name in sides}
                for number in range(options.rounds + 1):
                    for name, side in sides.items():
                        spent = seconds(side.round, work, sgd, number)
                        if number:
                            times[name].append(spent)
                median = {name: statistics.median(t) for name, t in times.items()}
                picked = make_engine("auto", workload).name
                for name, value in median.items():
                    ratio = median["eager"] / value
                    rows.append(
                        {"net": net, "optimiser": optimiser, "work": work.name, "side": name, "ratio": round(ratio, 2)}
                    )
                    mark = " <- auto" if name.startswith(picked) and str(cores) in name else ""
                    print(
                        f"{net:12} {optimiser:22} {work.name} {name:20} {value:7.2f} s {ratio:6.2f}x{mark}", flush=True
                    )
    return {"workers": options.workers, "rows": rows}


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """The peak memory of a fresh process that trains many workers, compared with their weights alone."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        found = fresh.submit(train_many, options.many).result()
    gib = found["peak_bytes"] / 2**30
    print(f"{options.many} workers: {gib:.2f} GiB, {found['ratio']} times their weights (target: 3 GiB)", flush=True)
    return found


def train_many(workers: int) -> dict[str, Any]:
    """Two rounds of DePRL through the public interface, with a run directory."""
    experiment = Experiment(
        algorithm=DePRL(), data=fashion(), model="mlp:200,100", workers=workers, split="dirichlet:0.3", rounds=2
    )
    with TemporaryDirectory() as folder:
        *_, last = train(experiment, Runtime(device="cpu", out=Path(folder, "run")))
    model = build("mlp:200,100", (1, 28, 28), 10)
    weights = 4 * workers * sum(p.numel() for p in model.parameters())
    peak = last.peak_memory_bytes
    return {"workers": workers, "peak_bytes": peak, "weights_bytes": weights, "ratio": round(peak / weights, 2)}


def algorithms(options: argparse.Namespace) -> dict[str, Any]:
    """The median time of a round of each algorithm, mixing included, in multiples of a round of local training."""
    rounds = options.rounds + 2
    sides = {}
    for name, kind in REGISTRY.items():
        experiment = Experiment(
            algorithm=kind(),
            data=fashion(),
            model="mlp:200,100",
            workers=options.workers,
            split="dirichlet:0.3",
            rounds=rounds,
        )
        sides[name] = run(open_session(experiment, Runtime(device="cpu", eval_every=rounds)))
    times: dict[str, list[float]] = {name: [] for name in sides}
    # Leaves out the first round, which warms up, and the last, which is evaluated.
    for number in range(rounds - 1):
        for name, steps in sides.items():
            spent = seconds(next, steps)
            if number:
                times[name].append(spent)
    ratios = {name: statistics.median(found) / statistics.median(times["local"]) for name, found in times.items()}
    for name, ratio in ratios.items():
        print(f"a round of {name:8} {ratio:5.2f} times one of local training", flush=True)
    return {"workers": options.workers, "times_local": {name: round(ratio, 2) for name, ratio in ratios.items()}}


IMPORTS = ("import manyheads", "from manyheads import Experiment, train")


def imports(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds that each import takes after torch's, in fresh interpreters that take turns; medians.

    Processor time, as other work on the machine hardly changes it, and an import waits for nothing else.
    """
    # With bytecode, as an installed package has it: the first turn writes it and does not count.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    times: dict[str, list[float]] = {what: [] for what in IMPORTS}
    for turn in range(options.repeats + 1):
        for what, found in times.items():
            code = f"import time, torch; began = time.process_time(); {what}; print(time.process_time() - began)"
            ran = subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
            )
            if turn:
                found.append(float(ran.stdout))
    medians = {what: round(statistics.median(found), 3) for what, found in times.items()}
    for what, value in medians.items():
        print(f"{what:40} {value:.3f} s after torch (target: 0.3 s)", flush=True)
    return {"repeats": options.repeats, "seconds_after_torch": medians}


SECTIONS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    # Memory first: a process inherits the peak of the one that started it.
    "memory": memory,
    "imports": imports,
    "speed": speed,
    "algorithms": algorithms,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--workers", type=int, default=100, help="of the speed and algorithms sections")
    parser.add_argument("--rounds", type=int, default=2, help="of the speed and algorithms sections")
    parser.add_argument("--nets", nargs="+", default=["mlp:200,100", "cnn"], help="of the speed section")
    parser.add_argument("--many", type=int, default=1000, help="workers of the memory section")
    parser.add_argument("--repeats", type=int, default=7, help="of the imports section")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    record = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    record |= {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for name in SECTIONS:
        if name in options.sections:
            record[name] = {"date": time.strftime("%Y-%m-%d"), **SECTIONS[name](options)}
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
