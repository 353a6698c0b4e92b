"""A net whose forward only applies layers one after another, made into the nn.Sequential that does the same.

Engines are fastest on an nn.Sequential, whose layers they know; of a forward they know nothing. So forward is run on a
stand-in for its input, which notes the layers that it passes through. If it does anything else, or the nn.Sequential
then gives other outputs or gradients, the module stays as it is. Every tensor keeps its name.
"""

import copy
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.models.layers import children, has_hooks
from manyheads.models.split import Split
from manyheads.models.trials import alike

_FUNCTIONS: dict[Any, type[nn.Module]] = {
    F.elu: nn.ELU,
    F.gelu: nn.GELU,
    F.leaky_relu: nn.LeakyReLU,
    F.max_pool2d: nn.MaxPool2d,
    F.relu: nn.ReLU,
    F.silu: nn.SiLU,
    torch.relu: nn.ReLU,
    torch.sigmoid: nn.Sigmoid,
    torch.tanh: nn.Tanh,
}
"""Functions that forward may apply, and the layers that do the same."""
_PLAIN = frozenset({nn.Flatten, *_FUNCTIONS.values()})
"""Layers without tensors that forward may apply many times, or as functions."""

Steps = list[tuple[str, nn.Module]]
"""Layers in the order in which they are applied, by their dotted names."""


def straightened(net: Split, example: Tensor) -> Split:
    """The net with an nn.Sequential for every part that is one in effect, if that shows on ``example`` [B, ...]."""
    straight = copy.deepcopy(net)
    for name in ("representation", *net.head_names):
        straight.set_submodule(name, _straightened(straight.get_submodule(name)))
    changed = any(type(a) is not type(b) for a, b in zip(net.modules(), straight.modules(), strict=False))
    try:
        return straight if changed and _compute_the_same(net, straight, example) else net
    except Exception:  # a net that fails on the way back is refused by name, when its gradients are tried
        return net


def _straightened(module: nn.Module) -> nn.Module:
    if type(module) is nn.Sequential:
        for name, child in children(module).items():
            module.set_submodule(name, _straightened(child))
    if type(module).__module__.startswith("torch."):
        return module
    try:
        straight = _nested([(name, _straightened(layer)) for name, layer in _Trace(module).steps])
    except Exception:  # whatever forward raises on what is not a tensor
        return module
    same_names = straight.state_dict().keys() == module.state_dict().keys()
    return straight if same_names and not has_hooks(module) else module


def _nested(steps: Steps) -> nn.Sequential:
    """Layers with dotted names as an nn.Sequential, of nn.Sequentials where names share a beginning."""
    folders: dict[str, Steps] = {}
    for name, layer in steps:
        first, _, rest = name.partition(".")
        folders.setdefault(first, []).append((rest, layer))
    return nn.Sequential(
        OrderedDict((name, _nested(inside) if inside[0][0] else inside[0][1]) for name, inside in folders.items())
    )


class _Trace:
    """What a module's forward applies to its input."""

    def __init__(self, module: nn.Module) -> None:
        self.steps: Steps = []
        self._shell(module, "").forward(_TensorStandIn(self))

    def _shell(self, module: nn.Module, prefix: str) -> nn.Module:
        """The module with stand-ins for its layers; of a list of layers, which is no layer, with those inside it."""
        shell = copy.copy(module)
        shell._modules = {
            name: self._shell(child, f"{prefix}{name}.")
            if type(child) is nn.ModuleList
            else _LayerStandIn(self, f"{prefix}{name}", child)
            for name, child in children(module).items()
        }
        return shell

    def apply(self, layer: nn.Module, name: str = "") -> "_TensorStandIn":
        """Note that a layer is applied, to what the one before it gave if forward is straight."""
        if type(layer) in _PLAIN:
            # Named after its place, next to the layer before it.
            folder = self.steps[-1][0].rpartition(".")[0] if self.steps else ""
            name = f"{folder}.{len(self.steps)}-{type(layer).__name__}".removeprefix(".")
            layer = copy.deepcopy(layer)
        if any(name == before for before, _ in self.steps):
            # A name has one place: applied once, the layer may seem to do the same, as a norm does without weights.
            raise NotImplementedError(f"{name} is applied twice")
        self.steps.append((name, layer))
        return _TensorStandIn(self)


class _LayerStandIn(nn.Module):
    """Takes a layer's place, and notes when it is applied."""

    def __init__(self, trace: _Trace, name: str, layer: nn.Module) -> None:
        super().__init__()
        self.trace, self.name, self.layer = trace, name, layer

    def forward(self, x: object) -> "_TensorStandIn":
        return self.trace.apply(self.layer, self.name)


class _TensorStandIn:
    """Takes the place of a tensor on its way through forward, with the few things that a straight one does to it."""

    def __init__(self, trace: _Trace) -> None:
        self.trace = trace

    shape = (None,)
    """Only the number of samples may be asked for, in order to flatten them."""

    def size(self, dim: int) -> object:
        return self.shape[dim]

    def relu(self) -> "_TensorStandIn":
        return self.trace.apply(nn.ReLU())

    def sigmoid(self) -> "_TensorStandIn":
        return self.trace.apply(nn.Sigmoid())

    def tanh(self) -> "_TensorStandIn":
        return self.trace.apply(nn.Tanh())

    def flatten(self, start_dim: int, end_dim: int = -1) -> "_TensorStandIn":
        return self.trace.apply(nn.Flatten(start_dim, end_dim))

    def view(self, samples: object, features: int) -> "_TensorStandIn":
        return self.flatten(1)

    reshape = view

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> "_TensorStandIn":
        (x, *rest), options = args, kwargs or {}
        if function is torch.flatten:
            return x.flatten(*rest, **options)
        if function not in _FUNCTIONS:
            raise NotImplementedError(function)
        return x.trace.apply(_FUNCTIONS[function](*rest, **options))


def _compute_the_same(net: Split, straight: Split, example: Tensor) -> bool:
    """Whether two nets give the same outputs and gradients, in train mode and in eval mode.

    Only gradients show what forward hides from them, as torch.no_grad does.
    """
    for mode in (True, False):
        (output, gradients), (other, others) = (_tried(one, example, mode) for one in (net, straight))
        if not alike(output, other) or gradients.keys() != others.keys():
            return False
        if not all(alike(gradient, others[name]) for name, gradient in gradients.items()):
            return False
    return True


def _tried(net: Split, example: Tensor, mode: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of its square, of those parameters that have one."""
    trial = copy.deepcopy(net).train(mode)
    with torch.enable_grad():
        output = trial(example.clone())
        if output.requires_grad:
            output.abs().square().mean().backward()
    return output.detach(), {name: p.grad for name, p in trial.named_parameters() if p.grad is not None}
