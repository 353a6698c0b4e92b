"""The layers inside a module: listing them, replacing them, copying shared ones."""

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from manyheads.errors import UserError


def replace_layers(net: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replace every layer for which ``make(layer)`` is not None, in all its places; it is called once per layer.

    What the user's code does around a layer, by hooks, it does around the new one.
    """
    made: dict[nn.Module, nn.Module | None] = {}
    for name, layer in list(net.named_modules(remove_duplicate=False)):
        if layer not in made:
            made[layer] = make(layer)
        new = made[layer]
        if name and new is not None:
            # Those of state dicts speak of the old layer's tensors, and some know no other layer.
            around = [own for own in vars(layer) if "_hook" in own and "state_dict" not in own]
            vars(new).update({own: vars(layer)[own] for own in around})
            net.set_submodule(name, new)


def unshare_layers(net: nn.Module) -> None:
    """Copy a layer without tensors that stands in several places, such as one nn.ReLU for all, for each place."""
    seen: set[nn.Module] = set()
    for name, layer in list(net.named_modules(remove_duplicate=False)):
        if layer in seen and not layer.state_dict() and not list(layer.children()):
            net.set_submodule(name, copy.deepcopy(layer))
        seen.add(layer)


def refuse_lazy(module: nn.Module) -> None:
    """Refuse a user's module with lazy layers: giving them a shape here would change the user's own object."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise UserError(
                f"{name} of the {type(module).__name__} has no shape yet, as in lazy layers: give a function that"
                " makes the module instead."
            )


def refuse_sparse(tensors: Mapping[str, Tensor]) -> None:
    """Refuse a net that keeps sparse tensors in its state, of which workers have rows and checkpoints files."""
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise UserError(
                f"the model's {name} is sparse, which no checkpoint can hold: make it dense, or register it as a buffer"
                " with persistent=False."
            )


def children(module: nn.Module) -> dict[str, nn.Module]:
    """The children by name, also a layer that stands in a second place, which ``named_children`` leaves out."""
    return {name: child for name, child in module._modules.items() if child is not None}


def owns_parameters(module: nn.Module) -> bool:
    """Whether there is a parameter in it, or in anything inside it."""
    return next(module.parameters(), None) is not None


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module also runs code of the user's."""
    return any((module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks))
