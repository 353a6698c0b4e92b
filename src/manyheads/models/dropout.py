"""Dropout whose mask is a hash of (key, element): the same on every engine, device and batch size."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from manyheads.randomness import hashed


class Dropout(nn.Module):
    """nn.Dropout without a generator: the engine gives every layer a new ``key`` in every step."""

    key: Tensor
    """A number of 63 bits, int64 []; under vmap one per worker."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.number = 0
        """Its place among the dropout layers of the net that is trained."""
        self.register_buffer("key", torch.tensor(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, ...] -> [B, ...]; in eval mode the input itself."""
        if not self.training or self.p == 0:
            return x
        return x * dropout_mask(self.key, x.shape, self.p, x.dtype, x.device)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def dropouts(net: nn.Module) -> dict[str, Dropout]:
    """The dropout layers by name."""
    return {name: module for name, module in net.named_modules() if isinstance(module, Dropout)}


def dropout_mask(key: Tensor, shape: Sequence[int], p: float, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros, and 1 / (1 - p) where an element is kept: one key [] -> [*shape], keys [W] -> [W, *shape].

    ``shape`` is [B, ...]. Row b is the same for every B, and a worker's mask the same alone and in a stack.

    The element at place e of row b is kept where a_b f_e + c_b modulo 2^32 reaches p 2^32, with a_b and c_b hashed from
    the key and the row, f_e from the key and the place: only these are hashed, and the passes over all elements are of
    the kind that processors do on whole vectors of int32 (a comparison is not).
    """
    batch, width = shape[0], prod(shape[1:])
    dropped = round(p * 2**32)
    if not 0 < dropped < 2**32:
        return torch.full((*key.shape, *shape), float(dropped == 0), dtype=dtype, device=device)
    bits = hashed(key.to(device), width + batch)
    low, high = bits.to(torch.int32), (bits[..., width:] >> 32).to(torch.int32)
    factor, place = low[..., width:].unsqueeze(-1), low[..., :width].unsqueeze(-2)
    mixed = (factor * place).add_(high.unsqueeze(-1))
    first_kept = dropped - 2**31
    kept = mixed.clamp(first_kept - 1, first_kept).sub_(first_kept - 1)
    return kept.to(dtype).mul_(1 / (1 - p)).view(*key.shape, *shape)
