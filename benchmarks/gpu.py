"""Local training on one GPU: our engine, one module and one optimiser per worker called in turn, and two lower bounds.

    python benchmarks/gpu.py [--sections ceilings,agreement,...] [--works dnn,vgg11,...] [--budget-seconds 540]

One call checks and times everything; the record is written after every figure, and a later call with other sections
adds to it. ``--smoke`` runs all of it in tiny sizes on a CPU. Bounds: six passes over all weights at the measured
bandwidth, and the products of forward and backward at the measured matrix rate.
"""

import argparse
import copy
import gc
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyheads import host_memory
from manyheads.algorithms import REGISTRY, DePRL
from manyheads.algorithms.phases import HEAD, REPRESENTATION, WHOLE
from manyheads.data.dataset import Dataset
from manyheads.data.shards import Shards
from manyheads.engine.batches import Source
from manyheads.engine.choose import FILLED
from manyheads.engine.cuda_graphs import CudaGraphsEngine, forward
from manyheads.engine.cuda_graphs.footprint import footprint_of
from manyheads.engine.cuda_graphs.memory_plan import choose_slots, plan_memory, settle, stacks_images
from manyheads.engine.local import LocalEngine
from manyheads.engine.loop import LoopKernel
from manyheads.engine.phase import (
    SGD,
    Engine,
    Epochs,
    Fit,
    Phase,
    PrecisionName,
    Steps,
    accuracy,
    cross_entropy,
    single_head,
)
from manyheads.engine.precision import Precision
from manyheads.engine.workload import Workload
from manyheads.experiment import Experiment, Runtime
from manyheads.models import build
from manyheads.models.nets import NETS
from manyheads.models.norm import has_batchnorm
from manyheads.randomness import torch_seed
from manyheads.session import open_session
from manyheads.threads import Threads
from manyheads.tree import Buffers, Params, repeat

RECIPE, PLAIN = SGD(0.01, 0.9, 1e-5, 10.0), SGD(0.01)
OBJECTIVE = single_head(cross_entropy)


@dataclass(frozen=True)
class Work:
    """One line of the table."""

    net: str
    input_shape: tuple[int, ...]
    num_classes: int
    batch_size: int
    steps: int
    """Steps in one timed call."""
    precisions: tuple[PrecisionName, ...]
    seconds: float = 30
    """How long the line may take: it is not begun if less time is left."""


WORKS = {
    "dnn": Work("dnn", (900,), 5, 16, 50, ("tf32",)),
    "vgg11": Work("vgg11", (3, 32, 32), 10, 16, 25, ("bf16", "tf32")),
    "alexnet": Work("alexnet", (1, 32, 32), 10, 16, 10, ("bf16",)),
    "resnet18": Work("resnet18", (3, 32, 32), 100, 128, 4, ("bf16", "tf32"), 100),
}
SMALL_GPU = 24_000_000_000
"""Bytes of the smaller GPU that the memory section imitates on a larger one."""
COMPILE_PARTS = (
    "_compile.compile_inner",
    "bytecode_tracing",
    "create_aot_dispatcher_function",
    "compile_fx_inner",
    "GraphLowering.run",
    "GraphLowering.codegen",
    "async_compile.wait",
    "backward._backward_impl",
)


class Bench:
    """The record, the clock and the sizes that all sections share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.out: Path = options.out
        self.end = time.perf_counter() + options.budget_seconds
        self.smoke: bool = options.smoke
        self.workers = 5 if self.smoke else 128
        self.samples = 64 if self.smoke else 20_000
        self.works = {name: work for name, work in WORKS.items() if name in options.works}
        if self.smoke:
            forward.WIDTH = 8
            tiny = {"dnn": 8, "vgg11": 4, "resnet18": 4, "alexnet": 4}
            self.works = {n: replace(w, steps=2, batch_size=tiny[n]) for n, w in self.works.items()}
        self.name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        old = json.loads(self.out.read_text()) if self.out.exists() else {}
        same = (old.get("device"), old.get("torch")) == (self.name, torch.__version__)
        self.record: dict[str, Any] = old if same else {"device": self.name, "torch": torch.__version__}
        for key, empty in (
            ("ceilings", {}),
            ("agreement", {}),
            ("rows", []),
            ("rounds", []),
            ("variants", []),
            ("memory", {}),
        ):
            self.record.setdefault(key, empty)
        self.record["errors"] = []
        self.record["date"] = time.strftime("%Y-%m-%d")

    def save(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        part = self.out.with_suffix(".part")
        part.write_text(json.dumps(self.record, indent=1) + "\n")
        part.replace(self.out)

    def put(self, table: str, row: dict[str, Any], *keys: str) -> None:
        """Keep a row in place of the one with the same keys, print it, save."""
        rows = self.record[table]
        rows[:] = [other for other in rows if any(other.get(key) != row[key] for key in keys)] + [row]
        print(table, json.dumps(row), flush=True)
        self.save()

    def ceiling(self, name: str) -> float:
        return self.record["ceilings"].get(name) or float("nan")

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object]) -> float:
        self.sync()
        began = time.perf_counter()
        run()
        self.sync()
        return time.perf_counter() - began

    def median(self, run: Callable[[], object], times: int) -> float:
        return statistics.median(self.seconds(run) for _ in range(1 if self.smoke else times))

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def attempt(self, what: str, run: Callable[[], object], seconds: float = 20) -> None:
        """Run it if ``seconds`` are left. An error is recorded and does not stop what comes after."""
        if time.perf_counter() + seconds > self.end:
            self.record["errors"].append(f"{what}: not begun, less than {seconds:g} s were left")
            print(f"[{what}: not begun]", flush=True)
            return
        began = time.perf_counter()
        try:
            run()
        except Exception:
            text = traceback.format_exc()
            print(f"--- {what} failed\n{text}", file=sys.stderr, flush=True)
            self.record["errors"].append(f"{what}: {text.strip().splitlines()[-1]}")
            self.record.setdefault("tracebacks", {})[what] = text[-3000:]
        print(f"[{what}: {time.perf_counter() - began:.1f} s]", flush=True)
        self.save()
        self.free()

    def engine(
        self,
        work: Workload,
        precision: PrecisionName,
        *,
        slots: int | None = None,
        compile: bool | None = None,
        stack_images: bool = True,
    ) -> CudaGraphsEngine:
        """Our engine; ``stack_images`` False: nets with convolutions go through slots in any case."""
        footprint = footprint_of(work.model, tuple(work.train.x.shape[1:]))
        slots = slots or choose_slots(footprint, work.source.batch_size)
        if self.smoke and compile is None:
            compile = False
        return CudaGraphsEngine(
            work,
            precision=Precision(precision),
            num_slots=slots,
            num_stacked=len(work.ids),
            stack_images=stack_images and stacks_images(footprint, work.source.batch_size, Precision(precision)),
            compile=compile,
        )

    def workload(self, work: Work, sizes: list[int], dtype: torch.dtype = torch.float32) -> Workload:
        """Random samples, ``sizes`` of them for the workers."""
        generator = torch.Generator(self.device).manual_seed(1)
        x = torch.randn(self.samples, *work.input_shape, generator=generator, device=self.device, dtype=dtype)
        index = torch.randint(self.samples, (sum(sizes),), generator=generator, device=self.device)
        y = torch.randint(work.num_classes, (sum(sizes),), generator=generator, device=self.device)
        offsets = tuple(torch.tensor([0, *sizes]).cumsum(0).tolist())
        with torch_seed(1):
            model = build(work.net, work.input_shape, work.num_classes).to(self.device, dtype)
        source = Source(1, work.batch_size, has_batchnorm(model))
        ids = tuple(range(len(sizes)))
        return Workload(model, Shards(x, index, y, offsets), ids, source, cross_entropy, accuracy)


def workload_of(engine: Engine) -> Workload:
    assert isinstance(engine, LocalEngine)
    return engine.work


def state(work: Workload) -> tuple[Params, Buffers]:
    model, kept = work.model, work.model.state_dict().keys()
    params = {name: p.detach() for name, p in model.named_parameters()}
    buffers = {name: b for name, b in model.named_buffers() if name in kept}
    return repeat(params, len(work.ids)), repeat(buffers, len(work.ids))


def whole(amount: Epochs | Steps, sgd: SGD = RECIPE) -> Phase:
    return Phase("body", WHOLE, amount, sgd, OBJECTIVE)


def difference(result: Fit, expected: Fit, params: Params, buffers: Buffers) -> float:
    """The largest error of a leaf, relative to how far the leaf moved."""
    errors = []
    for new, right, old in ((result.params, expected.params, params), (result.buffers, expected.buffers, buffers)):
        for name, leaf in right.items():
            moved, error = distance(leaf, old[name]), distance(new[name], leaf)
            errors.append(error / moved if moved > 0 else error)
    return largest(errors)


def largest(errors: Iterable[float]) -> float:
    """The largest error; one that is not a number, which no other is larger than, counts as infinite."""
    return max(error if error == error else float("inf") for error in errors)


def distance(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).norm().item()


# Sections


def ceilings(bench: Bench) -> None:
    """Bandwidth of a copy, and the rates of large products, on random numbers."""
    bench.attempt("ceilings", lambda: measure_ceilings(bench))


def measure_ceilings(bench: Bench) -> None:
    size = 1 << 20 if bench.smoke else 1 << 30
    source = torch.randn(size, device=bench.device)
    target = torch.empty_like(source)
    found = {"bytes_per_second": 2 * 4 * size / bench.median(lambda: target.copy_(source), 10)}
    side = 256 if bench.smoke else 8192
    for name, dtype in (("bf16", torch.bfloat16), ("tf32", torch.float32)):
        with Precision("tf32").settings(bench.device):
            a, b = (torch.randn(side, side, device=bench.device).to(dtype) for _ in range(2))
            for _ in range(3):
                torch.mm(a, b)
            found[f"{name}_flops"] = 2 * side**3 / bench.median(lambda a=a, b=b: a @ b, 20)
    bench.record["ceilings"] = found
    print({name: f"{value:.4g}" for name, value in found.items()}, flush=True)
    bench.save()


def agreement(bench: Bench) -> None:
    """Every net and kind of phase against the plain loop, recorded but not compiled.

    A step moves weights so little that float32 rounding shows in the difference; float64 tells it from a mistake.
    """
    sizes = [37, 20, 16, 9, 1, 33]
    phases = {
        "whole": whole(Epochs(1)),
        "body": Phase("body", REPRESENTATION, Epochs(1), RECIPE, OBJECTIVE),
        "head": Phase("head", HEAD, Epochs(2), RECIPE, OBJECTIVE),
        "head, frozen in eval mode": Phase("head", HEAD, Epochs(2), RECIPE, OBJECTIVE, frozen="eval"),
    }
    nets = WORKS | {"mlp": Work("mlp", (3, 8, 8), 4, 16, 1, ()), "cnn": Work("cnn", (3, 8, 8), 4, 16, 1, ())}
    for net, line in nets.items():
        precisions: dict[PrecisionName, torch.dtype] = {"float64": torch.float64, "float32": torch.float32}
        for precision, dtype in precisions.items():
            if not (bench.smoke and net in ("vgg11", "alexnet", "resnet18")):
                work = bench.workload(replace(line, batch_size=16), sizes, dtype)
                bench.attempt(f"agreement of {net} in {precision}", partial(agree, bench, work, phases, net, precision))


def agree(bench: Bench, work: Workload, phases: dict[str, Phase], net: str, precision: PrecisionName) -> None:
    params, buffers = state(work)
    ours = bench.engine(work, precision, slots=3, compile=False)
    loop = LocalEngine(work, LoopKernel, chunk_size=1, threads=Threads(1), name="loop")
    found: dict[str, float] = {}
    for name, phase in phases.items():
        with Precision(precision).settings(bench.device):
            expected = loop.fit(params, buffers, phase, 3)
        found[name] = difference(ours.fit(params, buffers, phase, 3), expected, params, buffers)
    scores = [engine.evaluate(params, buffers, work.train) for engine in (loop, ours)]
    found["scores"] = (scores[0].loss - scores[1].loss).abs().max().item()
    bench.record["agreement"] |= {f"{net}, {name}, {precision}": round3(error) for name, error in found.items()}
    print(net, precision, {name: f"{error:.1e}" for name, error in found.items()}, flush=True)


def algorithms(bench: Bench) -> None:
    """Two short rounds of every algorithm through both engines, in float32: in longer runs rounding adds up."""
    os.environ["MANYHEADS_COMPILE"] = "0"
    for name in REGISTRY:
        for model in ("mlp", "cnn"):
            bench.attempt(f"algorithm {name} with {model}", partial(one_algorithm, bench, name, model))
    os.environ.pop("MANYHEADS_COMPILE")


def one_algorithm(bench: Bench, name: str, model: str) -> None:
    kind, ends = REGISTRY[name], []
    known = {spec.name for spec in fields(kind)}  # pyright: ignore[reportArgumentType]
    few = {name: 4 for name in ("steps", "head_steps", "body_steps") if name in known}
    for recorded in (False, True):
        experiment = Experiment(algorithm=kind(**few), model=model, workers=6, rounds=2)
        session = open_session(experiment, Runtime(device=str(bench.device), engine="loop"))
        algorithm, ctx = session.experiment.algorithm, session.ctx
        if recorded:
            ctx = replace(ctx, engine=bench.engine(workload_of(ctx.engine), "float32", slots=3))
        now = algorithm.init(ctx)
        with Precision("float32").settings(bench.device):
            for round in range(2):
                now, _ = algorithm.local(now, round, ctx)
                now = algorithm.mix(now, round, ctx)
        ends.append(now)
    first, second = (end.params for end in ends)
    sizes = {n: max(distance(leaf, torch.zeros_like(leaf)), 1e-12) for n, leaf in first.items()}
    worst = largest(distance(leaf, second[n]) / sizes[n] for n, leaf in first.items())
    bench.record["agreement"][f"algorithm {name}, {model}, float32"] = round3(worst)
    print(f"{name:8} {model:4} {worst:.1e}", flush=True)


def eager_ms(bench: Bench, line: Work, precision: PrecisionName, sgd: SGD) -> tuple[float, str]:
    """One step of every worker's own module and optimiser, called in turn; the faster of foreach and fused."""
    with torch_seed(1):
        first = NETS[line.net](line.input_shape, line.num_classes).to(bench.device).train()
    modules = [copy.deepcopy(first) for _ in range(bench.workers)]
    x = torch.randn(bench.samples, *line.input_shape, device=bench.device)
    y = torch.randint(line.num_classes, (bench.samples,), device=bench.device)
    batches = [torch.randint(bench.samples, (line.batch_size,), device=bench.device) for _ in modules]

    def run(optimisers: list[torch.optim.SGD]) -> None:
        for module, optimiser, batch in zip(modules, optimisers, batches, strict=True):
            optimiser.zero_grad()
            with torch.autocast(bench.device.type, torch.bfloat16, enabled=precision == "bf16"):
                loss = nn.functional.cross_entropy(module(x[batch]), y[batch])
            loss.backward()
            if sgd.clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), sgd.clip)
            optimiser.step()

    def make(kind: str) -> list[torch.optim.SGD]:
        rule = {"lr": sgd.lr, "momentum": sgd.momentum, "weight_decay": sgd.weight_decay, kind: True}
        return [torch.optim.SGD(module.parameters(), **rule) for module in modules]

    with Precision(precision).settings(bench.device):
        once = {}
        for kind in ("foreach", "fused"):
            optimisers = make(kind)
            run(optimisers)
            once[kind] = bench.seconds(lambda o=optimisers: run(o))
            del optimisers
        best = min(once, key=lambda kind: once[kind])
        optimisers = make(best)
        run(optimisers)
        return 1e3 * min(once[best], bench.median(lambda: run(optimisers), 2)), best


def steps(bench: Bench) -> None:
    """The table: one step of every worker, ours against the eager loop and the bounds."""
    for net, line in bench.works.items():
        for precision in line.precisions:
            for name, sgd in (("recipe", RECIPE), ("plain", PLAIN)):
                what = f"step of {net}, {precision}, {name}"
                bench.attempt(what, partial(one_step, bench, line, precision, name, sgd), line.seconds)


def compile_seconds() -> dict[str, float]:
    """Seconds that this process has spent in parts of torch.compile so far; some parts contain others."""
    from torch._dynamo.utils import compilation_time_metrics

    return {name: sum(compilation_time_metrics.get(name, ())) for name in COMPILE_PARTS}


def one_step(bench: Bench, line: Work, precision: PrecisionName, optimiser: str, sgd: SGD) -> None:
    row = ours(bench, line, precision, optimiser, sgd)
    bench.free()
    eager, kind = eager_ms(bench, line, precision, sgd)
    row |= {"eager_ms": round(eager, 3), "eager_optimiser": kind, "ratio": round(eager / row["ours_ms"], 1)}
    bench.put("rows", row, "work", "precision", "optimiser")


def ours(bench: Bench, line: Work, precision: PrecisionName, optimiser: str, sgd: SGD) -> dict[str, Any]:
    """Our side of a row of the table."""
    work = bench.workload(line, [line.batch_size * line.steps] * bench.workers)
    params, buffers = state(work)
    weights = sum(p.numel() for p in work.model.parameters())
    products = footprint_of(work.model, line.input_shape).products
    engine = bench.engine(work, precision)
    phase = whole(Steps(line.steps), sgd)
    before = compile_seconds()
    prepare = bench.seconds(lambda: engine.fit(params, buffers, phase, 0))
    compiling = {name: round3(after - before[name]) for name, after in compile_seconds().items()}
    once = bench.seconds(lambda: engine.fit(params, buffers, phase, 0))
    calls = 1 if bench.smoke else max(1, round(1 / once))

    def run() -> None:
        now = (params, buffers)
        for number in range(calls):
            fit = engine.fit(*now, phase, number)
            now = (fit.params, fit.buffers)

    spent = bench.median(run, 3) / (calls * line.steps)
    row = {
        "work": f"{line.net}, batch {line.batch_size}",
        "precision": precision,
        "optimiser": optimiser,
        "workers": bench.workers,
        "ours_ms": round(1e3 * spent, 4),
        "bytes_bound_ms": round(6e3 * 4 * weights * bench.workers / bench.ceiling("bytes_per_second"), 3),
        "arithmetic_bound_ms": round(
            6e3 * products * line.batch_size * bench.workers / bench.ceiling(f"{precision}_flops"), 3
        ),
        "prepare_seconds": round(prepare - once, 1),
        "compile_seconds": compiling,
        "compiled": engine.compile,
        "notes": engine.notes,
        "error": round3(compiled_error(bench, engine, work, params, buffers, phase)),
    }
    if optimiser == "recipe":
        again = bench.engine(work, precision)
        row["prepare_cached_seconds"] = round(bench.seconds(lambda: again.fit(params, buffers, phase, 0)) - once, 1)
    return row


def compiled_error(
    bench: Bench, engine: CudaGraphsEngine, work: Workload, params: Params, buffers: Buffers, phase: Phase
) -> float:
    """The error of what was timed, against the loop in float32, relative to how far the weights moved."""
    few = torch.tensor([0, 1, 2])
    loop = LocalEngine(work, LoopKernel, chunk_size=1, threads=Threads(1), name="loop")
    with Precision("float32").settings(bench.device):
        expected = loop.fit(params, buffers, phase, 0, workers=few)
    result = engine.fit(params, buffers, phase, 0, workers=few)
    moved = sum(distance(leaf, params[name]) ** 2 for name, leaf in expected.params.items())
    error = sum(distance(leaf, result.params[name]) ** 2 for name, leaf in expected.params.items())
    return (error / moved) ** 0.5


def rounds(bench: Bench) -> None:
    """Whole rounds of DePRL on data of CIFAR's shape, dirichlet:0.5, evaluation off."""
    for net, classes, frozen in (("vgg11", 10, "train"), ("resnet18", 100, "eval"), ("resnet18", 100, "train")):
        if net in bench.works:
            what = f"DePRL round, {net}, frozen in {frozen} mode"
            bench.attempt(what, partial(one_round, bench, what, net, classes, frozen), bench.works[net].seconds)


def images(classes: int, count: int) -> Dataset:
    """Noise in the shape of CIFAR."""
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, 3, 32, 32, generator=generator), torch.arange(count) % classes

    return Dataset("noise", *draw(count), *draw(max(classes, count // 50)), num_classes=classes)


def one_round(bench: Bench, what: str, net: str, classes: int, frozen: str) -> None:
    experiment = Experiment(
        algorithm=DePRL(frozen=frozen),  # pyright: ignore[reportArgumentType]
        data=images(4 if bench.smoke else classes, 40 if bench.smoke else 50_000),
        model=net,
        workers=bench.workers,
        split="dirichlet:0.5",
        batch_size=bench.works[net].batch_size,
        rounds=10,
        lr=0.01,
        head_lr=0.005,
        momentum=0.9,
        weight_decay=1e-5,
        clip=10.0,
        decay=0.96,
    )
    session = open_session(experiment, Runtime(device=str(bench.device), engine="loop"))
    algorithm, ctx = session.experiment.algorithm, session.ctx
    engine = bench.engine(workload_of(ctx.engine), "float32" if bench.smoke else "bf16")
    ctx = replace(ctx, engine=engine)
    now = algorithm.init(ctx)
    spent: dict[str, list[float]] = {"local": [], "mix": [], "round": []}

    def local(round: int) -> None:
        nonlocal now
        now, _ = algorithm.local(now, round, ctx)

    def mix(round: int) -> None:
        nonlocal now
        now = algorithm.mix(now, round, ctx)

    prepare = bench.seconds(lambda: local(0))
    for number in (1,) if bench.smoke else (1, 3):
        spent["round"].append(bench.seconds(lambda n=number: (local(n), mix(n))))
        spent["local"].append(bench.seconds(lambda n=number: local(n + 1)))
        spent["mix"].append(bench.seconds(lambda n=number: mix(n + 1)))
    # Twice: the first call also records its steps.
    evaluation = bench.seconds(lambda: engine.evaluate(now.params, now.buffers, session.federation.test))
    evaluation = bench.seconds(lambda: engine.evaluate(now.params, now.buffers, session.federation.test))
    row = {
        "work": what,
        "precision": "bf16",
        "workers": bench.workers,
        "samples": sum(ctx.sizes.tolist()),
        "seconds": round3(min(spent["round"])),
        "local_seconds": round3(min(spent["local"])),
        "mix_seconds": round3(min(spent["mix"])),
        "test_evaluation_seconds": round3(evaluation),
        "prepare_seconds": round3(prepare),
        "compiled": engine.compile,
        "notes": engine.notes,
    }
    bench.put("rounds", row, "work")


def round3(value: float) -> float:
    return float(f"{value:.3g}")


@dataclass(frozen=True)
class Variant:
    """One way to run a net's steps, with the recipe's optimiser."""

    net: str
    precision: PrecisionName
    stack_images: bool = False
    slots: int | None = None
    channels_last: bool = True
    compile: bool | None = None


VARIANTS = (
    *(Variant(net, "bf16", stacked) for net in ("vgg11", "alexnet") for stacked in (True, False)),
    *(Variant("vgg11", "tf32", slots=slots) for slots in (4, 8, 12, 16, 24)),
    Variant("vgg11", "tf32", slots=8, channels_last=False),
    Variant("vgg11", "tf32", slots=16, channels_last=False),
    Variant("vgg11", "bf16", slots=16),
    *(Variant("resnet18", "bf16", slots=slots) for slots in (4, 8)),
    Variant("resnet18", "bf16", slots=4, compile=False),
    Variant("resnet18", "tf32", slots=4, channels_last=False, compile=False),
    Variant("resnet18", "tf32", slots=4, compile=False),
)


def variants(bench: Bench) -> None:
    """What stacking, slots, memory layout and compiling change in the time of a step."""
    for variant in VARIANTS:
        if variant.net in bench.works:
            seconds = bench.works[variant.net].seconds
            bench.attempt(f"variant {variant}", partial(one_variant, bench, variant), seconds)


def one_variant(bench: Bench, variant: Variant) -> None:
    line = bench.works[variant.net]
    work = bench.workload(line, [line.batch_size * line.steps] * bench.workers)
    params, buffers = state(work)
    precision = "float32" if bench.smoke else variant.precision
    engine = bench.engine(
        work, precision, slots=variant.slots, compile=variant.compile, stack_images=variant.stack_images
    )
    engine.images = engine.images and variant.channels_last
    phase = whole(Steps(line.steps))
    prepare = bench.seconds(lambda: engine.fit(params, buffers, phase, 0))
    spent = bench.median(lambda: engine.fit(params, buffers, phase, 1), 3)
    row = {**asdict(variant), "compiled": engine.compile, "ms": round3(1e3 * spent / line.steps)}
    bench.put("variants", {**row, "prepare_seconds": round3(prepare)}, *asdict(variant))


def memory(bench: Bench) -> None:
    """More workers than a smaller GPU holds, with rows in host memory: what they take, and what was planned."""
    bench.attempt("memory", partial(rows_on_host, bench), 120)


def rows_on_host(bench: Bench) -> None:
    on_gpu = bench.device.type == "cuda"
    row = 4 * sum(p.numel() for p in NETS["resnet18"]((3, 32, 32), 100).parameters())
    host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    workers = 3 if bench.smoke else min(1000, int(0.8 * host / (2 * row)))
    experiment = Experiment(
        algorithm=DePRL(frozen="eval", head_epochs=1),
        data=images(4, 40) if bench.smoke else images(100, 50_000),
        model="resnet18",
        workers=workers,
        split="iid",
        batch_size=128,
        rounds=10,
        precision="bf16" if on_gpu else "float32",
    )
    try:
        if on_gpu:
            total = torch.cuda.mem_get_info(bench.device)[1]
            torch.cuda.set_per_process_memory_fraction(SMALL_GPU / total, bench.device)
            torch.cuda.reset_peak_memory_stats(bench.device)
        session = open_session(experiment, Runtime(device=str(bench.device)))
        algorithm, ctx = session.experiment.algorithm, session.ctx
        plan = plan_memory(
            ctx.model,
            session.federation.train,
            batch_size=128,
            precision=Precision(session.experiment.precision or "float32"),
        )
        plan = settle(plan, int(FILLED * SMALL_GPU))
        spent: dict[str, list[float]] = {"local": [], "mix": []}
        now = algorithm.init(ctx)
        for number in range(2):
            began = time.perf_counter()
            now, _ = algorithm.local(now, number, ctx)
            bench.sync()
            spent["local"].append(round3(time.perf_counter() - began))
            began = time.perf_counter()
            now = algorithm.mix(now, number, ctx)
            bench.sync()
            spent["mix"].append(round3(time.perf_counter() - began))
            print(spent, flush=True)
        found = {
            "workers": workers,
            "planned_bytes": plan.device,
            "peak_bytes": torch.cuda.max_memory_allocated(bench.device) if on_gpu else 0,
            "reserved_bytes": torch.cuda.max_memory_reserved(bench.device) if on_gpu else 0,
            "rows_on_host": plan.rows_on_host,
            "rows_bytes": workers * row,
            "kept_on": str(now.params["head.fc.weight"].device),
            "seconds": spent,
            "finite": bool(now.params["head.fc.weight"].isfinite().all()),
            "notes": session.notes,
        }
        bench.record["memory"] = found
        print("memory", json.dumps(found), flush=True)
        del now, ctx, session
    finally:
        if on_gpu:
            torch.cuda.set_per_process_memory_fraction(1.0, bench.device)
        gc.collect()
        host_memory.release()


def profile(bench: Bench) -> None:
    """Where the device's time goes in one call of our engine."""
    for net, line in bench.works.items():
        bench.attempt(f"profile of {net}", partial(one_profile, bench, net, line), line.seconds)


def one_profile(bench: Bench, net: str, line: Work) -> None:
    work = bench.workload(line, [line.batch_size * line.steps] * bench.workers)
    params, buffers = state(work)
    phase = whole(Steps(line.steps))
    engine = bench.engine(work, "tf32" if bench.smoke else line.precisions[0])
    engine.fit(params, buffers, phase, 0)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    few = torch.arange(min(bench.workers, 32))
    with torch.profiler.profile(activities=activities) as found:
        wall = bench.seconds(lambda: engine.fit(params, buffers, phase, 1, workers=few))
    timed = [(e.key[:110], e.count, e.self_device_time_total / 1e3) for e in found.key_averages()]
    top = sorted(timed, key=lambda t: -t[2])[:25]
    print("\n".join(f"{ms:9.3f} ms {count:6} {name}" for name, count, ms in top), flush=True)
    lines = [{"kernel": name, "count": count, "ms": round3(ms)} for name, count, ms in top]
    about = {"workers": len(few), "steps": line.steps, "wall_ms": round3(1e3 * wall), "kernels": lines}
    bench.record.setdefault("profiles", {})[net] = about


SECTIONS: dict[str, Callable[[Bench], None]] = {
    section.__name__: section for section in (ceilings, agreement, algorithms, steps, rounds, variants, memory, profile)
}


def draw(record: dict[str, Any], path: Path) -> None:
    """How many times faster than the eager loop, one bar per line of the table, on a logarithmic axis."""
    rows = sorted((row for row in record["rows"] if row.get("optimiser") == "recipe"), key=lambda row: -row["ratio"])
    if not rows:
        return
    height, scale = 70 + 30 * len(rows), 360 / math.log(max(10, *(row["ratio"] for row in rows)))
    title = (
        f"One training step of {rows[0]['workers']} workers on one {record['device']}: times faster than the eager loop"
    )
    parts = [f'<rect width="660" height="{height}" fill="white"/><text x="12" y="22" font-size="14">{title}</text>']
    for tick in (1, 10, 100):
        if (x := 220 + scale * math.log(tick)) <= 580:
            parts.append(f'<path d="M{x:.0f} 36V{height - 28}" stroke="#ddd"/>')
            parts.append(f'<text x="{x:.0f}" y="{height - 12}" text-anchor="middle" fill="#666">{tick}x</text>')
    for k, row in enumerate(rows):
        y, width = 40 + 30 * k, max(2, round(scale * math.log(max(1, row["ratio"]))))
        parts.append(
            f'<text x="210" y="{y + 15}" text-anchor="end">{row["work"]}, {row["precision"]}</text>'
            f'<rect x="220" y="{y}" width="{width}" height="20" rx="3" fill="#2a6f97"/>'
            f'<text x="{226 + width}" y="{y + 15}">{row["ratio"]:g}x</text>'
        )
    size = f'viewBox="0 0 660 {height}" font-family="sans-serif" font-size="13"'
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--budget-seconds", type=float, default=540)
    parser.add_argument("--device", default=None)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/records/gpu.json"))
    options = parser.parse_args()
    options.works = options.works.split(",")
    if not (options.smoke or options.device or torch.cuda.is_available()):
        parser.error("torch sees no GPU: run it where there is one, or give --smoke.")
    options.device = options.device or ("cpu" if options.smoke else "cuda:0")
    if options.smoke and options.out == parser.get_default("out"):
        options.out = Path("benchmarks/records/smoke.json")
    bench = Bench(options)
    print(f"{bench.name}, torch {torch.__version__}, sections {options.sections}", flush=True)
    for name in options.sections.split(","):
        SECTIONS[name](bench)
    bench.save()
    draw(bench.record, bench.out.with_suffix(".svg"))
    print(
        f"\n{'work':24} {'type':5} {'optimiser':9} {'eager ms':>9} {'ours ms':>9} {'ratio':>7} {'bytes':>8} {'sums':>8}"
    )
    for row in bench.record["rows"]:
        print(
            f"{row['work']:24} {row['precision']:5} {row['optimiser']:9} {row['eager_ms']:9.1f} {row['ours_ms']:9.3f}"
            f" {row['ratio']:6.1f}x {row['bytes_bound_ms']:8.2f} {row['arithmetic_bound_ms']:8.2f}"
        )
    for row in bench.record["rounds"]:
        print(f"{row['work']:50} {row['seconds']:.3g} s (mixing {row['mix_seconds']:.3g} s)")
    for precision in ("float64", "float32"):
        found = [(error, name) for name, error in bench.record["agreement"].items() if name.endswith(precision)]
        print(f"worst agreement in {precision}: {max(found, default=None)}")
    print(f"errors: {bench.record['errors']}")


if __name__ == "__main__":
    main()
