"""The network protocol: the only way workers exchange anything."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from manyheads.errors import UserError
from manyheads.topology import Rows
from manyheads.tree import Params, flatten, group


class Network(Protocol):
    """Exchanges rows between the workers of one run, wherever they are hosted."""

    num_workers: int
    workers: range
    """The workers this process hosts, in the order of their rows."""
    traffic: "Traffic"
    may_gather_private: bool
    """Whether metrics may look at what is private to a worker, as they may in a simulation."""

    def mix(self, params: Params, round: int, mask: Params | None = None) -> Params:
        """Row i becomes sum_j P_ij x_j; with a mask, sum_j P_ij x_j / sum_j P_ij m_j, and 0 where that is 0 / 0.

        ``params`` may be empty, as for groups without parameters: then nothing is sent.
        """
        ...

    def average(self, params: Params, weights: np.ndarray) -> Params:
        """Every row becomes sum_j w_j x_j / sum_j w_j: a parameter server. Who has weight 0 takes no part."""
        ...

    def gather(self, values: Tensor) -> Tensor:
        """Values [hosted workers, ...] of every process, in worker order: [N, ...]. For metrics and sizes only."""
        ...

    def mean(self, params: Params) -> Params:
        """The mean row over all workers, [...] in double precision. For metrics only."""
        ...

    def present(self, round: int) -> np.ndarray:
        """Who takes part in a round on the communication graph, [N] bool."""
        ...


class Traffic:
    """Bytes that crossed the logical links so far, per hosted worker, and what the transport was handed."""

    def __init__(self, workers: range) -> None:
        self.workers = workers
        self.sent = np.zeros(len(workers), dtype=np.int64)
        self.received = np.zeros(len(workers), dtype=np.int64)
        self.on_wire = 0
        """Payload this process has handed to torch.distributed in ``mix`` and ``average``."""

    def count(self, senders: np.ndarray, receivers: np.ndarray, sizes: np.ndarray) -> None:
        """Count a message over each link [links], of the size of its sender's message [N]."""
        for ends, counts in ((senders, self.sent), (receivers, self.received)):
            here = (ends >= self.workers.start) & (ends < self.workers.stop)
            np.add.at(counts, ends[here] - self.workers.start, sizes[senders[here]])

    def table(self) -> Tensor:
        """A copy of the bytes that each hosted worker has sent and received so far, [W, 2] int64."""
        return torch.from_numpy(np.stack([self.sent, self.received], axis=1))


def links(matrix: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Senders and receivers of every message that mixing by P takes, [links] each."""
    receivers = matrix.receivers
    crossed = receivers != matrix.columns
    return matrix.columns[crossed], receivers[crossed]


def refuse_private(params: Params, private: frozenset[str]) -> None:
    """Private leaves never reach the network: stop before one does."""
    for name in params:
        if group(name) in private:
            raise RuntimeError(f"'{name}' is private to its worker and was about to be sent")


def check_gathered(values: Tensor) -> None:
    """Refuse what is no tensor: one process would give it back as it is, where several would fail."""
    given: object = values
    if not isinstance(given, Tensor):
        raise UserError(
            f"gather takes a tensor [workers, ...] and was given a {type(given).__name__}: give it one leaf at a time."
        )


def message_bytes(params: Params, mask: Params | None) -> np.ndarray:
    """Size of each worker's message [W]: its row, or under a mask the kept values and one bit per weight."""
    sizes = np.zeros(len(next(iter(params.values()))), dtype=np.int64)
    for name, leaf in params.items():
        numbers = leaf[0].numel() if len(leaf) else 0
        if mask is not None and name in mask:
            kept = flatten(mask[name]).count_nonzero(1).cpu().numpy()
            sizes += kept * leaf.element_size() + -(-numbers // 8)
        else:
            sizes += numbers * leaf.element_size()
    return sizes
