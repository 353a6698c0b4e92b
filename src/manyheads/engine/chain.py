"""The fast kernel for chains of Linear, ReLU, Dropout and Flatten: stacked workers, backward rules written by hand.

Per step and layer there is one batched product forward, one for the input gradient, and one that adds the weight
gradient straight into the momentum buffer (or the weight): no gradient of the size of the weights is ever stored.
The clip needs that gradient's norm all the same: with inputs x [B, in] and output gradients d [B, out] of a layer,
|d^T x|^2 = <d d^T, x x^T>, two B x B products; only for batches so large that the gradient is smaller it is made.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyheads.engine.kernel import Batch, dropout_keys, stacked_losses
from manyheads.engine.phase import Phase
from manyheads.engine.sgd import Descent, clip_factors, one_by_one
from manyheads.models.dropout import Dropout, dropout_mask
from manyheads.models.split import Split
from manyheads.tree import Buffers, Params, select

_FEW_ROWS = 256
"""Up to here B x B products cost too little to look for anything cheaper."""

_LAYERS = (nn.Linear, nn.ReLU, nn.Flatten, nn.Identity, Dropout)


def chain(module: nn.Module, name: str) -> list[tuple[str, nn.Module]] | None:
    """The layers in order with their full names, or None where there is one without a rule."""
    if _has_hooks(module):
        return None
    if type(module) is nn.Sequential:
        # Not named_children(), which leaves out a layer that stands in a second place.
        children = zip(module._modules, module, strict=True)
        parts = [chain(child, f"{name}.{child_name}") for child_name, child in children]
        return None if None in parts else [layer for part in parts if part is not None for layer in part]
    # No class made out of these: it may compute something else.
    if type(module) not in _LAYERS:
        return None
    if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) != (1, -1):
        return None
    return [(name, module)]


def is_chain(model: Split) -> bool:
    """Whether this kernel has a rule for every layer of the net, each with weights of its own."""
    parts = [chain(model.get_submodule(name), name) for name in ("representation", *model.head_names)]
    weights = [id(weight) for part in parts if part for _, layer in part for weight in layer.parameters()]
    return None not in parts and len(set(weights)) == len(weights)


def _has_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs code of the user's, too."""
    return any((module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks))


@dataclass(frozen=True)
class Contribution:
    """A layer's weight gradient in factors: output gradients [A, B, out] and inputs [A, B, in]."""

    name: str
    d: Tensor
    x: Tensor
    bias: bool

    def square_norm(self) -> Tensor:
        """|d^T x|^2 and the bias gradient's, summed, [A]."""
        (rows, outputs), inputs = self.d.shape[1:], self.x.shape[2]
        if rows <= max(_FEW_ROWS, inputs * outputs // (inputs + outputs)):
            weight = torch.bmm(self.d, self.d.mT).mul_(torch.bmm(self.x, self.x.mT)).sum((1, 2))
        else:
            weight = torch.bmm(self.d.mT, self.x).square_().sum((1, 2))
        return weight + self.d.sum(1).square().sum(1) if self.bias else weight


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

    def forward(
        self, layers: list[tuple[str, nn.Module]], x: Tensor, keys: dict[str, Tensor], train: bool
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The output and, per layer, what its backward rule needs."""
        tape: list[Tensor | None] = []
        active = len(x)
        for name, layer in layers:
            saved: Tensor | None = None
            if isinstance(layer, nn.Linear):
                # Samples of more than one axis: every vector along the last is a row of the product.
                saved, weight = x.flatten(1, -2), self.params[f"{name}.weight"][:active].mT
                if layer.bias is None:
                    out = torch.bmm(saved, weight)
                else:
                    out = torch.baddbmm(self.params[f"{name}.bias"][:active].unsqueeze(1), saved, weight)
                x = out.view(*x.shape[:-1], -1)
            elif isinstance(layer, nn.ReLU):
                saved = x = x.relu()
            elif isinstance(layer, Dropout):
                if train and layer.p > 0:
                    saved = dropout_mask(keys[name], x.shape[1:], layer.p, x.dtype, x.device)
                    x = x * saved
            elif isinstance(layer, nn.Flatten):
                saved, x = x, x.flatten(2)
            tape.append(saved)
        return x, tape

    def backward(
        self,
        layers: list[tuple[str, nn.Module]],
        tape: list[Tensor | None],
        d: Tensor,
        moves: bool,
        deeper: bool,
        contributions: list[Contribution],
    ) -> Tensor | None:
        """Collect the layers' contributions where they move; the gradient of the chain's input where it is wanted."""
        linear = [k for k, (_, layer) in enumerate(layers) if isinstance(layer, nn.Linear)]
        last = 0 if deeper else (linear[0] if moves and linear else len(layers))
        for k in range(len(layers) - 1, last - 1, -1):
            (name, layer), saved = layers[k], tape[k]
            if isinstance(layer, nn.Linear) and saved is not None:
                rows = d.flatten(1, -2)
                if moves:
                    contributions.append(Contribution(name, rows, saved, layer.bias is not None))
                if deeper or k > last:
                    d = torch.bmm(rows, self.params[f"{name}.weight"][: len(d)]).view(*d.shape[:-1], -1)
            elif isinstance(layer, nn.ReLU) and saved is not None:
                d = torch.ops.aten.threshold_backward(d, saved, 0)
            elif isinstance(layer, Dropout) and saved is not None:
                d = d * saved
            elif isinstance(layer, nn.Flatten) and saved is not None:
                d = d.view(saved.shape)
        return d if deeper else None

    def _descend(self, contributions: list[Contribution]) -> None:
        sgd = self.phase.optimizer
        if sgd.clip is not None and contributions:
            square = one_by_one([c.square_norm() for c in contributions])
            factors = clip_factors(square, sgd.clip).view(-1, 1, 1)
            contributions = [Contribution(c.name, c.d * factors, c.x, c.bias) for c in contributions]
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
                self.descent.apply(name, torch.bmm(c.d.mT, c.x))
            if c.bias:
                self.descent.apply(f"{c.name}.bias", c.d.sum(1))
