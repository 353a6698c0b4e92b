"""Convolutions and poolings of many workers' images [A, B, H, W, C]: products over patches, maxima over windows."""

from functools import reduce

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

_ALIGNMENT = 8
"""Rows of a product are so many numbers wide, or a multiple: fast kernels load 16 bytes at once."""


def has_patches(conv: nn.Conv2d) -> bool:
    """Whether the convolution is a product over patches: neither grouped nor dilated, zeros around the image."""
    plain = conv.groups == 1 and conv.dilation == (1, 1) and conv.padding_mode == "zeros"
    return plain and not isinstance(conv.padding, str)


def has_windows(pool: nn.MaxPool2d) -> bool:
    """Whether the windows lie side by side."""
    sizes = (_pair(pool.kernel_size), _pair(pool.padding), _pair(pool.dilation))
    side_by_side = sizes == (_pair(pool.stride), (0, 0), (1, 1))
    return side_by_side and not pool.ceil_mode and not pool.return_indices


def matrix(weight: Tensor) -> Tensor:
    """Filters [A, out, C, kh, kw] -> [A, out, kh kw C], a view of channels-last ones, padded as patches are."""
    return _aligned(weight.permute(0, 1, 3, 4, 2).flatten(2))


def patches(x: Tensor, conv: nn.Conv2d) -> tuple[Tensor, tuple[int, int]]:
    """What each filter sees at each position [A, B H' W', kh kw C and padding], and (H', W')."""
    (top, left), (height, width), (down, right) = _sizes(conv)
    x = pad(x, (0, 0, left, left, top, top))
    x = x.unfold(2, height, down).unfold(3, width, right)
    size = (x.shape[2], x.shape[3])
    return _aligned(x.permute(0, 1, 2, 3, 5, 6, 4).flatten(1, 3).flatten(2)), size


def from_patches(d: Tensor, conv: nn.Conv2d, x_size: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Each position's sum [A, B, H, W, C] over the patches [A, B H' W', kh kw C and padding] it is in."""
    (top, left), (height, width), (down, right) = _sizes(conv)
    d = d[..., : height * width * conv.in_channels].unflatten(1, (-1, *size)).unflatten(4, (height, width, -1))
    shifted = []
    for i in range(height):
        for j in range(width):
            part = _spread(_spread(d[..., i, j, :], 2, down), 3, right)
            below, after = x_size[0] + 2 * top - i - part.shape[2], x_size[1] + 2 * left - j - part.shape[3]
            shifted.append(pad(part, (0, 0, j, after, i, below)))
    return reduce(torch.add, shifted)[:, :, top : top + x_size[0], left : left + x_size[1]]


def pool(x: Tensor, layer: nn.MaxPool2d) -> Tensor:
    """Each window's largest number: [A, B, H, W, C] -> [A, B, H', W', C]."""
    return reduce(torch.maximum, _windows(x, layer))


def unpool(d: Tensor, x: Tensor, layer: nn.MaxPool2d) -> Tensor:
    """The gradient goes to the first of each window's largest numbers, as in torch.

    Numbers are compared with each other, not with the result of ``pool``, which compiled code may have rounded.
    """
    places, parts = _windows(x, layer), []
    for k, place in enumerate(places):
        first = [place > other for other in places[:k]]
        largest = [place >= other for other in places[k + 1 :]]
        parts.append(d.where(reduce(torch.logical_and, first + largest, torch.ones_like(place, dtype=torch.bool)), 0))
    height, width = _pair(layer.kernel_size)
    whole = torch.stack(parts, 0).unflatten(0, (height, width)).permute(2, 3, 4, 0, 5, 1, 6).flatten(4, 5).flatten(2, 3)
    return pad(whole, (0, 0, 0, x.shape[3] - whole.shape[3], 0, x.shape[2] - whole.shape[2]))


def _windows(x: Tensor, layer: nn.MaxPool2d) -> list[Tensor]:
    """Each window's first number, its second, ...: [A, B, H', W', C] each."""
    height, width = _pair(layer.kernel_size)
    down, right = x.shape[2] // height * height, x.shape[3] // width * width
    return [x[:, :, i:down:height, j:right:width] for i in range(height) for j in range(width)]


def _spread(x: Tensor, dim: int, stride: int) -> Tensor:
    """Put zeros after each number along an axis, so that steps of ``stride`` become steps of one."""
    if stride == 1:
        return x
    behind = x.unsqueeze(dim + 1)
    return pad(behind, (0, 0) * (x.ndim - dim - 1) + (0, stride - 1)).flatten(dim, dim + 1)


def _aligned(rows: Tensor) -> Tensor:
    """Pad the last axis with zeros to a multiple of the alignment."""
    missing = -rows.shape[-1] % _ALIGNMENT
    return pad(rows, (0, missing)) if missing else rows


def _sizes(conv: nn.Conv2d) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """(padding), (kernel), (stride), each of height and width."""
    assert not isinstance(conv.padding, str)
    return _pair(conv.padding), _pair(conv.kernel_size), _pair(conv.stride)


def _pair(size: int | tuple[int, ...]) -> tuple[int, int]:
    """A layer's size of height and width; torch also takes one number for both, alone or in a tuple."""
    return (size, size) if isinstance(size, int) else (size[0], size[-1])
