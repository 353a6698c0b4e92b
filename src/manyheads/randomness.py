"""Every random draw as a pure function of (seed, worker, round, stream, step, layer), so that nothing is ever stored."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

_WORD = (1 << 64) - 1


def stream_id(stream: str) -> int:
    """A 64-bit number for a stream's name, the same in every process and Python version."""
    return int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "little")


def generator(seed: int, stream: str, *, worker: int = 0, round: int = 0, epoch: int = 0) -> np.random.Generator:
    """A numpy generator whose state is a function of its arguments and of nothing else.

    The lowest counter word runs with the draws; the others name the draw, so that no two streams overlap.
    """
    philox = np.random.Philox(key=[seed & _WORD, stream_id(stream)], counter=[0, worker, round, epoch])
    return np.random.Generator(philox)


def key(seed: int, stream: str, *, worker: int = 0, round: int = 0) -> int:
    """A 63-bit number for everything that is seeded by a number instead of a generator."""
    text = f"{seed}/{stream}/{worker}/{round}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


@contextmanager
def torch_seed(seed: int) -> Iterator[None]:
    """Seed torch's global CPU generator inside the block and put it back after: initial weights draw from it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def mix_bits(x: Tensor) -> Tensor:
    """Hash 32-bit integers held in int64 tensors (the 'lowbias32' finaliser): the same bits on every device."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
