"""The small language between algorithms and engines: what one stretch of local training is, and what comes back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal, Protocol

import torch
from torch import Tensor

from manyheads.checks import field_kinds, shown
from manyheads.data.shards import Shards
from manyheads.errors import UserError
from manyheads.tree import Buffers, Params, select


@dataclass(frozen=True)
class _Amount:
    """A whole number of at least 0: with any other a phase would never end."""

    count: int

    def __post_init__(self) -> None:
        if not isinstance(self.count, Integral) or self.count < 0:
            given = f"{type(self).__name__}({shown(self.count)})"
            raise UserError(f"{given} is not an amount of training: give a whole number of at least 0.")


class Epochs(_Amount):
    """Whole passes over a worker's own samples, in an order drawn anew for each pass."""


class Steps(_Amount):
    """A number of mini-batches, the same for every worker, out of as many passes as that takes."""


@dataclass(frozen=True)
class SGD:
    """Gradient descent: clip, then weight decay, then momentum, which starts at zero in every phase."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    """Largest norm of one worker's gradient over all the tensors the phase updates."""


Loss = Callable[[Tensor, Tensor], Tensor]
"""(output [samples, ...], target [samples, ...]) -> loss [samples]."""

Objective = Callable[[dict[str, Tensor], Tensor, Params], Tensor]
"""(outputs by head, each [samples, ...]; targets [samples]; constants, each [samples, ...]) -> loss [samples].

The rows are samples of any number of workers; an objective looks at each row by itself.
"""


@dataclass(frozen=True)
class Phase:
    """One stretch of local training, the same for every worker."""

    stream: str
    """Names the random stream: ``head`` for head phases, ``body`` for every other, or a name of the algorithm's own."""
    update: frozenset[str]
    """The groups that move, each with the BatchNorm statistics in it. All others are frozen."""
    amount: Epochs | Steps
    optimizer: SGD
    objective: Objective
    constants: Params = field(default_factory=dict)
    """Per-worker tensors the objective reads, e.g. class counts [W, C]."""
    proximal: tuple[Params, float] | None = None
    """Anchor and lambda: pulls towards the anchor, outside the clip and the momentum buffer."""
    mask: Params | None = None
    """Zeros and ones [W, ...] by name: a masked weight is put back to zero after every step."""
    frozen: Literal["train", "eval"] = "train"
    """How a frozen representation runs: in train mode as in the paper, or in eval mode."""
    name: str = ""
    """What a round's log calls it; empty: as its stream."""

    def __post_init__(self) -> None:
        pull: object = self.proximal
        if pull is not None and not (isinstance(pull, tuple) and len(pull) == 2 and isinstance(pull[0], dict)):
            raise UserError(
                "proximal of a phase must be an anchor and its strength: give both, as in (state.params, 0.1)."
            )
        for name, kind in field_kinds(Phase).items():
            kind.check(f"{name} of a phase", getattr(self, name))

    def check_rows(self, params: Params, num_workers: int) -> None:
        """Refuse an anchor, mask or constants that do not fit the workers: they would broadcast, or be ignored."""
        moving, mask = select(params, self.update), self.mask or {}
        anchor = moving if self.proximal is None else self.proximal[0]
        for what, names, leaves in (("proximal", moving, anchor), ("mask", mask, mask)):
            for name in names:
                given, meant = _form(leaves.get(name)), _form(params.get(name))
                if given != meant:
                    raise UserError(
                        f"{what} of a phase has {given} for {name}, but the workers have {meant}: give each of its"
                        " leaves the name and shape of the one it is for."
                    )
        for name, leaf in self.constants.items():
            if not (isinstance(leaf, Tensor) and leaf.shape[:1] == (num_workers,)):
                raise UserError(
                    f"constants of a phase has {_form(leaf)} for {name}: give a tensor with a row for each of the"
                    f" {num_workers} workers here, [{num_workers}, ...]."
                )


def _form(leaf: object) -> str:
    return str(list(leaf.shape)) if isinstance(leaf, Tensor) else "nothing" if leaf is None else shown(leaf)


@dataclass(frozen=True)
class Fit:
    """What a phase gives back."""

    params: Params
    buffers: Buffers
    loss: Tensor
    """Mean loss over the samples each worker saw, [W]; NaN where a worker saw none, infinite where it is no number."""


@dataclass(frozen=True)
class Evaluation:
    """Per worker: mean metric and mean loss, each [W]; NaN without samples."""

    metric: Tensor
    loss: Tensor


@dataclass
class Progress:
    """How far a phase has come, for people who wait: mini-batches, over all hosted workers; nothing when it is over."""

    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        return f"{self.done:,} of {self.total:,} mini-batches" if self.done < self.total else ""


EngineName = Literal["auto", "loop", "batched", "cuda-graphs"]
"""What a user may ask for; ``auto`` is the fastest of the others."""

PrecisionName = Literal["float64", "float32", "tf32", "bf16"]
"""The number format of a training; only GPUs have tf32 and bf16."""


class Engine(Protocol):
    """How local phases run: the only code that touches forward and backward. Pure: no argument is changed."""

    name: str
    progress: Progress
    """Stays empty in engines whose phases are too short to show."""

    def place(self, leaves: Params) -> Params:
        """Leaves put where the workers' rows are kept."""
        ...

    def fit(self, params: Params, buffers: Buffers, phase: Phase, round: int, *, workers: Tensor | None = None) -> Fit:
        """Train every hosted worker, or those whose rows are in ``workers``; the other rows come back unchanged."""
        ...

    def evaluate(self, params: Params, buffers: Buffers, shards: Shards) -> Evaluation:
        """Metric and loss of every worker's model in eval mode on its own shard."""
        ...

    def gradient(
        self, params: Params, buffers: Buffers, phase: Phase, round: int, *, batches: Steps | None = None
    ) -> Params:
        """The gradient of the phase's objective in the phase's groups, in eval mode, [W, ...].

        Over each worker's whole shard, or over the mean of the stream's first mini-batches.
        """
        ...


def single_head(loss: Loss) -> Objective:
    """The objective of a net with one head: its loss on that head's output."""

    def objective(outputs: dict[str, Tensor], y: Tensor, constants: Mapping[str, Tensor]) -> Tensor:
        return loss(outputs["head"], y)

    return objective


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of class scores [samples, classes] against labels [samples] -> [samples]."""
    return torch.nn.functional.cross_entropy(output, y, reduction="none")


def accuracy(output: Tensor, y: Tensor) -> Tensor:
    """1 where the highest score is the label's, else 0: [samples, classes], [samples] -> [samples]."""
    return (output.argmax(-1) == y).to(output.dtype)
