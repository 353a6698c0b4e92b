"""One step of gradient descent on stacked workers: clip, weight decay, momentum, proximal pull, mask."""

from collections.abc import Sequence
from functools import reduce
from operator import add

import torch
from torch import Tensor

from manyheads.engine.phase import SGD, Phase
from manyheads.tree import Params, by_row, flatten


def one_by_one(terms: Sequence[Tensor]) -> Tensor:
    """The sum of tensors, added one by one: summed over a stack, the number of workers would show in the bits."""
    return reduce(add, terms)


def clip_factors(square_norms: Tensor, limit: float) -> Tensor:
    """What each worker's gradient is multiplied by, [W], from its squared norm [W].

    A sum of products that cancel, as at a minimum, may be rounded to less than zero.
    """
    return (limit / (square_norms.clamp(min=0).sqrt() + 1e-6)).clamp(max=1.0)


def clip_(gradients: Params, limit: float) -> None:
    """Scale each worker's gradient in place so that its norm over all leaves is at most ``limit``."""
    factors = clip_factors(one_by_one([flatten(g).square().sum(1) for g in gradients.values()]), limit)
    for g in gradients.values():
        g.mul_(by_row(factors, g))


def apart(gradients: Params) -> Params:
    """The gradients, each in memory of its own, so that they can be changed in place.

    autograd gives leaves that are added to each other, such as the two biases of an LSTM, one gradient for both; and a
    gradient that is the same number everywhere, such as a mean's, may be that one number, expanded.
    """
    taken: set[int] = set()
    own: Params = {}
    for name, gradient in gradients.items():
        shared = 0 in gradient.stride() or gradient.untyped_storage().data_ptr() in taken
        own[name] = gradient.clone(memory_format=torch.contiguous_format) if shared else gradient
        taken.add(own[name].untyped_storage().data_ptr())
    return own


class Descent:
    """The moving part of one phase on one chunk: its momentum, which starts at zero, and the update rule."""

    def __init__(self, phase: Phase, params: Params) -> None:
        """``params`` [W, ...] are the rows the phase moves; they are changed in place by ``step``."""
        self.sgd: SGD = phase.optimizer
        self.params = params
        self._momentum: Params = {}
        self.proximal, self.mask = phase.proximal, phase.mask

    def step(self, gradients: Params) -> None:
        """Apply gradients [A, ...] to the first A rows. The gradients are used up."""
        gradients = apart(gradients)
        if self.sgd.clip is not None:
            clip_(gradients, self.sgd.clip)
        for name, gradient in gradients.items():
            self.apply(name, gradient)

    def apply(self, name: str, gradient: Tensor) -> None:
        """Everything after the clip, for one leaf."""
        active = len(gradient)
        weight = self.params[name][:active]
        if self.sgd.weight_decay:
            gradient.add_(weight, alpha=self.sgd.weight_decay)
        if self.sgd.momentum:
            gradient = self.momentum(name)[:active].mul_(self.sgd.momentum).add_(gradient)
        self.move(name, gradient)

    def momentum(self, name: str) -> Tensor:
        """A leaf's momentum [W, ...], to be changed in place."""
        if name not in self._momentum:
            self._momentum[name] = torch.zeros_like(self.params[name])
        return self._momentum[name]

    def move(self, name: str, direction: Tensor) -> None:
        """Go one step along ``direction`` [A, ...], with the proximal pull and the mask."""
        active = len(direction)
        weight = self.params[name][:active]
        if self.proximal is not None:
            anchor, strength = self.proximal
            pull = (weight - anchor[name][:active]).mul_(strength)
            weight.sub_(pull, alpha=self.sgd.lr)
        weight.add_(direction, alpha=-self.sgd.lr)
        if self.mask is not None and name in self.mask:
            weight.mul_(self.mask[name][:active])
