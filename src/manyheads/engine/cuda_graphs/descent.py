"""One step of gradient descent on flat rows; the rate is in device memory, so that a new one needs no new recording."""

from dataclasses import dataclass

import torch
from torch import Tensor

from manyheads.engine.cuda_graphs.compiled import compiled
from manyheads.engine.cuda_graphs.rows import Extras, FlatRows
from manyheads.engine.phase import Phase
from manyheads.engine.sgd import clip_factors


@dataclass(frozen=True)
class UpdateRule:
    """The numbers of an update that are fixed in a recording: all but the rate."""

    momentum: float
    weight_decay: float
    clip: float | None
    pull: float
    """Lambda of the proximal term; 0: none."""

    @staticmethod
    def of(phase: Phase) -> "UpdateRule":
        sgd = phase.optimizer
        return UpdateRule(
            sgd.momentum, sgd.weight_decay, sgd.clip, 0.0 if phase.proximal is None else phase.proximal[1]
        )


def extras(phase: Phase, *, gradient: bool) -> Extras:
    """What has to be kept beside the weights that a phase moves."""
    return Extras(gradient, phase.optimizer.momentum > 0, phase.proximal is not None, phase.mask is not None)


def descend_(
    weight: Tensor,
    gradient: Tensor,
    rate: Tensor,
    rule: UpdateRule,
    norms: Tensor | None = None,
    active: Tensor | None = None,
    momentum: Tensor | None = None,
    anchor: Tensor | None = None,
    mask: Tensor | None = None,
    copy: Tensor | None = None,
) -> None:
    """Move weights [R, numbers] in place, and ``copy`` with them.

    ``norms`` [parts, R] are the gradient norms of all parts, for the clip. A row that is not ``active`` [R, 1] keeps
    its weights; its momentum changes, but is not used again. Written so that it compiles to one pass over memory.
    """
    direction = gradient.to(weight.dtype)
    if norms is not None and rule.clip is not None:
        direction = direction * clip_factors(norms.square().sum(0), rule.clip).unsqueeze(1)
    if rule.weight_decay:
        direction = direction + rule.weight_decay * weight
    if momentum is not None:
        direction = momentum.mul_(rule.momentum).add_(direction)
    if anchor is not None:
        direction = direction + rule.pull * (weight - anchor)
    moved = weight - rate * direction
    if mask is not None:
        moved = moved * mask
    if active is not None:
        moved = torch.where(active, moved, weight)
    weight.copy_(moved)
    if copy is not None:
        copy.copy_(moved)


class FlatDescent:
    """The update of rows whose gradients lie in flat memory."""

    def __init__(self, rule: UpdateRule, rate: Tensor, *, compile: bool) -> None:
        self.rule, self.rate = rule, rate
        self.update = compiled(descend_, compile)

    def step(self, rows: FlatRows, active: Tensor | None = None) -> None:
        """Clip, then move every part; ``active`` [R, 1]: the rows that move; None: all."""
        moving = [(part, part.gradient) for part in rows.parts if part.gradient is not None]
        norms = None
        if self.rule.clip is not None:
            norms = torch.stack([torch.linalg.vector_norm(g, dim=1, dtype=part.weight.dtype) for part, g in moving])
        for part, gradient in moving:
            copy = None if part.compute is part.weight else part.compute
            beside = (norms, active, part.momentum, part.anchor, part.mask, copy)
            self.update(part.weight, gradient, self.rate, self.rule, *beside)
