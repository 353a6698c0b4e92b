"""The paper's four nets and two small ones, as chains of named layers that can be cut at any name.

The paper's tables hold slips; these are the nets they must mean. ResNet-18 has strides 1, 2, 2, 2, no bias before a
BatchNorm, and as many outputs as there are classes. VGG-11's fc9 takes the 512 numbers that five poolings leave of a
32x32 image, AlexNet's fc6 the 1,024 that are left of one, of any number of channels. The authors' code has other widths
and dropout than the tables: the nets named ``*-code``, with dropout in the tables' places.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Protocol

import torch
from torch import Tensor, nn

from manyheads.errors import UserError

Shape = tuple[int, ...]


class Net(Protocol):
    def __call__(self, input_shape: Shape, num_outputs: int, /) -> nn.Module:
        """A net for samples of this shape."""
        ...


def mlp(input_shape: Shape, num_outputs: int, *, hidden: Sequence[int] = (64, 32), dropouts: int = 0) -> nn.Module:
    """Linear layers with ReLU between them, for samples of any shape; dropout after the first few."""
    sizes = [prod(input_shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for number, (before, after) in enumerate(pairwise(sizes)):
        layers += [nn.Linear(before, after), nn.ReLU()]
        if number < dropouts:
            layers.append(nn.Dropout(0.05))
    return _named([*layers, nn.Linear(sizes[-1], num_outputs)])


def cnn(input_shape: Shape, num_outputs: int) -> nn.Module:
    """Two small convolutions and two linear layers, for images."""
    layers = [*_convolutions(_channels("cnn", input_shape, 4), ((16,), (32,))), nn.Flatten()]
    layers += [nn.Linear(_size(layers, input_shape), 64), nn.ReLU(), nn.Linear(64, num_outputs)]
    return _named(layers)


def dnn(input_shape: Shape, num_outputs: int, *, hidden: Sequence[int] = (512, 256, 128, 64)) -> nn.Module:
    """The paper's net for HARBox: five linear layers, dropout after the first three."""
    return mlp(input_shape, num_outputs, hidden=hidden, dropouts=3)


def alexnet(input_shape: Shape, num_outputs: int) -> nn.Module:
    """The paper's net for Fashion-MNIST at 32x32."""
    channels = _channels("alexnet", input_shape, 16)
    return _alexnet(input_shape, num_outputs, nn.Conv2d(channels, 64, 3, 2, padding=1), 3, 4096, 0.2)


def alexnet_code(input_shape: Shape, num_outputs: int) -> nn.Module:
    """AlexNet as in the authors' code: wide first filters, small linear layers."""
    channels = _channels("alexnet-code", input_shape, 29)
    return _alexnet(input_shape, num_outputs, nn.Conv2d(channels, 64, 11, 4, padding=5), 5, 128, 0.05)


def vgg11(
    input_shape: Shape,
    num_outputs: int,
    *,
    stages: Sequence[Sequence[int]] = ((64,), (128, 128), (256, 256), (512, 512), (512,)),
    dropout: float = 0.2,
) -> nn.Module:
    """The paper's net for CIFAR-10: eight convolutions, three linear layers, no BatchNorm."""
    layers = [*_convolutions(_channels("vgg11", input_shape, 32), stages), nn.Flatten()]
    layers += [nn.Dropout(dropout), nn.Linear(_size(layers, input_shape), 512), nn.ReLU()]
    layers += [nn.Linear(512, 512), nn.ReLU(), nn.Dropout(dropout), nn.Linear(512, num_outputs)]
    return _named(layers)


def resnet18(input_shape: Shape, num_outputs: int) -> nn.Module:
    """The paper's net for CIFAR-100: a 3x3 stem, four stages of two residual blocks, one linear layer."""
    channels = _channels("resnet18", input_shape, 8)
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(channels, 64, 3, padding=1, bias=False),
        "bn1": nn.BatchNorm2d(64),
        "relu1": nn.ReLU(),
    }
    before = 64
    for stage, width in enumerate((64, 128, 256, 512), start=1):
        layers[f"stage{stage}_block1"] = Residual(before, width, stride=1 if stage == 1 else 2)
        layers[f"stage{stage}_block2"] = Residual(width, width, stride=1)
        before = width
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(512, num_outputs)}
    return nn.Sequential(OrderedDict(layers))


class Residual(nn.Module):
    """Two convolutions and a way around them: [B, channels, H, W] -> [B, width, H / stride, W / stride]."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


NETS: dict[str, Net] = {
    "mlp": mlp,
    "cnn": cnn,
    "dnn": dnn,
    "dnn-code": partial(dnn, hidden=(1024, 512, 256, 128)),
    "alexnet": alexnet,
    "alexnet-code": alexnet_code,
    "vgg11": vgg11,
    "vgg11-code": partial(vgg11, stages=((64,), (128,), (256, 256), (512, 512), (512, 512)), dropout=0.05),
    "resnet18": resnet18,
}


def _alexnet(
    input_shape: Shape, num_outputs: int, conv1: nn.Conv2d, kernel: int, width: int, dropout: float
) -> nn.Module:
    layers: list[nn.Module] = [conv1, nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(64, 192, kernel, padding=kernel // 2), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [*_convolutions(192, ((384, 256, 256),)), nn.Flatten()]
    layers += [nn.Dropout(dropout), nn.Linear(_size(layers, input_shape), width), nn.ReLU()]
    layers += [nn.Dropout(dropout), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, num_outputs)]
    return _named(layers)


def _convolutions(channels: int, stages: Sequence[Sequence[int]]) -> list[nn.Module]:
    """3x3 convolutions of these widths, the image halved after each stage."""
    layers: list[nn.Module] = []
    for widths in stages:
        for width in widths:
            conv = nn.Conv2d(channels, width, 3, padding=1)
            # With torch's own initial weights the signal would vanish in eight layers without BatchNorm.
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            layers += [conv, nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return layers


def _channels(net: str, input_shape: Shape, smallest: int) -> int:
    """The channels of an image that is large enough."""
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        given = "x".join(map(str, input_shape))
        advice = "use mlp, which takes any shape, or other data"
        if len(input_shape) == 3 and input_shape[2] <= 4 and min(input_shape[:2]) >= smallest:
            advice = "put the channels first, x.transpose(0, 3, 1, 2)"
        elif len(input_shape) == 2 and min(input_shape) >= smallest:
            advice = "give grey images their one channel, x[:, None], or use mlp, which takes any shape"
        raise UserError(
            f"{net} takes images, channels x height x width, of at least {smallest}x{smallest}; these samples are"
            f" {given}: {advice}."
        )
    return input_shape[0]


def _size(layers: Sequence[nn.Module], input_shape: Shape) -> int:
    """How many numbers come out of layers that end in Flatten."""
    with torch.no_grad():
        return nn.Sequential(*layers)(torch.zeros(1, *input_shape)).shape[1]


_KINDS: dict[type[nn.Module], str] = {
    nn.Conv2d: "conv",
    nn.Linear: "fc",
    nn.ReLU: "relu",
    nn.MaxPool2d: "pool",
    nn.Dropout: "dropout",
}


def _named(layers: Sequence[nn.Module]) -> nn.Sequential:
    """Layers with weights are numbered (conv1 ... conv8, fc9 ...); the others take the number of the one before."""
    names: dict[str, nn.Module] = {}
    number = 0
    for layer in layers:
        number += isinstance(layer, nn.Conv2d | nn.Linear)
        names["flatten" if isinstance(layer, nn.Flatten) else f"{_KINDS[type(layer)]}{number}"] = layer
    return nn.Sequential(OrderedDict(names))
