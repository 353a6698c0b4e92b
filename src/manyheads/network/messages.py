"""What one worker sends another: its row as bytes; of a masked leaf the kept values and one bit per weight."""

from collections.abc import Collection, Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor

from manyheads.tree import Params, as_uint8

Row = dict[str, Tensor]
"""One worker's leaves, without the worker axis."""


def pack(params: Params, mask: Params, row: int) -> Tensor:
    """The message of one row of ``params`` [W, ...], [bytes] uint8; its length is what ``message_bytes`` says."""
    parts = (_parts(leaf[row], mask[name][row] if name in mask else None) for name, leaf in params.items())
    return torch.cat(list(chain.from_iterable(parts)))


def unpack(message: Tensor, like: Mapping[str, Tensor], masked: Collection[str]) -> tuple[Row, Row]:
    """The row in a message and its mask; ``like`` [W, ...] has the leaves it was packed from, in their order."""
    row, mask, start = {}, {}, 0

    def take(size: int) -> Tensor:
        nonlocal start
        start += size
        return message[start - size : start]

    for name, leaf in like.items():
        shape, dtype, numbers = leaf.shape[1:], leaf.dtype, leaf[0].numel()
        if name not in masked:
            row[name] = _as(take(numbers * dtype.itemsize), dtype).view(shape)
            continue
        kept = unpack_bits(take(-(-numbers // 8)), numbers)
        values = _as(take(int(kept.count_nonzero()) * dtype.itemsize), dtype)
        mask[name] = kept.view(shape)
        row[name] = torch.zeros(numbers, dtype=dtype, device=message.device).masked_scatter_(kept, values).view(shape)
    return row, mask


def pack_bits(bits: Tensor) -> Tensor:
    """Bits [n] bool, eight to a byte, the first in the lowest place: [ceil(n / 8)] uint8."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (padded << _places(bits)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The first ``count`` of packed bits, [count] bool."""
    return ((packed.unsqueeze(1) >> _places(packed)) & 1).flatten()[:count].bool()


def _places(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


def _parts(row: Tensor, mask: Tensor | None) -> Iterator[Tensor]:
    """One leaf's row as bytes; under a mask, which values are kept and then those values."""
    if mask is not None:
        kept = mask.bool()
        yield pack_bits(kept.flatten())
        row = row[kept]
    yield as_uint8(row)


def _as(content: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers. After a bitmap they may begin at any byte; a copy is aligned as numbers must be."""
    aligned = content.storage_offset() % dtype.itemsize == 0
    return (content if aligned else content.clone()).view(dtype)
