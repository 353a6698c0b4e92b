"""A linear layer's weight gradient and its whole update in one pass over the weights.

The gradient d^T x of a worker is made tile by tile and used at once: the weights and the momentum are read and written
once, and no gradient of their size is ever stored. Where Triton is missing, or for float64, torch does the same.
"""

from math import prod
from typing import Protocol

import torch
from torch import Tensor

from manyheads.engine.cuda_graphs.descent import Rule, descend_
from manyheads.engine.cuda_graphs.rows import Part


class Update(Protocol):
    def __call__(
        self, part: Part, layer: str, d: Tensor, x: Tensor, factor: Tensor, count: Tensor, rate: Tensor, *, bias: bool
    ) -> None:
        """Move a layer's first A rows along the gradient of its outputs d [A, B, out] and inputs x [A, B, in].

        ``factor`` [A] is the clip's, ``rate`` [1]; rows whose ``count`` [A] is 0 stay.
        """
        ...


def layer_update(rule: Rule, device: torch.device, dtype: torch.dtype, *, triton: bool, tensor_cores: bool) -> Update:
    """The fastest way to do it here."""
    if triton and device.type == "cuda" and dtype == torch.float32:
        try:
            from manyheads.engine.cuda_graphs.fused_kernel import triton_update
        except ImportError:
            return plain_update(rule)
        return triton_update(rule, tensor_cores=tensor_cores)
    return plain_update(rule)


def plain_update(rule: Rule) -> Update:
    """With torch's operations."""

    def update(
        part: Part, layer: str, d: Tensor, x: Tensor, factor: Tensor, count: Tensor, rate: Tensor, *, bias: bool
    ) -> None:
        d, x = d.to(part.weight.dtype), x.to(part.weight.dtype)
        gradients = {f"{layer}.weight": torch.bmm(d.mT, x).flatten(1)}
        if bias:
            gradients[f"{layer}.bias"] = d.sum(1)
        for name, gradient in gradients.items():
            first = part.layout.offsets[name]
            here = slice(first, first + prod(part.layout.shapes[name]))
            flats = (part.momentum, part.anchor, part.mask, None if part.compute is part.weight else part.compute)
            others = [None if flat is None else flat[: len(d), here] for flat in flats]
            weight, active = part.weight[: len(d), here], (count > 0).unsqueeze(1)
            descend_(weight, gradient * factor.unsqueeze(1), rate, rule, None, active, *others)

    return update
