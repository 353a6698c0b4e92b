"""Which engine runs a net on a device, and why."""

import os

from manyheads.engine.chain import ChainKernel, is_chain
from manyheads.engine.local import LocalEngine
from manyheads.engine.loop import LoopKernel
from manyheads.engine.phase import Engine
from manyheads.engine.vmapped import VmapKernel
from manyheads.engine.workload import Workload
from manyheads.errors import UserError, unknown
from manyheads.models.split import needs_loop

ENGINES = ("auto", "loop", "batched")
_CHUNK_BYTES = 12 << 20
"""A chunk's moving weights stay in the cache between its steps."""


def make_engine(name: str, workload: Workload, *, threads: int | None = None) -> Engine:
    """The engine called ``name``; ``auto`` takes the faster one (benchmarks/cpu.py shows which and by how much)."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    model, cores = workload.model, threads or os.cpu_count() or 1
    random_module = needs_loop(model)
    if name == "batched" and random_module:
        raise UserError(f"engine 'batched' cannot run {random_module}, which draws its own random numbers: use 'loop'.")
    if name == "auto":
        name = "batched" if is_chain(model) and random_module is None and workload.transform is None else "loop"
    if name == "loop":
        return LocalEngine(workload, LoopKernel, padded=False, chunk_size=1, threads=cores, name=name)
    kernel = ChainKernel if is_chain(model) else VmapKernel
    row = sum(p.numel() * p.element_size() for p in model.parameters())
    chunk = max(1, min(-(-len(workload.ids) // cores), _CHUNK_BYTES // max(row, 1)))
    return LocalEngine(workload, kernel, padded=True, chunk_size=chunk, threads=cores, name=name)
