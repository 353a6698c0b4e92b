"""Local training on CPU cores: our engines against one module and one optimiser per worker, called in turn.

    python benchmarks/cpu.py [--workers 100] [--rounds 2] [--out benchmarks/records/cpu.json]

W1 = FedRep's local work (1 head epoch, 1 representation epoch), W2 = D-PSGD's (1 epoch), on Fashion-MNIST
(dirichlet:0.3, batch 16) with an MLP 784-200-100-10; a small convolutional net stands beside it. Evaluation is off.
Both sides run in one process, turn about; only the ratios mean something.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from manyheads.data import federate, load
from manyheads.data.shards import Shards
from manyheads.engine.batches import Source, as_index, plan
from manyheads.engine.choose import make_engine
from manyheads.engine.phase import SGD, Epochs, Phase, accuracy, cross_entropy, single_head
from manyheads.engine.workload import Workload
from manyheads.models import build
from manyheads.models.split import Split
from manyheads.randomness import torch_seed
from manyheads.tree import repeat

BATCH = 16
OPTIMISERS = {
    "plain SGD": SGD(lr=0.01),
    "momentum, decay, clip": SGD(lr=0.01, momentum=0.9, weight_decay=1e-5, clip=10.0),
}
HEAD, BODY, WHOLE = frozenset({"head"}), frozenset({"representation"}), frozenset({"head", "representation"})


@dataclass(frozen=True)
class Work:
    """One round's local phases."""

    name: str
    phases: tuple[tuple[str, frozenset[str]], ...]


WORKS = (Work("W1", (("head", HEAD), ("body", BODY))), Work("W2", (("body", WHOLE),)))


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
            here = self.train.rows(worker)
            index, y = self.train.index[here], self.train.y[here]
            for phase in phases(work, sgd):
                moving = [p for n, p in model.named_parameters() if n.split(".")[0] in phase.update]
                for p in model.parameters():
                    p.requires_grad_(False)
                for p in moving:
                    p.requires_grad_(True)
                optimiser = torch.optim.SGD(moving, lr=sgd.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay)
                for batch in plan(len(index), phase, self.source, worker=worker, round=number):
                    where = as_index(batch)
                    optimiser.zero_grad()
                    loss = nn.functional.cross_entropy(model(self.train.x[index[where]]), y[where])
                    loss.backward()
                    if sgd.clip is not None:
                        nn.utils.clip_grad_norm_(moving, sgd.clip)
                    optimiser.step()


def _copy(model: Split) -> Split:
    import copy

    return copy.deepcopy(model)


class Ours:
    """The same phases through an engine."""

    def __init__(self, name: str, workload: Workload, threads: int) -> None:
        self.engine = make_engine(name, workload, threads=threads)
        self.params = repeat({n: p.detach() for n, p in workload.model.named_parameters()}, len(workload.ids))

    def round(self, work: Work, sgd: SGD, number: int) -> None:
        for phase in phases(work, sgd):
            self.params = self.engine.fit(self.params, {}, phase, number).params


def seconds(run, *args) -> float:
    began = time.perf_counter()
    run(*args)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--nets", nargs="+", default=["mlp:200,100", "cnn"])
    parser.add_argument("--samples", type=int, default=None, help="use only so many train samples")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)

    data = load("fashion-mnist")
    federation = federate(data, workers=options.workers, split="dirichlet:0.3", seed=1)
    # The loader pads images to 32 x 32 for AlexNet; the MLP of the comparison reads the 28 x 28 inside.
    train = federation.train
    inside = train.x[:, :, 2:30, 2:30].contiguous()
    train = Shards(inside, train.index, train.y, train.offsets)
    cores = os.cpu_count() or 1
    rows = []
    for net in options.nets:
        small = net == "cnn"
        hosted = train.take(range(max(1, options.workers // 10))) if small else train
        with torch_seed(1):
            model = build(net, (1, 28, 28), 10, head=None, norm="shared")
        source = Source(1, BATCH, False)
        ids = tuple(range(hosted.num_workers))
        workload = Workload(model, hosted, ids, source, cross_entropy, accuracy)
        for optimiser, sgd in OPTIMISERS.items():
            for work in WORKS:
                sides = {"eager": EagerLoop(model, hosted, source)}
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
    if options.out:
        record = {
            "machine": platform.machine(),
            "cores": cores,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "date": time.strftime("%Y-%m-%d"),
            "workers": options.workers,
            "rows": rows,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
