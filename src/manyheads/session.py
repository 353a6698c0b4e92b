"""A run made ready: data, net, graph, engine and network built from an Experiment, before the first round."""

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import manyheads
from manyheads import host_memory, memory
from manyheads.agreement import (
    NOT_IN_SITES,
    agree_on_statistics,
    check_alike,
    check_same_code,
    check_same_weights,
    meet_sites,
)
from manyheads.algorithms.base import Algorithm, Context
from manyheads.compatibility import check_theory, check_training, note_lone_samples, shares_nothing
from manyheads.data import Dataset, Federation, load
from manyheads.data.download import DownloadProgress
from manyheads.data.federation import mean_floor
from manyheads.data.site_files import load as load_sites
from manyheads.derived import federation_of, mixing_of, pick_device, rates_of, resolve
from manyheads.engine.batches import Source
from manyheads.engine.choose import make_engine
from manyheads.engine.phase import Engine, Loss, accuracy, cross_entropy, single_head
from manyheads.engine.precision import Precision
from manyheads.engine.workload import Workload
from manyheads.errors import UserError
from manyheads.experiment import Experiment, Runtime
from manyheads.initial import first_state, initial_model, num_outputs, random_heads, take_constants
from manyheads.machine import cores
from manyheads.models.norm import has_batchnorm
from manyheads.models.split import Split, twin
from manyheads.network.base import Network
from manyheads.network.distributed import Distributed
from manyheads.network.in_process import InProcess
from manyheads.network.meeting import join
from manyheads.network.placement import Placement, blocks
from manyheads.network.processes import Processes
from manyheads.recipes import is_guess
from manyheads.sites import Sites
from manyheads.threads import Threads
from manyheads.topology import Mixing
from manyheads.topology.mixing import without


@dataclass(frozen=True, kw_only=True)
class Session:
    """Everything a run needs, and what its user should be told."""

    experiment: Experiment
    """Complete: every value filled in."""
    runtime: Runtime
    threads: Threads
    processes: Processes
    sites: Sites | None
    """None: all processes belong to one person and see one disk."""
    everyone: Federation
    """Who holds what, of all workers (in a site, of its own workers), on the CPU."""
    federation: Federation
    """The shards of the workers hosted here, on the device."""
    mixing: Mixing
    ctx: Context
    device: torch.device
    majority_floor: float | None
    notes: list[str]
    teacher: dict[str, Any] | None = None
    """The options of the run whose representation new workers take."""

    @cached_property
    def sharers(self) -> Processes:
        """The processes that share this one's run directory: all of them, but a site has one for itself."""
        return self.processes if self.sites is None else self.processes.alone()

    def sharing(self) -> AbstractContextManager[None]:
        """What rounds are computed in: on a CPU threads share their work; beside a GPU torch keeps its own threads."""
        return self.threads.shared() if self.device.type == "cpu" else nullcontext()

    @property
    def kept_workers(self) -> range:
        """The workers whose rows this process keeps in the run directory; a site counts its own from 0."""
        hosted = self.ctx.network.workers
        return hosted if self.sites is None else range(len(hosted))

    def folder(self, out: Path) -> Path:
        """The run directory of this process for an ``--out``."""
        return out if self.sites is None else out / f"site-{self.ctx.network.workers.start}"

    def describe_model(self) -> dict[str, Any]:
        """What it takes to build the net again and to use it."""
        federation, workers = self.federation, self.ctx.network.workers
        own = {"first_worker": workers.start, "num_workers": len(workers)} if self.sites else {}
        return {
            "input_shape": list(federation.input_shape),
            "num_outputs": num_outputs(federation),
            "num_classes": federation.num_classes,
            "pixels": asdict(federation.pixels) if federation.pixels else None,
            **own,
        }

    def describe_runtime(self) -> dict[str, Any]:
        """Where the run was computed."""
        return {
            "manyheads": manyheads.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "engine": self.ctx.engine.name,
            "threads": self.runtime.threads,
            "deterministic": self.runtime.deterministic,
            "processes": self.processes.count,
        }


def open_session(
    experiment: Experiment,
    runtime: Runtime,
    progress: DownloadProgress | None = None,
    constants: Mapping[str, Tensor] | None = None,
) -> Session:
    """Build everything a run needs. Every mistake in the experiment shows here, before anything is written.

    ``progress`` is called while a data set is downloaded. ``constants``: those of the run that this one builds upon.
    """
    for given, wanted in ((experiment, Experiment), (runtime, Runtime)):
        if not isinstance(given, wanted):
            raise UserError(
                f"expected {wanted.__name__}, not {type(given).__name__}: give manyheads.{wanted.__name__}(...)."
            )
    device = _start(runtime)
    processes = join(runtime.timeout, device)
    # The processes of a host share its cores.
    threads = Threads(runtime.threads or max(1, cores() // processes.local_count))
    runtime = replace(runtime, threads=threads.count)
    sites = meet_sites(experiment, runtime, processes)
    own = sites.placement[processes.rank] if sites else None
    dataset = _load(experiment.data, own, runtime, progress)
    experiment = resolve(experiment, dataset.input_shape, device)
    # Computed now: an object that no run can be identified by is otherwise refused only at the first record.
    _ = experiment.run_id
    if processes.count > 1:
        check_alike(processes, experiment, runtime, dataset, in_sites=sites is not None)
        check_same_code(processes, experiment)
    everyone, mixing = federation_of(experiment, dataset, own), mixing_of(experiment)
    placement = sites.placement if sites else blocks(everyone.train.sizes, processes.count)
    hosted = everyone if sites or processes.count == 1 else everyone.take(placement[processes.rank])
    model = _model(experiment, hosted, processes, constants)
    notes = check_training(experiment, model, hosted)
    check_theory(runtime, model, in_sites=sites is not None)
    network = _network(experiment, mixing, processes, placement, sites)
    here = _on_device(hosted, device, experiment.dtype)
    workload = _workload(experiment, model, here)
    notes += [*hosted.notes, *mixing.notes, *note_lone_samples(model, everyone, everybody=sites is None)]
    engine = _engine(experiment, runtime, workload, threads, notes)
    ctx = _context(experiment, model, hosted, workload, engine, network)
    # New workers, who are given constants, train heads alone and need no copies of the rest.
    if device.type == "cpu" and constants is None:
        on_this_host = everyone if processes.local_count == processes.count else hosted
        memory.check_memory(ctx.initial.params, len(on_this_host.ids), experiment.algorithm.extra_rows)
    notes += _remarks(experiment, model, in_sites=sites is not None)
    if device.type == "cuda" and not runtime.deterministic:
        notes.append("A GPU repeats these numbers up to rounding, not bit for bit; --deterministic does.")
    return Session(
        experiment=experiment,
        runtime=runtime,
        threads=threads,
        processes=processes,
        sites=sites,
        everyone=everyone,
        federation=here,
        mixing=mixing,
        ctx=ctx,
        device=device,
        majority_floor=_majority_floor(experiment, hosted, network),
        notes=notes,
    )


_USED: set[int] = set()
"""The processes that have opened a session: this one, and any that it was forked from."""


def _refuse_forked() -> None:
    """Refuse a process forked from one that has trained: torch waits there for threads that only the other has."""
    _USED.add(os.getpid())
    if len(_USED) > 1:
        raise UserError(
            "this process was forked from one that has trained, and torch would wait for ever: start processes with"
            " multiprocessing.get_context('spawn')."
        )


def _start(runtime: Runtime) -> torch.device:
    """The device, ready for a run."""
    _refuse_forked()
    if runtime.deterministic:
        # cuBLAS reads it when it starts, so it is set before anything else.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    host_memory.release()
    return pick_device(runtime.device)


def _load(data: str | Dataset, own: range | None, runtime: Runtime, progress: DownloadProgress | None) -> Dataset:
    """The data set; for sites, the part of the workers hosted here."""
    if isinstance(data, Dataset):
        return data
    return load(data, runtime.data_dir, progress) if own is None else load_sites(data, own)


def _model(
    experiment: Experiment, hosted: Federation, processes: Processes, constants: Mapping[str, Tensor] | None
) -> Split:
    """The net with its first weights, on which all processes agree."""
    model = initial_model(experiment, hosted)
    if constants is not None:
        take_constants(model, constants)
    if processes.count > 1:
        check_same_weights(processes, model)
        agree_on_statistics(processes, model)
    return model


def _network(
    experiment: Experiment, mixing: Mixing, processes: Processes, placement: Placement, sites: Sites | None
) -> Network:
    private = experiment.algorithm.private
    if sites:
        return Distributed(without(mixing, sites.away), private, processes, placement, one_owner=False)
    return Distributed(mixing, private, processes, placement) if processes.count > 1 else InProcess(mixing, private)


def _workload(experiment: Experiment, model: Split, here: Federation) -> Workload:
    """What the engine works on: a copy of the net where the samples are, and how those are drawn and scored."""
    loss = experiment.own("loss") or cross_entropy
    return Workload(
        model=twin(model).to(here.train.x.device),
        train=here.train,
        ids=here.ids,
        source=Source(experiment.root, experiment.recipe.batch_size, has_batchnorm(model)),
        loss=loss,
        metric=experiment.own("metric") or (_negative(loss) if here.num_classes is None else accuracy),
        transform=experiment.own("transform"),
    )


def _engine(experiment: Experiment, runtime: Runtime, workload: Workload, threads: Threads, notes: list[str]) -> Engine:
    engine = make_engine(
        runtime.engine,
        workload,
        threads=threads,
        precision=Precision(experiment.precision or "float32", runtime.deterministic),
        extra_rows=experiment.algorithm.extra_rows,
        notes=notes,
    )
    if engine.name != "cuda-graphs" and experiment.precision == "bf16":
        notes.append(f"Engine '{engine.name}' computes in tf32, whatever --precision bf16 says.")
    return engine


def _context(
    experiment: Experiment,
    model: Split,
    federation: Federation,
    workload: Workload,
    engine: Engine,
    network: Network,
) -> Context:
    """What the algorithm may use."""
    device, ids, counts = workload.train.x.device, federation.ids, federation.class_counts
    return Context(
        engine=engine,
        network=network,
        exchange=experiment.algorithm.exchange,
        model=model,
        rates=rates_of(experiment),
        objective=single_head(workload.loss),
        class_counts=None if counts is None else counts.to(device, experiment.dtype),
        sizes=_sizes(federation, experiment.algorithm, network),
        ids=ids,
        source=workload.source,
        rounds=experiment.recipe.rounds,
        seed=experiment.root,
        initial=first_state(model, len(ids), engine),
        random_heads=lambda: engine.place(random_heads(model, experiment.root, ids)),
        share_statistics=experiment.norm == "shared",
    )


def _sizes(federation: Federation, algorithm: Algorithm, network: Network) -> np.ndarray:
    """Train samples of each worker, [N]; 0 for those at other sites, unless a server needs them as weights."""
    own = torch.tensor(federation.train.sizes)
    if network.may_gather_private or algorithm.uses_sizes:
        return network.gather(own).numpy()
    sizes = np.zeros(network.num_workers, dtype=np.int64)
    sizes[network.workers.start : network.workers.stop] = own
    return sizes


def _majority_floor(experiment: Experiment, hosted: Federation, network: Network) -> float | None:
    """The floor of all workers; None: the scores are no accuracies, beside which alone it means something."""
    if experiment.metric is not None or hosted.num_classes is None:
        return None
    return mean_floor(network.gather(hosted.majority_floors()))


def _remarks(experiment: Experiment, model: Split, *, in_sites: bool) -> Iterator[str]:
    """What the user should know about an experiment."""
    recipe = experiment.recipe
    if in_sites:
        yield NOT_IN_SITES
    elif is_guess(experiment.step_seconds, recipe.model, recipe.batch_size):
        guess = f"Simulated time: {experiment.step_seconds:g} s for a mini-batch is a guess"
        yield f"{guess}: give --step-seconds, which inspect speed measures."
    if model.constants:
        first, *others = model.constants
        more = f" and {len(others)} more" if others else ""
        yield f"requires_grad=False: {first}{more} will stay as given, alike for all workers."
        if shares_nothing(experiment.algorithm, model):
            yield f"{experiment.algorithm.name} has no weights to share: each worker trains its head alone."
    if experiment.loss is None and isinstance([*model.modules()][-1], nn.Softmax):
        yield "The model ends in a Softmax, which the loss applies itself: leave it out, or little is learned."


def _on_device(federation: Federation, device: torch.device, dtype: torch.dtype) -> Federation:
    train = federation.train.to(device, dtype)
    # Train and validation shards share a pool, which is moved once.
    validation = replace(federation.validation, x=train.x).to(device, dtype)
    return replace(federation, train=train, validation=validation, test=federation.test.to(device, dtype))


def _negative(loss: Loss) -> Loss:
    """The score of a regression without a metric: minus its loss, so that higher is better."""
    return lambda output, y: -loss(output, y)
