"""A simulated clock: how long a run would take if every worker were a machine of its own.

A round lasts as long as the mini-batches of the slowest worker, and then as long as its messages. A mini-batch of a
phase that leaves the representation as it is counts a third, its forward pass. Every worker has one
link to the others, which carries both ways at once: all that it sends in a round shares the link, and so does all that
it receives, so that twice the neighbours take twice the time; messages of different workers travel at the same time.
With a server all uploads share the server's link, and then all downloads do. No real time enters: the same experiment
takes the same simulated time everywhere.
"""

import copy
import time
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from manyheads.algorithms.base import Log
from manyheads.models.split import Split
from manyheads.network.base import Network
from manyheads.threads import one_thread

_MEASURED_STEPS = 9


@dataclass(frozen=True)
class Speed:
    """How fast the machines and the links between them are."""

    step_seconds: float
    """A worker's time for one mini-batch that trains its whole net."""
    latency: float
    """Seconds that every message takes, however short."""
    bandwidth: float
    """Bytes a second that a link carries each way."""
    server: bool
    """Whether messages go through a server."""

    def round_seconds(self, steps: np.ndarray, sent: np.ndarray, received: np.ndarray) -> float:
        """One round, from each worker's training steps and bytes in it, [N] each."""
        return self.step_seconds * float(steps.max()) + self._message_seconds(sent, received)

    def _message_seconds(self, sent: np.ndarray, received: np.ndarray) -> float:
        if not (sent.any() or received.any()):
            return 0.0
        if self.server:
            return 2 * self.latency + int(sent.sum() + received.sum()) / self.bandwidth
        return self.latency + int(np.maximum(sent, received).max()) / self.bandwidth


class Clock:
    """The simulated seconds of a run so far; told of every round when it ends."""

    def __init__(self, speed: Speed, network: Network, seconds: float = 0.0) -> None:
        self.speed, self.network, self.seconds = speed, network, seconds
        self._counted = network.traffic.table()

    def tick(self, log: Log) -> None:
        """Add the round that has just ended."""
        traffic = self.network.traffic.table()
        steps = sum((work.share * work.steps.double() for work in log.values()), torch.zeros(len(traffic)).double())
        here = torch.cat([steps.unsqueeze(1), traffic - self._counted], dim=1)
        self._counted = traffic
        self.seconds += self.speed.round_seconds(*self.network.gather(here).numpy().T)


def measure_step_seconds(model: Split, x: torch.Tensor) -> float:
    """Seconds that one training step on samples ``x`` takes on one core of this machine: the median of a few."""
    net = copy.deepcopy(model).train()
    x = x.to(next(net.parameters()).dtype)
    descent = torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9)

    def timed_step() -> float:
        began = time.thread_time()
        descent.zero_grad()
        net(x).square().mean().backward()
        descent.step()
        return time.thread_time() - began

    with one_thread():
        timed_step()
        return median(timed_step() for _ in range(_MEASURED_STEPS))
