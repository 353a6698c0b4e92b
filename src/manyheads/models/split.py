"""A net as a representation and one or more heads, and what can be said and done with such a net."""

import copy
from collections.abc import Mapping
from functools import reduce
from itertools import takewhile
from operator import add
from typing import Literal

from torch import Tensor, nn

from manyheads.errors import UserError
from manyheads.models.dropout import Dropout
from manyheads.models.layers import children, owns_parameters
from manyheads.models.norm import BatchNorm


class Split(nn.Module):
    """A representation and one or more heads on its features; the output is the sum of the heads' outputs.

    Parameters are named ``representation.*`` and ``<head>.*``; the first head is called ``head``.
    """

    def __init__(
        self,
        representation: nn.Module,
        heads: Mapping[str, nn.Module],
        detached: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.representation = representation
        for name, head in heads.items():
            self.add_module(name, head)
        self.head_names = tuple(heads)
        self.detached = detached
        """Heads that send no gradient into the features."""
        self.head_layer = ""
        """The layer that the head begins with in the module that was split; or all, or none."""
        self.head_prefix = ""
        """What the names of the head's tensors begin with in that module."""
        self.random: tuple[str, ...] = ()
        """Modules that were seen to draw from torch's generator."""
        self.varying: tuple[str, ...] = ()
        """Modules that were seen, in train mode, to give a sample another output beside other samples."""
        self.mixes_samples = False
        """Whether the net's outputs, or gradients, mix samples, BatchNorm apart, which leaves padding out."""
        self.moving: tuple[str, ...] = ()
        """Buffers that were seen to change in train mode: statistics, where others are constants or masks."""
        self.constants: tuple[str, ...] = ()
        """What ``hold_still`` took out of the parameters."""

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups that own parameters."""
        return tuple(name for name, child in self.named_children() if owns_parameters(child))

    def module_names(self) -> dict[str, str]:
        """Every tensor's name -> its name in the module that was split; unchanged if there is a second head."""
        if len(self.head_names) > 1:
            return {name: name for name in self.state_dict()}
        parts = [(name, *name.split(".", 1)) for name in self.state_dict()]
        return {name: (self.head_prefix if group == "head" else "") + rest for name, group, rest in parts}

    def module_state(self) -> dict[str, Tensor]:
        """Copies of the weights as ``load_state_dict`` of the module that was split takes them."""
        names = self.module_names()
        # Copies: tied layers share tensors, which safetensors cannot store.
        return {names[name]: tensor.clone() for name, tensor in self.state_dict().items()}

    def outputs(self, x: Tensor) -> dict[str, Tensor]:
        """Samples [B, ...] -> each head's output [B, ...]."""
        features = self.representation(x)
        detached = features.detach()
        return {
            name: self.get_submodule(name)(detached if name in self.detached else features) for name in self.head_names
        }

    def forward(self, x: Tensor) -> Tensor:
        """Samples [B, ...] -> outputs [B, ...]."""
        return reduce(add, self.outputs(x).values())

    def with_head(self, name: str, *, detach: frozenset[str]) -> "Split":
        """A copy with one more head, itself a copy of the first; ``detach`` names the detached ones."""
        new = twin(self)
        new.add_module(name, copy.deepcopy(self.get_submodule(self.head_names[0])))
        new.head_names = (*self.head_names, name)
        first = f"{self.head_names[0]}."
        copied = (f"{name}.{moving.removeprefix(first)}" for moving in self.moving if moving.startswith(first))
        new.moving = (*self.moving, *copied)
        new.detached = detach
        return new


def hold_still(net: Split) -> None:
    """Turn parameters with requires_grad=False into constants: one tensor for all workers, outside of their state."""
    constants = [name for name, parameter in net.named_parameters() if not parameter.requires_grad]
    if constants and not any(parameter.requires_grad for parameter in net.parameters()):
        raise UserError("all parameters of the model have requires_grad=False: leave some of them to train.")
    for module in net.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not parameter.requires_grad:
                delattr(module, name)
                module.register_buffer(name, parameter.detach(), persistent=False)
    net.constants = tuple(constants)


def constants_of(net: Split) -> dict[str, Tensor]:
    """What ``hold_still`` took out of the parameters, [...] each."""
    return {name: net.get_buffer(name) for name in net.constants}


def twin(net: Split) -> Split:
    """A copy that can be pointed at other weights and set to other modes; it shares the constants with the original."""
    return copy.deepcopy(net, {id(constant): constant for constant in constants_of(net).values()})


def statistics(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that are part of a worker's state."""
    kept = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}


def drawn_layers(head: nn.Module) -> list[nn.Module]:
    """The layers of a head that can draw their weights anew, as torch's layers can; a head with others is refused.

    BatchNorm, which draws nothing, is left out, and so are layers that are not trained.
    """
    owners = [
        layer
        for layer in head.modules()
        if not isinstance(layer, BatchNorm) and any(p.requires_grad for p in layer.parameters(recurse=False))
    ]
    for layer in owners:
        if not callable(getattr(layer, "reset_parameters", None)):
            raise UserError(
                f"--heads random: {type(layer).__name__} in the head cannot be drawn anew: give it a"
                " reset_parameters(), as torch's modules have, or keep --heads same."
            )
    return owners


def needs_loop(net: Split) -> str | None:
    """The first module with randomness of its own, which only the ``loop`` engine can run; None: there is none."""
    known = (name for name, module in net.named_modules() if _draws(module))
    return next(known, net.random[0] if net.random else None)


def cacheable_prefix(net: Split, frozen: Literal["train", "eval"]) -> int:
    """How many leading layers of a frozen representation give a sample the same features in every batch of a phase.

    A representation that is no nn.Sequential counts as one layer.
    """
    body = net.representation
    layers = {"representation": body}
    if isinstance(body, nn.Identity):
        layers = {}
    elif type(body) is nn.Sequential:
        layers = {f"representation.{name}": layer for name, layer in children(body).items()}
    if frozen == "eval":
        return len(layers)
    return len([*takewhile(lambda item: not _varies(net, *item), layers.items())])


def cut(net: Split, depth: int) -> tuple[nn.Module, Split]:
    """The first ``depth`` layers of the representation and the net behind them: same modules, same names.

    What was seen of the net in trials is not known of the rest.
    """
    body = net.representation
    if type(body) is nn.Sequential:
        front, back = body[:depth], body[depth:]
    else:
        front, back = (body, nn.Identity()) if depth else (nn.Identity(), body)
    heads = {name: net.get_submodule(name) for name in net.head_names}
    rest = Split(back, heads, net.detached)
    kept = dict(rest.named_buffers())
    rest.constants = tuple(name for name in net.constants if name in kept)
    return front, rest


def _draws(module: nn.Module) -> bool:
    """Whether one of torch's modules draws from torch's generator in train mode."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return module.dropout > 0
    return isinstance(module, nn.RReLU)


def _varies(net: Split, name: str, layer: nn.Module) -> bool:
    """Whether a layer in train mode gives a sample other features in another batch or step."""
    seen = any(other == name or other.startswith(f"{name}.") for other in (*net.random, *net.varying))
    return seen or any(
        isinstance(module, BatchNorm) or (isinstance(module, Dropout) and module.p > 0) or _draws(module)
        for module in layer.modules()
    )
