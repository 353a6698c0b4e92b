"""Which process hosts which workers, and which rows must therefore cross from one process to another."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from manyheads.errors import UserError
from manyheads.network.base import links
from manyheads.topology import Rows
from manyheads.units import counted

Placement = tuple[range, ...]
"""The workers that each process hosts, by rank."""


def blocks(load: Sequence[int], num_processes: int) -> Placement:
    """Contiguous blocks of at least one worker, with loads (such as numbers of samples) as equal as possible."""
    num_workers = len(load)
    if num_processes > num_workers:
        raise UserError(f"{num_processes} processes for {counted(num_workers, 'worker')}: start at most {num_workers}.")
    before = np.cumsum([0, *load])
    ends = [0]
    for rank in range(1, num_processes):
        nearest = int(np.abs(before - before[-1] * rank / num_processes).argmin())
        ends.append(min(max(nearest, ends[-1] + 1), num_workers - (num_processes - rank)))
    return tuple(range(a, b) for a, b in pairwise([*ends, num_workers]))


def owners(placement: Placement, num_workers: int) -> np.ndarray:
    """The process that hosts each worker, [N]; -1: none does."""
    owner = np.full(num_workers, -1)
    for rank, workers in enumerate(placement):
        owner[workers.start : workers.stop] = rank
    return owner


def crossings(matrix: Rows, owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows that mixing by P sends to other processes, each at most once to a process: (destinations, workers).

    Sorted by destination and worker, so that both ends agree on what stands where in a message.
    """
    senders, receivers = links(matrix)
    crossing = owner[senders] != owner[receivers]
    pairs = np.unique(owner[receivers[crossing]] * len(owner) + senders[crossing])
    return np.divmod(pairs, len(owner))
