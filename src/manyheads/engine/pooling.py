"""Max-pooling on CPUs by way of the layout in which torch does it several times as fast, with the same bits."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.engine.images import has_windows
from manyheads.models.layers import replace_layers
from manyheads.models.split import Split, twin

_FEWEST_CHANNELS = 8
"""With fewer, turning the images costs more than pooling them gains."""


def with_fast_pooling(net: Split) -> Split:
    """A copy of the net for one worker at a time on a CPU."""
    fast = twin(net)
    replace_layers(fast, _faster)
    return fast


def _faster(layer: nn.Module) -> nn.Module | None:
    return FastMaxPool2d(layer) if type(layer) is nn.MaxPool2d and has_windows(layer) else None


class FastMaxPool2d(nn.Module):
    """nn.MaxPool2d with windows side by side."""

    def __init__(self, layer: nn.MaxPool2d) -> None:
        super().__init__()
        self.kernel_size = layer.kernel_size

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] < _FEWEST_CHANNELS:
            return F.max_pool2d(x, self.kernel_size)
        if x.requires_grad:
            return _Pooling.apply(x, self.kernel_size)
        return F.max_pool2d(x.contiguous(memory_format=torch.channels_last), self.kernel_size).contiguous()


class _Pooling(torch.autograd.Function):
    """Forward with the channels last; back as torch does it for images as they come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int | tuple[int, int]) -> Tensor:
        turned = x.contiguous(memory_format=torch.channels_last)
        pooled, places = F.max_pool2d(turned, size, return_indices=True)
        ctx.size = size
        ctx.save_for_backward(x, places.contiguous())
        return pooled.contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, places = ctx.saved_tensors
        size = [ctx.size] * 2 if isinstance(ctx.size, int) else list(ctx.size)
        back = torch.ops.aten.max_pool2d_with_indices_backward
        return back(gradients[0], x, size, size, [0, 0], [1, 1], False, places), None
