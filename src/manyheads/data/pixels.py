"""How the bytes of images become the inputs of a net, kept for those who use the net later."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pixels:
    """Every byte becomes (byte / scale - mean) / std, with the mean and std of its channel."""

    scale: int = 255
    """The highest byte."""
    mean: Sequence[float] = (0.0,)
    """Of each channel, or one for all."""
    std: Sequence[float] = (1.0,)

    def to_inputs_(self, x: Tensor) -> Tensor:
        """Turn bytes [samples, channels, ...], given as floats, into inputs, in place."""
        mean, std = (torch.tensor(values).view(-1, *[1] * (x.ndim - 2)) for values in (self.mean, self.std))
        return x.div_(self.scale).sub_(mean).div_(std)
