"""How the bytes of images become the inputs of a net, kept for those who use the net later."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

_FAR = 10
"""Floats so many times as large as any input are not inputs."""


@dataclass(frozen=True)
class Pixels:
    """Every byte becomes (byte / scale - mean) / std, with the mean and std of its channel."""

    scale: int = 255
    """The highest byte."""
    mean: Sequence[float] = (0.0,)
    """Of each channel, or one for all."""
    std: Sequence[float] = (1.0,)

    def __post_init__(self) -> None:
        # Files hold lists: the same pixels are equal, wherever they come from.
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def __str__(self) -> str:
        if set(self.mean) == {0} and set(self.std) == {1}:
            return f"byte / {self.scale}"
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
        return f"(byte / {self.scale} - mean) / std with mean {mean} and std {std}"

    def can_give(self, x: Tensor) -> bool:
        """Whether floats [samples, ...] may be such inputs: not if they are as large as the bytes themselves."""
        highest = max(abs((end - mean) / std) for end, mean, std in product((0, 1), self.mean, self.std))
        return x.abs().max().item() <= _FAR * highest

    def to_inputs_(self, x: Tensor) -> Tensor:
        """Turn bytes [samples, channels, ...], given as floats, into inputs, in place."""
        mean, std = (
            torch.tensor(values, dtype=x.dtype).view(-1, *[1] * (x.ndim - 2)) for values in (self.mean, self.std)
        )
        return x.div_(self.scale).sub_(mean).div_(std)
