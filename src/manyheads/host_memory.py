"""Host memory that a GPU reads and writes by itself: pinned once, in blocks of the exact size, and used again.

torch's own pinned memory comes in powers of two, which would waste tens of gigabytes on the rows of a thousand workers.
A block is lent as a tensor and comes back when the last view of it is gone: code that drops rows which the GPU may
still be copying must wait for the GPU first. On a machine without a GPU the blocks are plain memory.
"""

import mmap
import sys
import weakref
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyheads.tree import Params

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every GPU."""

_blocks: set[int] = set()
"""Addresses of all blocks."""
_free: dict[int, list[np.ndarray]] = {}
"""Blocks that are not lent, by size."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Room in pinned host memory."""
    size = prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    waiting = _free.setdefault(size, [])
    block = waiting.pop() if waiting else _pinned(size)
    lent = block[:]
    weakref.finalize(lent, waiting.append, block).atexit = False
    return torch.from_numpy(lent).view(dtype).view(tuple(shape))


def empty_like(leaf: Tensor) -> Tensor:
    """Room like a leaf's: in pinned memory if the leaf is there."""
    if leaf.device.type == "cpu" and leaf.untyped_storage().data_ptr() in _blocks:
        return empty(leaf.shape, leaf.dtype)
    return torch.empty_like(leaf)


def pinned(leaves: Params) -> Params:
    """Copies in pinned host memory."""
    return {name: empty(leaf.shape, leaf.dtype).copy_(leaf) for name, leaf in leaves.items()}


def release() -> None:
    """Give the blocks that are not lent back to the system."""
    for waiting in _free.values():
        while waiting:
            block = waiting.pop()
            _blocks.discard(block.ctypes.data)
            if torch.cuda.is_available():
                torch.cuda.check_error(_cudart().cudaHostUnregister(block.ctypes.data))


def _pinned(size: int) -> np.ndarray:
    # A mapping of its own, so that no page is shared with memory that others pin.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_HUGEPAGE)
    block = np.frombuffer(memory, dtype=np.uint8)
    if torch.cuda.is_available():
        torch.cuda.check_error(_cudart().cudaHostRegister(block.ctypes.data, size, _PORTABLE))
    _blocks.add(block.ctypes.data)
    return block


def _cudart() -> Any:
    return torch.cuda.cudart()
