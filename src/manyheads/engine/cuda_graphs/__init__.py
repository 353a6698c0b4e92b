"""The engine for GPUs: recorded steps, workers in a stack or in parallel slots, and no waiting between steps."""

from manyheads.engine.cuda_graphs.engine import CudaGraphsEngine
from manyheads.engine.cuda_graphs.memory_plan import MemoryPlan, describe, plan_memory, settle

__all__ = ["CudaGraphsEngine", "MemoryPlan", "describe", "plan_memory", "settle"]
