"""A run made ready: data, net, graph, engine and network built from an Experiment, before the first round."""

import copy
import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import manyheads
from manyheads import host_memory
from manyheads.algorithms.base import Context, Rates
from manyheads.algorithms.phases import WHOLE
from manyheads.data import Dataset, Federation, federate, is_own_file, load
from manyheads.data.files import Progress
from manyheads.data.sites import is_per_worker
from manyheads.data.sites import load as load_sites
from manyheads.engine.batches import Source
from manyheads.engine.choose import make_engine
from manyheads.engine.cuda_graphs import Precision
from manyheads.engine.phase import Loss, accuracy, cross_entropy, single_head
from manyheads.engine.workload import Workload
from manyheads.errors import UserError
from manyheads.experiment import Experiment, Runtime
from manyheads.initial import first_state, initial_model, num_outputs, place, random_heads
from manyheads.models.norm import has_batchnorm
from manyheads.models.split import needs_loop
from manyheads.network.agreement import NOT_IN_SITES, compare, floor_in_sites, meet_sites, sizes_in_sites
from manyheads.network.distributed import Distributed
from manyheads.network.in_process import InProcess
from manyheads.network.meeting import join, local_rank
from manyheads.network.placement import blocks
from manyheads.network.processes import Processes
from manyheads.network.sites import Sites, without
from manyheads.recipes import knows_speed, recipe_for
from manyheads.topology import Mixing, build_mixing


@dataclass(frozen=True)
class Session:
    """Everything a run needs, and what its user should be told."""

    experiment: Experiment
    """Complete: every value filled in."""
    runtime: Runtime
    processes: Processes
    sites: Sites | None
    """None: all processes are one person's and see one disk."""
    everyone: Federation
    """Who holds what, of all workers and on the CPU; in a site of its own workers."""
    federation: Federation
    """The shards of the workers hosted here, on the device."""
    mixing: Mixing
    ctx: Context
    device: torch.device
    engine: str
    majority_floor: float | None
    notes: list[str]

    @property
    def sharers(self) -> Processes:
        """The processes that share this one's run directory: all of them, but in sites each has its own."""
        return self.processes if self.sites is None else self.processes.alone()

    @property
    def kept_workers(self) -> range:
        """The workers whose rows this process keeps in the run directory, which in a site begins with its first."""
        hosted = self.ctx.network.workers
        return hosted if self.sites is None else range(len(hosted))

    def folder(self, out: Path) -> Path:
        """The run directory of this process for an ``--out``."""
        return out if self.sites is None else out / f"site-{self.ctx.network.workers.start}"

    def describe_model(self) -> dict[str, Any]:
        """What it takes to build the net again."""
        federation, workers = self.federation, self.ctx.network.workers
        own = {"first_worker": workers.start, "num_workers": len(workers)} if self.sites else {}
        return {"input_shape": list(federation.input_shape), "num_outputs": num_outputs(federation), **own}

    def describe_runtime(self) -> dict[str, Any]:
        """Where the run was computed."""
        return {
            "manyheads": manyheads.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "engine": self.engine,
            "deterministic": self.runtime.deterministic,
            "processes": self.processes.count,
        }


def open_session(experiment: Experiment, runtime: Runtime, progress: Progress | None = None) -> Session:
    """Build everything a run needs. Every mistake in the experiment shows here, before anything is written.

    ``progress`` is called while a data set is downloaded.
    """
    if runtime.deterministic:
        # Read when the GPU's library for products starts, which is before anything else here.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    host_memory.release()
    device = pick_device(runtime.device)
    processes = join(runtime.timeout, device)
    data, sites = experiment.data, meet_sites(experiment, runtime, processes)
    own = sites.placement[processes.rank] if sites else None
    if isinstance(data, Dataset):
        dataset = data
    else:
        dataset = load_sites(data, own) if own else load(data, runtime.data_dir, progress)
    speed_is_given = experiment.step_seconds is not None
    precision = pick_precision(experiment, device)
    experiment = replace(resolve(experiment, dataset), precision=precision)
    algorithm = experiment.algorithm
    if processes.count > 1:
        compare(processes, experiment, runtime, dataset, in_sites=sites is not None)
    everyone = deal(experiment, dataset, own)
    placement = sites.placement if sites else blocks(everyone.train.sizes, processes.count)
    federation = everyone if sites or processes.count == 1 else everyone.take(placement[processes.rank])
    mixing = connect(experiment)
    model = initial_model(experiment, federation)
    if sites:
        network = Distributed(without(mixing, sites.away), algorithm.private, processes, placement, one_owner=False)
    elif processes.count > 1:
        network = Distributed(mixing, algorithm.private, processes, placement)
    else:
        network = InProcess(mixing, algorithm.private)
    here = _on_device(federation, device, experiment.dtype)
    if has_batchnorm(model) and experiment.batch_size == 1:
        raise UserError("--batch-size 1 with BatchNorm leaves every batch out: give at least 2, or --norm group.")
    if federation.num_classes is None and experiment.loss is None:
        raise UserError("the targets are floats, not classes: give whole numbers, or a loss (and a metric) in Python.")
    _check_per_sample(experiment, model, federation)
    loss = experiment.loss or cross_entropy
    workload = Workload(
        model=copy.deepcopy(model).to(device),
        train=here.train,
        ids=federation.ids,
        source=Source(experiment.seed, experiment.recipe.batch_size, has_batchnorm(model)),
        loss=loss,
        metric=experiment.metric or (_negative(loss) if federation.num_classes is None else accuracy),
        transform=experiment.transform,
    )
    # The processes of a host share its cores.
    threads = runtime.threads or max(1, (os.cpu_count() or 1) // processes.local_count)
    notes = [*federation.notes, *mixing.notes]
    numbers = Precision(precision, runtime.deterministic)
    engine = make_engine(
        runtime.engine,
        workload,
        threads=threads,
        precision=numbers,
        extra_rows=experiment.algorithm.extra_rows,
        notes=notes,
    )
    if engine.name != "cuda-graphs" and experiment.precision in ("tf32", "bf16"):
        notes.append(f"Engine '{engine.name}' computes in float32, whatever --precision {experiment.precision} says.")
    ctx = Context(
        engine=engine,
        network=network,
        model=model,
        rates=rates(experiment),
        objective=single_head(loss),
        class_counts=None if federation.num_classes is None else federation.class_counts.to(device, experiment.dtype),
        sizes=sizes_in_sites(everyone, algorithm, network) if sites else np.array(everyone.train.sizes),
        ids=federation.ids,
        source=workload.source,
        rounds=experiment.recipe.rounds,
        seed=experiment.seed,
        initial=first_state(model, len(federation.ids), engine, device),
        random_heads=lambda: place(random_heads(model, experiment.seed, federation.ids), engine, device),
        share_statistics=experiment.norm == "shared",
    )
    _check_theory(runtime, ctx)
    if not (speed_is_given or knows_speed(experiment.model)):
        notes.append(f"Simulated time: {experiment.step_seconds:g} s for a mini-batch is a guess; give --step-seconds.")
    if frozen := [name for name, p in model.named_parameters() if not p.requires_grad]:
        notes.append(f"requires_grad=False of {frozen[0]} is not looked at: all of a part that moves is trained.")
    if random_module := needs_loop(model):
        notes.append(f"{random_module} draws its own random numbers: engine 'loop', seeded per worker and round.")
    if sites:
        notes.append(NOT_IN_SITES)
    floor = floor_in_sites(everyone, network) if sites else everyone.majority_floor()
    return Session(
        experiment, runtime, processes, sites, everyone, here, mixing, ctx, device, engine.name, floor, notes
    )


def _check_theory(runtime: Runtime, ctx: Context) -> None:
    """Refuse to measure M(k) where it is not defined, or where that would show what is private."""
    if runtime.theory_every and ctx.model.head_names != ("head",):
        raise UserError("--theory-every needs a net with one head, and this algorithm's has two: leave it out.")
    if runtime.theory_every and not ctx.network.may_gather_private:
        raise UserError("--theory-every compares the gradients of heads, which stay where they are: leave it out.")


def resolve(experiment: Experiment, dataset: Dataset) -> Experiment:
    """The experiment with nothing left open: recipe values, the algorithm's graph and weights."""
    name = experiment.data if isinstance(experiment.data, str) else ""
    experiment = experiment.complete(recipe_for(name, tuple(dataset.x_train.shape[1:])))
    algorithm = experiment.algorithm
    if is_per_worker(name):
        experiment = replace(experiment, split="natural")
    if experiment.graph in ("server", "none") and not algorithm.server and algorithm.private != WHOLE:
        raise UserError(
            f"--graph {experiment.graph} is no graph, and {algorithm.name} needs one: give ring, random:P, ..."
        )
    if algorithm.server:
        return replace(experiment, graph="server", weights=None, redraw=False)
    if algorithm.private == WHOLE:
        return replace(experiment, graph="none", weights=None, redraw=False)
    if algorithm.row_stochastic:
        # It averages over neighbours alike, whatever weights a comparison sets for the others.
        return replace(experiment, weights="uniform")
    return replace(experiment, weights=experiment.weights or "metropolis")


def deal(experiment: Experiment, dataset: Dataset, hosted: range | None = None) -> Federation:
    """Who holds what of a data set; of one that has the samples of some workers only, these are named."""
    workers = range(experiment.workers) if hosted is None else hosted
    federation = federate(
        dataset,
        workers=len(workers),
        first=workers.start,
        split=experiment.split,
        test_split=experiment.test_split,
        relabel=experiment.relabel,
        validation=experiment.validation,
        seed=experiment.seed,
    )
    return replace(federation, content=dataset.digest() if is_own_file(experiment.data) else None)


def connect(experiment: Experiment) -> Mixing:
    """Who mixes with whom in a complete experiment."""
    return build_mixing(
        # A server or no exchange at all needs no graph; a ring then only says who is present.
        "ring" if experiment.graph in ("server", "none") else experiment.graph,
        experiment.workers,
        weights=experiment.weights or "metropolis",
        redraw=experiment.redraw,
        link_failure=experiment.link_failure,
        worker_failure=experiment.worker_failure,
        seed=experiment.seed,
        allow_row_stochastic=experiment.algorithm.row_stochastic,
    )


def pick_precision(experiment: Experiment, device: torch.device) -> str:
    """The numbers to train in: on a GPU tf32 unless another is given; tf32 and bf16 are a GPU's."""
    default = "tf32" if device.type == "cuda" else "float32"
    given = experiment.precision or default
    if device.type != "cuda" and given in ("tf32", "bf16"):
        raise UserError(f"--precision {given} needs a GPU: use float32, or --device cuda.")
    return given


def rates(experiment: Experiment) -> Rates:
    """The optimiser's numbers, Corollary 1's where asked for: beta = sqrt(N/K), alpha = 1/(tau sqrt(K))."""
    recipe = experiment.recipe
    lr, head_lr = recipe.lr, recipe.head_lr
    if experiment.schedule == "corollary":
        # Heads that never move have no rate.
        tau = max(1, experiment.algorithm.head_passes)
        lr, head_lr = (experiment.workers / recipe.rounds) ** 0.5, 1 / (tau * recipe.rounds**0.5)
    return Rates(
        lr, head_lr, recipe.momentum, recipe.weight_decay, recipe.clip or None, recipe.decay, experiment.schedule
    )


def pick_device(name: str) -> torch.device:
    """The device called ``name``; auto takes a GPU where there is one. The processes of a host share its GPUs out."""
    gpus = torch.cuda.device_count()
    if name == "auto" and not gpus:
        return torch.device("cpu")
    if name in ("auto", "cuda") and gpus:
        return torch.device("cuda", local_rank() % gpus)
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"unknown device '{name}'. Allowed: auto, cpu, cuda, cuda:K.") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"unknown device '{name}'. Allowed: auto, cpu, cuda, cuda:K.")
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise UserError(f"device '{name}' was asked for, but torch sees {gpus} GPUs: use --device cpu.")
    return device


def _on_device(federation: Federation, device: torch.device, dtype: torch.dtype) -> Federation:
    train = federation.train.to(device, dtype)
    # Train and validation shards lie over one pool: it is moved once.
    validation = replace(federation.validation.to(device, dtype), x=train.x)
    return replace(federation, train=train, validation=validation, test=federation.test.to(device, dtype))


def _check_per_sample(experiment: Experiment, model: torch.nn.Module, federation: Federation) -> None:
    """Try the user's own loss and metric on a few samples: each must give a number for every one."""
    given = {"loss": experiment.loss, "metric": experiment.metric}
    x, y = federation.train.x[:3].to(experiment.dtype), federation.train.y[:3]
    for name, function in given.items():
        if function is None:
            continue
        with torch.no_grad():
            found = function(copy.deepcopy(model).eval()(x), y.to(x.dtype) if y.is_floating_point() else y)
        if found.shape != x.shape[:1]:
            raise UserError(
                f"the {name} gives {list(found.shape)} for {len(x)} samples: it must give one number a sample, "
                f"[{len(x)}], not their mean or sum."
            )


def _negative(loss: Loss) -> Loss:
    """Without a metric of its own a regression is scored by its loss, so that higher is better."""
    return lambda output, y: -loss(output, y)
