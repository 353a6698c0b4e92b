"""Convolutions as products over patches and poolings as maxima over windows, against torch's own."""

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d

from manyheads.engine.images import from_patches, has_patches, has_windows, matrix, patches, pool, unpool

CONVOLUTIONS = {
    "like VGG's": (nn.Conv2d(3, 5, 3, padding=1), (6, 7)),
    "with a stride": (nn.Conv2d(3, 5, 3, 2, padding=1), (7, 8)),
    "larger than its step": (nn.Conv2d(2, 4, 11, 4, padding=5), (32, 29)),
    "smaller than its step": (nn.Conv2d(8, 2, 2, 3), (8, 9)),
    "larger than the image": (nn.Conv2d(2, 3, 5, padding=2), (1, 1)),
    "without padding": (nn.Conv2d(1, 2, 3), (6, 6)),
    "of one point": (nn.Conv2d(3, 4, 1), (4, 4)),
    "of unequal sides": (nn.Conv2d(3, 4, (3, 2), (2, 1), padding=(1, 0)), (9, 6)),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_a_convolution_is_a_product_over_patches(kind: str) -> None:
    conv, (height, width) = CONVOLUTIONS[kind]
    assert has_patches(conv)
    torch.manual_seed(0)
    x = torch.randn(3, 2, conv.in_channels, height, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, *conv.weight.shape, dtype=torch.float64, requires_grad=True)
    outs = [conv2d(images, own, None, conv.stride, conv.padding) for images, own in zip(x, weight, strict=True)]
    expected = torch.stack(outs)
    seen, size = patches(x.movedim(2, -1), conv)
    assert seen.shape[2] % 8 == 0, "rows of a product are aligned"
    out = torch.bmm(seen, matrix(weight).mT).unflatten(1, (-1, *size)).movedim(-1, 2)
    torch.testing.assert_close(out, expected)

    d = torch.randn_like(expected)
    into_x, into_weight = torch.autograd.grad(expected, (x, weight), d)
    rows = d.movedim(2, -1).flatten(1, 3)
    back = from_patches(torch.bmm(rows, matrix(weight)), conv, (height, width), size)
    torch.testing.assert_close(back.movedim(-1, 2), into_x)
    product = torch.bmm(rows.mT, seen)
    torch.testing.assert_close(product, matrix(into_weight))


@pytest.mark.parametrize(("kernel", "height", "width"), [(2, 6, 7), (3, 7, 9), ((2, 1), 4, 5), (1, 3, 3)])
def test_pooling_takes_the_first_of_the_largest(kernel: int | tuple[int, int], height: int, width: int) -> None:
    layer = nn.MaxPool2d(kernel)
    assert has_windows(layer)
    torch.manual_seed(0)
    x = torch.randint(3, (2, 3, 4, height, width)).double().requires_grad_()
    expected = layer(x.flatten(0, 1)).unflatten(0, (2, 3))
    last = x.movedim(2, -1)
    assert torch.equal(pool(last, layer).movedim(-1, 2), expected)
    d = torch.randn_like(expected)
    (into_x,) = torch.autograd.grad(expected, x, d)
    assert torch.equal(unpool(d.movedim(2, -1), last, layer).movedim(-1, 2), into_x)


def test_layers_that_are_something_else() -> None:
    for options in ({"groups": 2}, {"dilation": 2}, {"padding": "same"}, {"padding": 1, "padding_mode": "circular"}):
        assert not has_patches(nn.Conv2d(4, 4, 3, **options))
    for options in ({"stride": 1}, {"padding": 1}, {"dilation": 2}, {"ceil_mode": True}, {"return_indices": True}):
        assert not has_windows(nn.MaxPool2d(2, **options))
