"""Layers with backward rules written by hand, over inputs [A, B, ...] of A stacked workers: one product a layer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from manyheads.engine.images import from_patches, has_patches, has_windows, matrix, patches, pool, unpool
from manyheads.engine.kernel import VECTORS
from manyheads.models.dropout import Dropout, dropout_mask
from manyheads.tree import Params

Keys = Mapping[str, Tensor]
"""Of each dropout layer that is on, by its name: [A] int64."""
Saved = tuple[Tensor, ...]
"""What a rule's way back needs of its way forward."""

_FEW_ROWS = 256
"""Up to so many rows, B x B products are cheap enough in any case."""


def products(a: Tensor, b: Tensor, total: Tensor | None = None) -> Tensor:
    """The workers' products [A, M, K] x [A, K, N], added to ``total`` where there is one: the same bits for any A."""
    if _is_lone_column(a, b):
        return products(_twice(a), _twice(b), None if total is None else _twice(total))[:1]
    return torch.bmm(a, b) if total is None else torch.baddbmm(total, a, b)


def add_products_(total: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float = 1.0) -> Tensor:
    """beta total + alpha times the workers' products, in place: the same bits for any A."""
    if _is_lone_column(a, b):
        return total.copy_(torch.baddbmm(_twice(total), _twice(a), _twice(b), beta=beta, alpha=alpha)[:1])
    return total.baddbmm_(a, b, beta=beta, alpha=alpha)


def _is_lone_column(a: Tensor, b: Tensor) -> bool:
    """Whether torch would compute a single worker's product as one with a vector, which sums in another order."""
    return b.shape[2] == 1 and len(a) == 1


def _twice(lone: Tensor) -> Tensor:
    return lone.expand(2, -1, -1)


@dataclass(frozen=True)
class Weights:
    """A layer's matrix and bias: a row for each worker, or, where they are not trained, the same for all."""

    name: str
    layer: nn.Linear | nn.Conv2d
    params: Params

    @property
    def trained(self) -> bool:
        return f"{self.name}.weight" in self.params

    def matrix(self, active: int) -> Tensor:
        """The first workers' [A, out, in]."""
        weight = self._rows("weight", self.layer.weight, active)
        return matrix(weight) if isinstance(self.layer, nn.Conv2d) else weight

    def product(self, rows: Tensor) -> Tensor:
        """The layer's outputs [A, rows, out] of rows [A, rows, in]."""
        weight = self.matrix(len(rows)).mT
        if self.layer.bias is None:
            return products(rows, weight)
        bias = self._rows("bias", self.layer.bias, len(rows)).unsqueeze(1)
        # On a GPU baddbmm first writes the bias everywhere; compiled code adds it on the way to the next layer.
        compiling = torch.compiler.is_compiling()
        return products(rows, weight) + bias if compiling else products(rows, weight, bias)

    def _rows(self, leaf: str, own: Tensor, active: int) -> Tensor:
        name = f"{self.name}.{leaf}"
        return self.params[name][:active] if name in self.params else own.expand(active, *own.shape)


@dataclass(frozen=True)
class Contribution:
    """A layer's weight gradient in factors: output gradients [A, B, out] and inputs [A, B, in].

    For a convolution B counts the positions of all images, and the inputs may be padded with zeros.
    """

    name: str
    layer: nn.Linear | nn.Conv2d
    d: Tensor
    x: Tensor

    @property
    def bias(self) -> bool:
        return self.layer.bias is not None

    def product(self) -> Tensor:
        """The gradient d^T x, [A, out, in], without the zeros."""
        return products(self.d.mT, self.x)[..., : self.layer.weight[0].numel()]

    def square_norm(self, dtype: torch.dtype, product: Tensor | None = None) -> Tensor:
        """|d^T x|^2 plus that of the bias, summed in ``dtype``, [A]; from ``product`` if the caller has it anyway."""
        (rows, outputs), inputs = self.d.shape[1:], self.x.shape[2]
        if product is None and rows <= max(_FEW_ROWS, inputs * outputs // (inputs + outputs)):
            # The terms have both signs and may cancel: the products must be as exact as their sum.
            d, x = self.d.to(dtype), self.x.to(dtype)
            weight = products(d, d.mT).mul_(products(x, x.mT)).sum((1, 2))
        else:
            weight = (self.product() if product is None else product).to(dtype).square().sum((1, 2))
        return weight + self.d.sum(1, dtype=dtype).square().sum(1) if self.bias else weight


@dataclass(frozen=True)
class Rule(ABC):
    """How a layer goes forward and back."""

    channels: ClassVar[Literal["first", "last", "any"]] = "first"
    """Where it takes the channels of an image: first is C, H, W and last is H, W, C."""
    weights: Weights | None = field(default=None, init=False)

    @abstractmethod
    def forward(self, x: Tensor, keys: Keys) -> tuple[Tensor, Saved]:
        """The output, and what ``backward`` needs; with weights, the rows of the product come first in that."""

    @abstractmethod
    def backward(self, d: Tensor, saved: Saved) -> Tensor:
        """The gradient of the input, from that of the output."""


@dataclass(frozen=True)
class LinearRule(Rule):
    weights: Weights = field()

    def forward(self, x: Tensor, keys: Keys) -> tuple[Tensor, Saved]:
        # A sample may have several axes: every vector along the last one is a row of the product.
        rows = x.flatten(1, -2)
        return self.weights.product(rows).view(*x.shape[:-1], -1), (rows,)

    def backward(self, d: Tensor, saved: Saved) -> Tensor:
        return products(d.flatten(1, -2), self.weights.matrix(len(d))).view(*d.shape[:-1], -1)


@dataclass(frozen=True)
class ConvolutionRule(Rule):
    """A linear layer whose rows are the patches of all images."""

    channels = "last"
    weights: Weights = field()
    layer: nn.Conv2d

    def forward(self, x: Tensor, keys: Keys) -> tuple[Tensor, Saved]:
        rows, size = patches(x.to(self.weights.params[f"{self.weights.name}.weight"].dtype), self.layer)
        return self.weights.product(rows).unflatten(1, (-1, *size)), (rows, x)

    def backward(self, d: Tensor, saved: Saved) -> Tensor:
        back = products(d.flatten(1, -2), self.weights.matrix(len(d)))
        return from_patches(back, self.layer, _size(saved[1]), _size(d))


@dataclass(frozen=True)
class PoolingRule(Rule):
    channels = "last"
    layer: nn.MaxPool2d

    def forward(self, x: Tensor, keys: Keys) -> tuple[Tensor, Saved]:
        return pool(x, self.layer), (x,)

    def backward(self, d: Tensor, saved: Saved) -> Tensor:
        return unpool(d, saved[0], self.layer)


class ReLURule(Rule):
    channels = "any"

    def forward(self, x: Tensor, keys: Keys) -> tuple[Tensor, Saved]:
        output = x.relu()
        return output, (output,)

    def backward(self, d: Tensor, saved: Saved) -> Tensor:
        return torch.ops.aten.threshold_backward(d, saved[0], 0)


@dataclass(frozen=True)
class _Activation:
    """A function of single numbers, and its gradient from that of its output, its input and its output."""

    forward: Callable[[Any, Tensor], Tensor]
    backward: Callable[[Any, Tensor, Tensor, Tensor], Tensor]


_aten = torch.ops.aten
_ACTIVATIONS: dict[type[nn.Module], _Activation] = {
    nn.ELU: _Activation(
        lambda layer, x: functional.elu(x, layer.alpha),
        lambda layer, d, x, y: _aten.elu_backward(d, layer.alpha, 1, 1, False, x),
    ),
    nn.GELU: _Activation(
        lambda layer, x: functional.gelu(x, approximate=layer.approximate),
        lambda layer, d, x, y: _aten.gelu_backward(d, x, approximate=layer.approximate),
    ),
    nn.LeakyReLU: _Activation(
        lambda layer, x: functional.leaky_relu(x, layer.negative_slope),
        lambda layer, d, x, y: _aten.leaky_relu_backward(d, x, layer.negative_slope, False),
    ),
    nn.Sigmoid: _Activation(lambda layer, x: x.sigmoid(), lambda layer, d, x, y: _aten.sigmoid_backward(d, y)),
    nn.SiLU: _Activation(lambda layer, x: functional.silu(x), lambda layer, d, x, y: _aten.silu_backward(d, x)),
    nn.Tanh: _Activation(lambda layer, x: x.tanh(), lambda layer, d, x, y: _aten.tanh_backward(d, y)),
}


@dataclass(frozen=True)
class ActivationRule(Rule):
    channels = "any"
    layer: nn.Module

    def forward(self, x: Tensor, keys: Keys) -> tuple[Tensor, Saved]:
        numbers = _evenly(x)
        output = _ACTIVATIONS[type(self.layer)].forward(self.layer, numbers)
        return _shaped(output, x), (numbers, output)

    def backward(self, d: Tensor, saved: Saved) -> Tensor:
        return _shaped(_ACTIVATIONS[type(self.layer)].backward(self.layer, _evenly(d), *saved), d)


def _evenly(x: Tensor) -> Tensor:
    """The numbers of a tensor, on a CPU in a row that fills its vectors: see ``in_a_row``."""
    if x.device.type != "cpu":
        return x
    numbers = x.reshape(-1)
    missing = -len(numbers) % VECTORS
    return torch.cat([numbers, numbers.new_zeros(missing)]) if missing else numbers


def _shaped(numbers: Tensor, like: Tensor) -> Tensor:
    return numbers[: like.numel()].view(like.shape) if like.device.type == "cpu" else numbers


@dataclass(frozen=True)
class DropoutRule(Rule):
    key: str
    p: float

    def forward(self, x: Tensor, keys: Keys) -> tuple[Tensor, Saved]:
        if self.key not in keys:
            return x, ()
        mask = dropout_mask(keys[self.key], x.shape[1:], self.p, x.dtype, x.device)
        return x * mask, (mask,)

    def backward(self, d: Tensor, saved: Saved) -> Tensor:
        return d * saved[0] if saved else d


class FlattenRule(Rule):
    def forward(self, x: Tensor, keys: Keys) -> tuple[Tensor, Saved]:
        return x.flatten(2), (x,)

    def backward(self, d: Tensor, saved: Saved) -> Tensor:
        return d.view(saved[0].shape)


@dataclass(frozen=True)
class TurnRule(Rule):
    """Moves the channels from one place among an image's axes to another."""

    before: int
    after: int

    def forward(self, x: Tensor, keys: Keys) -> tuple[Tensor, Saved]:
        return x.movedim(self.before, self.after), ()

    def backward(self, d: Tensor, saved: Saved) -> Tensor:
        return d.movedim(self.after, self.before)


def rule_for(name: str, layer: nn.Module, params: Params) -> Rule | None:
    """The layer's rule, with its workers' weights among ``params``; None: there is none.

    Nor is there one for a subclass of these layers: it may compute something else.
    """
    trained, constant = next(layer.buffers(), None) is None, next(layer.parameters(), None) is None
    if type(layer) is nn.Linear and (trained or constant):
        return LinearRule(Weights(name, layer, params))
    if type(layer) is nn.Conv2d and trained and has_patches(layer):
        return ConvolutionRule(Weights(name, layer, params), layer)
    if type(layer) is nn.MaxPool2d and has_windows(layer):
        return PoolingRule(layer)
    if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
        return FlattenRule()
    if type(layer) is nn.ReLU:
        return ReLURule()
    if type(layer) in _ACTIVATIONS:
        return ActivationRule(layer)
    if type(layer) is Dropout:
        return DropoutRule(f"{name}.key", layer.p)
    return None


def _size(image: Tensor) -> tuple[int, int]:
    """Height and width of images [A, B, H, W, C]."""
    return image.shape[2], image.shape[3]
