"""What a kernel is: code that trains the stacked rows of a few workers in place, one mini-batch of each at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from manyheads.engine.batches import dropout_key
from manyheads.engine.phase import Objective, Phase
from manyheads.models.dropout import Dropout
from manyheads.models.norm import BatchNorm
from manyheads.models.split import Split
from manyheads.tree import Buffers, Params, group

VECTORS = 64
"""Numbers that fill every processor's vectors, of which torch takes up to four at a time."""


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

    def __init__(self, model: Split, phase: Phase, params: Params, buffers: Buffers) -> None: ...

    def step(self, batch: Batch) -> Tensor:
        """Move the first A rows of ``params`` and ``buffers`` in place; the sums of their losses, [A]."""
        ...

    @staticmethod
    def scoring(model: Split, params: Params, buffers: Buffers) -> Callable[[Tensor], Tensor]:
        """The workers' models in eval mode: inputs [A, B, ...] of the first A of them -> outputs [A, B, ...]."""
        ...


def set_modes(model: Split, phase: Phase) -> None:
    """Train mode for what moves; a frozen representation as the phase says, its running statistics left alone."""
    model.train()
    if "representation" not in phase.update:
        model.representation.train(phase.frozen == "train")
    for name, module in model.named_modules():
        if isinstance(module, BatchNorm):
            module.track = group(name) in phase.update


def dropout_keys(layers: Mapping[str, Dropout], base: Tensor, step: int | Tensor) -> dict[str, Tensor]:
    """The keys of dropout layers in one step, by the names of their tensors; each shaped like the workers' bases."""
    return {f"{name}.key": dropout_key(base, step, layer.number) for name, layer in layers.items()}


def point_at(model: nn.Module, params: Params, buffers: Buffers, row: int) -> None:
    """Make the module's tensors views of one worker's row: changing them in place changes the row.

    A row whose numbers lie apart is copied: torch's BatchNorm on a CPU computes wrong gradients with such weights.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.data = params[name][row].contiguous()
        for name, buffer in model.named_buffers():
            if name in buffers:
                buffer.data = buffers[name][row].contiguous()


def in_a_row(stacked: Tensor) -> Tensor:
    """The samples of A workers one after another: [A, B, ...] -> [samples, ...], of which the first A * B are theirs.

    On a CPU torch rounds what it computes in vectors otherwise than the few numbers left at the end, and so would round
    a sample by the workers that come after it. More samples at the end leave nothing over.
    """
    samples = stacked.flatten(0, 1)
    missing = -len(samples) % VECTORS if samples.device.type == "cpu" else 0
    return torch.cat([samples, samples[:1].detach().expand(missing, *samples.shape[1:])]) if missing else samples


def summed_loss(
    objective: Objective, outputs: dict[str, Tensor], y: Tensor, constants: Params, weight: Tensor | None
) -> Tensor:
    """The sum of one worker's losses, each times its sample's weight [B], from outputs [B, ...]; constants [...]."""
    rows = {name: leaf.expand(len(y), *leaf.shape) for name, leaf in constants.items()}
    losses = objective(outputs, y, rows)
    return (losses if weight is None else losses * weight).sum()


def summed_losses(
    objective: Objective, outputs: dict[str, Tensor], y: Tensor, constants: Params, weight: Tensor | None
) -> Tensor:
    """The same of A workers at once, [A], from outputs [A, B, ...]; constants [A, ...]."""
    active, size = y.shape[:2]
    rows = {name: in_a_row(leaf.unsqueeze(1).expand(-1, size, *leaf.shape[1:])) for name, leaf in constants.items()}
    samples = {name: in_a_row(output) for name, output in outputs.items()}
    losses = objective(samples, in_a_row(y), rows)[: active * size].view(active, size)
    return (losses if weight is None else losses * weight).sum(1)
