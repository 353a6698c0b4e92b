"""What a kernel is: code that trains the stacked rows of a few workers in place, one mini-batch of each at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from manyheads.engine.batches import dropout_key
from manyheads.engine.phase import Phase
from manyheads.models.dropout import Dropout
from manyheads.models.norm import BatchNorm
from manyheads.models.split import Split
from manyheads.tree import Buffers, Params, group


@dataclass(frozen=True)
class Batch:
    """One mini-batch of each of the first A workers of a chunk."""

    x: Tensor
    """[A, B, ...]."""
    y: Tensor
    """[A, B, ...]."""
    weight: Tensor | None
    """[A, B]: 1 for a sample, 0 for padding; None: no padding."""
    count: Tensor
    """True batch sizes [A]."""
    dropout_base: Tensor
    """[A] int64."""
    step: int


class Kernel(Protocol):
    """Trains one chunk of workers in one phase."""

    padded: ClassVar[bool]
    """Whether short batches come padded to one width."""

    def __init__(
        self, model: Split, phase: Phase, params: Params, buffers: Buffers, dropout_layers: dict[str, int]
    ) -> None: ...

    def step(self, batch: Batch) -> Tensor:
        """Move the first A rows of ``params`` and ``buffers`` in place; the sums of their losses, [A]."""
        ...


def set_modes(model: Split, phase: Phase) -> None:
    """Train mode for what moves; a frozen representation as the phase says, its running statistics left alone."""
    model.train()
    if "representation" not in phase.update:
        model.representation.train(phase.frozen == "train")
    for name, module in model.named_modules():
        if isinstance(module, BatchNorm):
            module.track = group(name) in phase.update


def dropouts(model: nn.Module) -> dict[str, Dropout]:
    """The dropout layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Dropout)}


def dropout_keys(layers: Mapping[str, int], names: list[str], base: Tensor, step: int | Tensor) -> dict[str, Tensor]:
    """Each named dropout layer's keys [A] in one step."""
    return {name: dropout_key(base, step, layers[name]) for name in names}


def point_at(model: nn.Module, params: Params, buffers: Buffers, row: int) -> None:
    """Let the module's tensors be one worker's row: what changes them in place changes the row."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.data = params[name][row]
        for name, buffer in model.named_buffers():
            if name in buffers:
                buffer.data = buffers[name][row]


def per_sample(constants: Params, batch_size: int) -> Params:
    """Constants [A, ...] as one row per sample, [A * B, ...]."""
    return {
        name: leaf.unsqueeze(1).expand(-1, batch_size, *leaf.shape[1:]).flatten(0, 1)
        for name, leaf in constants.items()
    }


def stacked_losses(phase: Phase, outputs: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
    """The number to differentiate and the sums of the losses [A], from outputs [A, B, ...].

    The first is the sum over workers of each one's mean loss: its gradient in a worker's row is that worker's alone.
    """
    active, size = batch.x.shape[:2]
    constants = per_sample({name: leaf[:active] for name, leaf in phase.constants.items()}, size)
    flat = {name: output.flatten(0, 1) for name, output in outputs.items()}
    losses = phase.objective(flat, batch.y.flatten(0, 1), constants).view(active, size)
    if batch.weight is not None:
        losses = losses * batch.weight
    sums = losses.sum(1)
    return (sums / batch.count).sum(), sums.detach()
