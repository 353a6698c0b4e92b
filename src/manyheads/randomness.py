"""Every random draw as a pure function of (seed, worker, round, stream, step, layer): nothing is ever stored."""

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

_WORD = (1 << 64) - 1
_TORCH = threading.RLock()
"""Held while torch's generator, which all threads share, is seeded."""

# SplitMix64's constants as the signed numbers that int64 tensors hold.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def stream_id(stream: str) -> int:
    """A 64-bit number for a stream's name, the same in every process and Python version."""
    return int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "little")


def generator(seed: int, stream: str, *, worker: int = 0, round: int = 0, epoch: int = 0) -> np.random.Generator:
    """A numpy generator whose state is a function of its arguments and of nothing else.

    The lowest word of the counter advances with the draws; the others name the draw, so that no two streams overlap.
    """
    # As uint64 from the start: numpy would take a list of small and large numbers through float64.
    name = np.array([seed & _WORD, stream_id(stream)], dtype=np.uint64)
    draw = np.array([0, worker, round, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=name, counter=draw))


def key(seed: int, stream: str, *, worker: int = 0, round: int = 0) -> int:
    """A 63-bit number, for whatever takes a seed instead of a generator."""
    text = f"{seed}/{stream}/{worker}/{round}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


@contextmanager
def torch_seed(seed: int) -> Iterator[None]:
    """Seed torch's global generators inside the block and put them back after: initial weights draw from them.

    One thread at a time: runs in other threads wait.
    """
    # Before a GPU is used, its generators have no state to put back.
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with _TORCH, torch.random.fork_rng(devices=gpus):
        torch.manual_seed(seed)
        yield


@contextmanager
def every_seed(seed: int) -> Iterator[None]:
    """The same for numpy's and Python's global generators as well, from which the user's own code may draw."""
    with torch_seed(seed):
        ours, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002 (it is put back)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 (the user's code draws from it)
        try:
            yield
        finally:
            random.setstate(ours)
            np.random.set_state(numpys)  # noqa: NPY002 (as above)


def generator_states() -> tuple[object, ...]:
    """The states of the generators that all code of a process shares: torch's on the CPU, Python's and numpy's."""
    with _TORCH:
        _, numbers, *rest = np.random.get_state()  # noqa: NPY002 (it is the user's who may draw from it)
        return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.asarray(numbers).tobytes(), rest


def hashed(key: Tensor, count: int) -> Tensor:
    """The first ``count`` hashes a key names: keys [...] int64 -> [..., count] int64, the same bits on every device.

    SplitMix64 with the key as its seed. The shifts carry the sign, which costs the state a bit or two of its 64 and
    saves a masking pass for each.
    """
    z = torch.add(key.unsqueeze(-1), torch.arange(1, count + 1, device=key.device), alpha=_GOLDEN)
    z = (z ^ (z >> 30)) * _FIRST
    z = (z ^ (z >> 27)) * _SECOND
    return z ^ (z >> 31)
