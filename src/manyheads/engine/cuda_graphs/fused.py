"""A layer's whole update in one pass over its weights, without storing the gradient of a linear layer.

A worker's gradient d^T x is computed tile by tile and used at once: weights and momentum are read and written once, and
no gradient of their size is stored. Without Triton or compiling, and for float64, torch's own operations do the same
with a stored gradient.
"""

from math import prod
from typing import Protocol

import torch
from torch import Tensor

from manyheads.engine.cuda_graphs.descent import UpdateRule, descend_
from manyheads.engine.cuda_graphs.rows import Part


class Update(Protocol):
    """Moves the first A rows of leaves.

    ``clip`` [A]: what gradients are multiplied by; ``rate`` [1]. A row whose ``count`` [A] is 0 stays as it is.
    """

    def by_factors(
        self, part: Part, layer: str, d: Tensor, x: Tensor, clip: Tensor, count: Tensor, rate: Tensor, *, bias: bool
    ) -> None:
        """Move a linear layer along its gradient d^T x: output gradients d [A, B, out], inputs x [A, B, in]."""
        ...

    def by_gradient(self, part: Part, name: str, gradient: Tensor, clip: Tensor, count: Tensor, rate: Tensor) -> None:
        """Move a leaf along its gradient [A, numbers], which has the order of the leaf's numbers in a row."""
        ...


def layer_update(
    rule: UpdateRule, device: torch.device, dtype: torch.dtype, *, triton: bool, tensor_cores: bool
) -> Update:
    """The fastest update that works here."""
    if triton and device.type == "cuda" and dtype == torch.float32:
        try:
            from manyheads.engine.cuda_graphs.fused_kernel import TritonUpdate
        except ImportError:
            return PlainUpdate(rule)
        return TritonUpdate(rule, tensor_cores=tensor_cores)
    return PlainUpdate(rule)


class PlainUpdate:
    """With torch's operations."""

    def __init__(self, rule: UpdateRule) -> None:
        self.rule = rule

    def by_factors(
        self, part: Part, layer: str, d: Tensor, x: Tensor, clip: Tensor, count: Tensor, rate: Tensor, *, bias: bool
    ) -> None:
        d, x = d.to(part.weight.dtype), x.to(part.weight.dtype)
        self.by_gradient(part, f"{layer}.weight", torch.bmm(d.mT, x).flatten(1), clip, count, rate)
        if bias:
            self.by_gradient(part, f"{layer}.bias", d.sum(1), clip, count, rate)

    def by_gradient(self, part: Part, name: str, gradient: Tensor, clip: Tensor, count: Tensor, rate: Tensor) -> None:
        first, rows = part.layout.offsets[name], slice(len(gradient))
        here = slice(first, first + prod(part.layout.shapes[name]))
        flats = (part.momentum, part.anchor, part.mask, None if part.compute is part.weight else part.compute)
        others = [None if flat is None else flat[rows, here] for flat in flats]
        clipped, active = gradient.to(part.weight.dtype) * clip.unsqueeze(1), (count > 0).unsqueeze(1)
        descend_(part.weight[rows, here], clipped, rate, self.rule, None, active, *others)
