"""Which engine runs a net on a device, and why."""

from dataclasses import replace

from manyheads import memory
from manyheads.engine.chain import ChainKernel, is_chain
from manyheads.engine.cuda_graphs.engine import CudaGraphsEngine
from manyheads.engine.cuda_graphs.footprint import Footprint, footprint_of
from manyheads.engine.cuda_graphs.memory_plan import choose_slots, free_memory, plan_memory, settle
from manyheads.engine.local import LocalEngine
from manyheads.engine.loop import LoopKernel
from manyheads.engine.phase import Engine, EngineName
from manyheads.engine.pooling import with_fast_pooling
from manyheads.engine.precision import Precision
from manyheads.engine.vmapped import VmapKernel
from manyheads.engine.workload import Workload
from manyheads.errors import UserError
from manyheads.machine import cores
from manyheads.models.split import Split, needs_loop
from manyheads.threads import Threads
from manyheads.units import human_bytes

_CHUNK_BYTES = 8 << 20
"""A chunk's moving weights stay in the cache between its steps."""
_WORTH_A_THREAD = 1 << 23
"""Multiplications of a forward pass below which a thread mostly waits until the others let go of Python."""

FILLED = 0.8
"""Part of the free memory that a plan may count on: the rest is for heads trained in stacks, and for gaps."""
_STACKED_HEADS = 0.1


def make_engine(
    name: EngineName,
    workload: Workload,
    *,
    threads: Threads | None = None,
    precision: Precision | None = None,
    extra_rows: float = 0.0,
    notes: list[str] | None = None,
) -> Engine:
    """The engine called ``name``; ``auto`` takes the fastest (benchmarks/ shows which and by how much).

    ``extra_rows`` is the algorithm's, for the memory plan. If only ``loop`` can run the net, or it cannot be captured
    for ``cuda-graphs``, ``notes`` says so.
    """
    notes = [] if notes is None else notes
    model, threads, precision = workload.model, threads or Threads(cores()), precision or Precision()
    on_gpu = workload.train.x.device.type == "cuda"
    if name == "cuda-graphs" and not on_gpu:
        raise UserError("engine 'cuda-graphs' needs a GPU: use --device cuda, or --engine auto.")
    reason = _only_loop(model)
    fastest = "batched" if reason is None and is_chain(model) else "loop"
    if name == "cuda-graphs" or (name == "auto" and on_gpu):
        footprint = footprint_of(model, tuple(workload.train.x.shape[1:]))
        obstacle = reason or _obstacle(workload, footprint)
        if obstacle is None:
            return _cuda_graphs(workload, footprint, precision, extra_rows, notes)
        name = fastest
        notes.append(f"{obstacle}: engine '{name}' instead of 'cuda-graphs', which is slower.")
    elif reason:
        if name == "batched":
            raise UserError(f"engine 'batched' cannot run this net, as {reason}: use 'loop'.")
        name = "loop"
        notes.append(f"{reason}: engine 'loop'.")
    if name == "auto":
        name = fastest
    if name == "loop":
        work = workload if on_gpu else replace(workload, model=with_fast_pooling(model))
        return LocalEngine(work, LoopKernel, chunk_size=1, threads=threads, name=name, precision=precision)
    kernel = ChainKernel if is_chain(model) else VmapKernel
    if kernel is ChainKernel:
        threads = _busy(threads, workload)
    row = sum(p.numel() * p.element_size() for p in model.parameters())
    chunk = max(1, min(-(-len(workload.ids) // threads.count), _CHUNK_BYTES // max(row, 1)))
    return LocalEngine(workload, kernel, chunk_size=chunk, threads=threads, name=name, precision=precision)


def _busy(threads: Threads, workload: Workload) -> Threads:
    """No more threads than have enough to compute in a step of all workers, who are then in fewer and larger chunks."""
    samples = min(workload.source.batch_size * len(workload.ids), len(workload.train.index))
    products = samples * sum(p.numel() for p in workload.model.parameters())
    busy = max(1, products // _WORTH_A_THREAD)
    return threads if busy >= threads.count else Threads(busy)


def _only_loop(model: Split) -> str | None:
    """Why only ``loop`` can run a net; None: other engines can."""
    if random_module := needs_loop(model):
        return f"{random_module} draws its own random numbers"
    # Other engines pad batches, and the padding would be among those others.
    seen = "a sample's output or gradient depends on the others in its batch (is batch_first missing?)"
    return seen if model.mixes_samples else None


def _obstacle(workload: Workload, footprint: Footprint) -> str | None:
    """Why the work cannot be recorded in CUDA graphs, though the net is no reason for ``loop``; None: it can."""
    if workload.transform is not None:
        return "the train-time transform runs on the host"
    if footprint.blocked is not None:
        return f"{footprint.blocked} looks at numbers, or computes them again for gradients, which no CUDA graph can do"
    return None


def _cuda_graphs(
    workload: Workload, footprint: Footprint, precision: Precision, extra_rows: float, notes: list[str]
) -> Engine:
    """The engine for GPUs, with as many slots as fit."""
    model, train, batch_size = workload.model, workload.train, workload.source.batch_size
    needed = plan_memory(
        model, train, batch_size=batch_size, precision=precision, footprint=footprint, extra_rows=extra_rows
    )
    free = free_memory(train.x.device)
    host = memory.available()
    plan = settle(needed, int(FILLED * free), host)
    if plan.rows_on_host:
        notes.append("the workers' rows do not fit into the GPU's memory: they stream through it from host memory.")
    if host is not None and plan.host > host:
        sizes = f"{human_bytes(plan.host)}, and {human_bytes(host)} are free"
        notes.append(f"the rows can take up to {sizes} on the host: lower --workers if its memory runs out.")
    return CudaGraphsEngine(
        workload,
        precision=precision,
        num_slots=choose_slots(footprint, batch_size) if plan.stacked else plan.lanes,
        num_stacked=plan.lanes if plan.stacked else int(_STACKED_HEADS * free) // plan.row,
        stack_images=plan.stacked,
        rows_on_host=plan.rows_on_host,
        notes=notes,
    )
