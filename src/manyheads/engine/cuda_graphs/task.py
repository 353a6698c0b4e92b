"""What a trainer is given for one phase of one round, and what every trainer can do."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from manyheads.engine.phase import Phase
from manyheads.engine.schedule import Schedule
from manyheads.tree import Buffers, Params


@dataclass(frozen=True)
class Task:
    """Train the plan's workers from their rows of ``params`` and ``buffers`` into ``moved`` and ``tracked``."""

    plan: Schedule
    phase: Phase
    params: Params
    buffers: Buffers
    moved: Params
    tracked: Buffers


class Trainer(Protocol):
    """The recordings of one kind of phase."""

    def record(self, plan: Schedule) -> None:
        """Record what the plan needs and has not been recorded yet. This overwrites the trainer's rows."""
        ...

    def run(self, task: Task) -> Tensor:
        """Run a task whose plan is recorded; gives the sums of the workers' losses, in the plan's order [W']."""
        ...
