"""Which process hosts which workers, and which rows must therefore cross from one process to another."""

from itertools import pairwise

import numpy as np

from manyheads.errors import UserError
from manyheads.network.base import links
from manyheads.topology import Rows

Placement = tuple[range, ...]
"""The workers that each process hosts, by rank."""


def blocks(num_workers: int, num_processes: int) -> Placement:
    """Contiguous blocks, as even as can be."""
    if num_processes > num_workers:
        raise UserError(f"{num_processes} processes for {num_workers} workers: start at most {num_workers}.")
    ends = [num_workers * rank // num_processes for rank in range(num_processes + 1)]
    return tuple(range(a, b) for a, b in pairwise(ends))


def owners(placement: Placement, num_workers: int) -> np.ndarray:
    """The process that hosts each worker, [N]; -1: none does."""
    owner = np.full(num_workers, -1)
    for rank, workers in enumerate(placement):
        owner[workers.start : workers.stop] = rank
    return owner


def crossings(matrix: Rows, owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows that mixing by P sends to other processes, each once a process: (destinations, workers).

    In the order of destination and worker, so that both ends agree on what lies where in a message.
    """
    senders, receivers = links(matrix)
    crossing = owner[senders] != owner[receivers]
    pairs = np.unique(owner[receivers[crossing]] * len(owner) + senders[crossing])
    return np.divmod(pairs, len(owner))
