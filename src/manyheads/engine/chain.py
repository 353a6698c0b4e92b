"""The fast kernel for chains of layers with backward rules written by hand: stacked workers, one product a layer.

Per step and layer there is one batched product forward, one for the input gradient, and one that adds the weight
gradient straight into the momentum buffer (or the weight): no gradient of the size of the weights is ever stored.
The clip needs that gradient's norm all the same: with inputs x [B, in] and output gradients d [B, out] of a layer,
|d^T x|^2 = <d d^T, x x^T>, two B x B products; only for batches so large that the gradient is smaller it is made.
A convolution is a linear layer whose batch are the patches of all images.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyheads.engine.images import from_patches, has_patches, has_windows, matrix, patches, pool, unpool
from manyheads.engine.kernel import Batch, dropout_keys, stacked_losses
from manyheads.engine.phase import Phase
from manyheads.engine.sgd import Descent, clip_factors, one_by_one
from manyheads.models.dropout import Dropout, dropout_mask
from manyheads.models.split import Split
from manyheads.tree import Buffers, Params, select

_FEW_ROWS = 256
"""Up to here B x B products cost too little to look for anything cheaper."""

_LAYERS = (nn.Linear, nn.Conv2d, nn.MaxPool2d, nn.ReLU, nn.Flatten, nn.Identity, Dropout)
_ON_IMAGES = (nn.Conv2d, nn.MaxPool2d)
_ANYWHERE = (nn.ReLU, nn.Identity)
Chain = list[tuple[str, nn.Module]]
Tape = list[tuple[Tensor, ...]]
"""Per layer, what its backward rule needs."""


class ChannelsLast(nn.Module):
    """Stands before layers on images: [..., C, H, W] -> [..., H, W, C]."""


class ChannelsFirst(nn.Module):
    """Stands behind them: [..., H, W, C] -> [..., C, H, W]."""


def chain(module: nn.Module, name: str) -> Chain | None:
    """The layers in order with their full names, or None where there is one without a rule."""
    layers = _layers(module, name)
    on_images = [layer for _, layer in layers or [] if isinstance(layer, _ON_IMAGES)]
    if layers is None or not on_images:
        return layers
    if not isinstance(on_images[0], nn.Conv2d):
        # A pooling that comes first may be given images without channels.
        return None
    turned: Chain = []
    last = False
    for name, layer in layers:
        wanted = isinstance(layer, _ON_IMAGES) or (last and isinstance(layer, _ANYWHERE))
        if wanted != last:
            turned.append(("", ChannelsLast() if wanted else ChannelsFirst()))
        turned.append((name, layer))
        last = wanted
    return [*turned, ("", ChannelsFirst())] if last else turned


def _layers(module: nn.Module, name: str) -> Chain | None:
    if _has_hooks(module):
        return None
    if type(module) is nn.Sequential:
        # Not named_children(), which leaves out a layer that stands in a second place.
        children = zip(module._modules, module, strict=True)
        parts = [_layers(child, f"{name}.{child_name}") for child_name, child in children]
        return None if None in parts else [layer for part in parts if part is not None for layer in part]
    # No class made out of these: it may compute something else.
    if type(module) not in _LAYERS:
        return None
    if isinstance(module, (nn.Linear, nn.Conv2d)) and not (_trained(module) or _constant(module)):
        return None
    if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) != (1, -1):
        return None
    if isinstance(module, nn.Conv2d) and not (has_patches(module) and _trained(module)):
        return None
    if isinstance(module, nn.MaxPool2d) and not has_windows(module):
        return None
    return [(name, module)]


def is_chain(model: Split, *, images: bool = False) -> bool:
    """Whether this kernel has a rule for every layer of the net, each with weights of its own.

    ``images``: with layers on images, too, which pays on GPUs alone.
    """
    parts = [chain(model.get_submodule(name), name) for name in ("representation", *model.head_names)]
    layers = [layer for part in parts if part for _, layer in part]
    weights = [id(weight) for layer in layers for weight in layer.parameters()]
    allowed = images or not any(isinstance(layer, _ON_IMAGES) for layer in layers)
    return allowed and None not in parts and len(set(weights)) == len(weights)


def _trained(layer: nn.Linear | nn.Conv2d) -> bool:
    """Whether all its weights are among the workers' rows."""
    return next(layer.buffers(), None) is None


def _constant(layer: nn.Linear | nn.Conv2d) -> bool:
    """Whether none are."""
    return next(layer.parameters(), None) is None


def _has_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs code of the user's, too."""
    return any((module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks))


@dataclass(frozen=True)
class Contribution:
    """A layer's weight gradient in factors: output gradients [A, B, out] and inputs [A, B, in].

    Of a convolution they are those of all positions of all images, and the inputs may be wider, by zeros.
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
        return torch.bmm(self.d.mT, self.x)[..., : self.layer.weight[0].numel()]

    def square_norm(self, dtype: torch.dtype, product: Tensor | None = None) -> Tensor:
        """|d^T x|^2 and the bias gradient's, summed in ``dtype``, [A]; of the product where that is made anyway."""
        (rows, outputs), inputs = self.d.shape[1:], self.x.shape[2]
        if product is None and rows <= max(_FEW_ROWS, inputs * outputs // (inputs + outputs)):
            # Terms of both signs: these products must be as exact as their sum.
            d, x = self.d.to(dtype), self.x.to(dtype)
            weight = torch.bmm(d, d.mT).mul_(torch.bmm(x, x.mT)).sum((1, 2))
        else:
            weight = (self.product() if product is None else product).to(dtype).square().sum((1, 2))
        return weight + self.d.sum(1, dtype=dtype).square().sum(1) if self.bias else weight


class ChainKernel:
    """A chunk of workers in stacked products [A, B, features]."""

    padded: ClassVar[bool] = True

    def __init__(
        self, model: Split, phase: Phase, params: Params, buffers: Buffers, dropout_layers: dict[str, int]
    ) -> None:
        self.model, self.phase, self.layers, self.params = model, phase, dropout_layers, params
        self.body = chain(model.representation, "representation") or []
        self.heads = {name: chain(model.get_submodule(name), name) or [] for name in model.head_names}
        self.descent = Descent(phase, select(params, phase.update))
        self.body_moves = "representation" in phase.update
        self.dropouts = [name for name, module in model.named_modules() if isinstance(module, Dropout) and module.p > 0]

    def step(self, batch: Batch) -> Tensor:
        keys = dropout_keys(self.layers, self.dropouts, batch.dropout_base, batch.step)
        body_train = self.body_moves or self.phase.frozen == "train"
        features, body_tape = self.forward(self.body, batch.x, keys, body_train)
        tapes, outputs = {}, {}
        for name, layers in self.heads.items():
            output, tapes[name] = self.forward(layers, features, keys, True)
            outputs[name] = output.detach().requires_grad_()
        total, sums = stacked_losses(self.phase, outputs, batch)
        gradients = torch.autograd.grad(total, list(outputs.values()), allow_unused=True)

        contributions: list[Contribution] = []
        into_features: Tensor | None = None
        for (name, layers), gradient in zip(self.heads.items(), gradients, strict=True):
            if gradient is None:
                continue
            deeper = self.body_moves and name not in self.model.detached
            back = self.backward(layers, tapes[name], gradient, name in self.phase.update, deeper, contributions)
            if back is not None:
                into_features = back if into_features is None else into_features + back
        if into_features is not None:
            self.backward(self.body, body_tape, into_features, True, False, contributions)
        self._descend(contributions)
        return sums

    def forward(self, layers: Chain, x: Tensor, keys: dict[str, Tensor], train: bool) -> tuple[Tensor, Tape]:
        """The output and, per layer, what its backward rule needs."""
        tape: Tape = []
        for name, layer in layers:
            saved: tuple[Tensor, ...] = ()
            if isinstance(layer, nn.Linear):
                # Samples of more than one axis: every vector along the last is a row of the product.
                saved = (x.flatten(1, -2),)
                x = self._product(name, layer, saved[0]).view(*x.shape[:-1], -1)
            elif isinstance(layer, nn.Conv2d):
                seen, size = patches(x.to(self.params[f"{name}.weight"].dtype), layer)
                saved, x = (seen, x), self._product(name, layer, seen).unflatten(1, (-1, *size))
            elif isinstance(layer, nn.MaxPool2d):
                saved, x = (x,), pool(x, layer)
            elif isinstance(layer, nn.ReLU):
                x = x.relu()
                saved = (x,)
            elif isinstance(layer, Dropout):
                if train and layer.p > 0:
                    saved = (dropout_mask(keys[name], x.shape[1:], layer.p, x.dtype, x.device),)
                    x = x * saved[0]
            elif isinstance(layer, nn.Flatten):
                saved, x = (x,), x.flatten(2)
            elif isinstance(layer, ChannelsLast):
                x = x.movedim(-3, -1)
            elif isinstance(layer, ChannelsFirst):
                x = x.movedim(-1, -3)
            tape.append(saved)
        return x, tape

    def backward(
        self, layers: Chain, tape: Tape, d: Tensor, moves: bool, deeper: bool, contributions: list[Contribution]
    ) -> Tensor | None:
        """Collect the layers' contributions where they move; the gradient of the chain's input where it is wanted."""
        weighted = [k for k, (_, layer) in enumerate(layers) if isinstance(layer, (nn.Linear, nn.Conv2d))]
        trained = [k for k in weighted if next(layers[k][1].parameters(), None) is not None]
        last = 0 if deeper else (trained[0] if moves and trained else len(layers))
        for k in range(len(layers) - 1, last - 1, -1):
            (name, layer), saved = layers[k], tape[k]
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                rows = d.flatten(1, -2)
                if moves and k in trained:
                    contributions.append(Contribution(name, layer, rows, saved[0]))
                if deeper or k > last:
                    back = torch.bmm(rows, self._matrix(name, layer, len(d)))
                    if isinstance(layer, nn.Conv2d):
                        d = from_patches(back, layer, _size(saved[1]), _size(d))
                    else:
                        d = back.view(*d.shape[:-1], -1)
            elif isinstance(layer, nn.MaxPool2d):
                d = unpool(d, saved[0], layer)
            elif isinstance(layer, nn.ReLU):
                d = torch.ops.aten.threshold_backward(d, saved[0], 0)
            elif isinstance(layer, Dropout) and saved:
                d = d * saved[0]
            elif isinstance(layer, nn.Flatten):
                d = d.view(saved[0].shape)
            elif isinstance(layer, ChannelsLast):
                d = d.movedim(-1, -3)
            elif isinstance(layer, ChannelsFirst):
                d = d.movedim(-3, -1)
        return d if deeper else None

    def _product(self, name: str, layer: nn.Linear | nn.Conv2d, rows: Tensor) -> Tensor:
        """The layer's outputs [A, rows, out] of rows [A, rows, in]."""
        weight = self._matrix(name, layer, len(rows)).mT
        if layer.bias is None:
            return torch.bmm(rows, weight)
        bias = self._rows(f"{name}.bias", layer.bias, len(rows)).unsqueeze(1)
        # On a GPU baddbmm writes the bias everywhere first; compiled code adds it on the way to the next layer.
        compiling = torch.compiler.is_compiling()
        return torch.bmm(rows, weight) + bias if compiling else torch.baddbmm(bias, rows, weight)

    def _matrix(self, name: str, layer: nn.Linear | nn.Conv2d, active: int) -> Tensor:
        weight = self._rows(f"{name}.weight", layer.weight, active)
        return matrix(weight) if isinstance(layer, nn.Conv2d) else weight

    def _rows(self, name: str, own: Tensor, active: int) -> Tensor:
        """The first workers' rows; of a constant, which has none, the same for each."""
        return self.params[name][:active] if name in self.params else own.expand(active, *own.shape)

    def _descend(self, contributions: list[Contribution]) -> None:
        sgd = self.phase.optimizer
        if sgd.clip is not None and contributions:
            square = one_by_one([c.square_norm(c.d.dtype) for c in contributions])
            factors = clip_factors(square, sgd.clip).view(-1, 1, 1)
            contributions = [replace(c, d=c.d * factors) for c in contributions]
        plain = not sgd.momentum and self.phase.proximal is None and self.phase.mask is None
        for c in contributions:
            name = f"{c.name}.weight"
            active, weight = len(c.d), self.descent.params[name]
            if plain:
                decay = 1 - sgd.lr * sgd.weight_decay
                weight[:active].baddbmm_(c.d.mT, c.x, beta=decay, alpha=-sgd.lr)
            elif sgd.momentum:
                momentum = self.descent.momentum
                if name not in momentum:
                    momentum[name] = torch.zeros_like(weight)
                direction = momentum[name][:active].baddbmm_(c.d.mT, c.x, beta=sgd.momentum)
                if sgd.weight_decay:
                    direction.add_(weight[:active], alpha=sgd.weight_decay)
                self.descent.move(name, direction)
            else:
                self.descent.apply(name, c.product())
            if c.bias:
                self.descent.apply(f"{c.name}.bias", c.d.sum(1))


def _size(image: Tensor) -> tuple[int, int]:
    """Height and width of images [A, B, H, W, C]."""
    return image.shape[2], image.shape[3]
