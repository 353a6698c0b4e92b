"""The layers inside a module: which there are, and others in their places."""

import copy
from collections.abc import Callable

from torch import nn

from manyheads.errors import UserError


def replace_layers(net: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> None:
    """Put ``make(layer)``, called once per layer, in the place or places of every layer for which it is not None."""
    made: dict[nn.Module, nn.Module | None] = {}
    for name, layer in list(net.named_modules(remove_duplicate=False)):
        if layer not in made:
            made[layer] = make(layer)
        new = made[layer]
        if name and new is not None:
            put(net, name, new)


def unshare_layers(net: nn.Module) -> None:
    """Give a layer without tensors that stands in several places, such as one nn.ReLU for all, a copy for each."""
    seen: set[nn.Module] = set()
    for name, layer in list(net.named_modules(remove_duplicate=False)):
        if layer in seen and not layer.state_dict() and not list(layer.children()):
            put(net, name, copy.deepcopy(layer))
        seen.add(layer)


def put(net: nn.Module, name: str, layer: nn.Module) -> None:
    """Put a layer in the place with this dotted name."""
    parent, _, child = name.rpartition(".")
    setattr(net.get_submodule(parent), child, layer)


def refuse_lazy(module: nn.Module) -> None:
    """Refuse a module of the user's with layers that have no shape yet: to give them one would change it for later."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise UserError(
                f"{name} of the {type(module).__name__} has no shape yet, as in lazy layers: give a function that"
                " makes the module instead."
            )


def children(module: nn.Module) -> dict[str, nn.Module]:
    """The children by name, also a layer that stands in a second place, which ``named_children`` leaves out."""
    return {name: child for name, child in module._modules.items() if child is not None}


def owns_parameters(module: nn.Module) -> bool:
    """Whether there is a parameter in it, or in anything inside it."""
    return next(module.parameters(), None) is not None
