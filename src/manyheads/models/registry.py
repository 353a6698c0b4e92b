"""A net by its name: one of ours, a user's factory, or a module itself, split and ready to train."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from manyheads.by_name import find
from manyheads.errors import UserError, first_line, unknown
from manyheads.models.layers import refuse_lazy
from manyheads.models.nets import NETS, mlp
from manyheads.models.norm import BATCH_NORMS, group_norm
from manyheads.models.split import Split
from manyheads.models.splitting import split

Model = str | nn.Module | Callable[..., nn.Module]
"""A name or spec, a module, or a factory of one."""

Norm = Literal["shared", "local", "group"]
"""BatchNorm whose statistics are mixed with the neighbours', whose statistics stay at home, or GroupNorm instead."""

_WRAPPERS = {
    "DataParallel": "which spreads batches over GPUs: give the plain net, its .module",
    "DistributedDataParallel": "which averages gradients over processes: give the plain net, its .module",
    "OptimizedModule": "made by torch.compile: give the plain net it was made from",
    "ScriptModule": "made by torch.jit: give the plain net it was made from",
}
"""Wrappers of a net that cannot be split or stacked, by class name, as importing all these classes takes seconds."""


def build(
    model: Model,
    input_shape: tuple[int, ...],
    num_outputs: int,
    *,
    head: str | None = None,
    norm: Norm = "shared",
    example: Tensor | None = None,
) -> Split:
    """A net for samples [*input_shape], with weights drawn from torch's global generator.

    It is tried on ``example``, some samples [B, ...]; without any it is taken as one that has been tried before.

    ``model`` is a name (``mlp``, ``mlp:200,100``, ``vgg11``, ...), ``package.module:factory``, a factory or a module; a
    factory is called with nothing, or with ``input_shape`` and ``num_outputs`` where it asks for two arguments.
    """
    if norm not in get_args(Norm):
        raise unknown("norm", norm, get_args(Norm))
    module = _module(model, input_shape, num_outputs)
    _refuse_wrappers(module)
    normed = any(isinstance(layer, BATCH_NORMS) for layer in module.modules())
    if norm == "group":
        module = group_norm(module)
    like = next(module.parameters(), torch.empty(0))
    # Zeros will do to see the shapes of lazy layers.
    given = torch.zeros(2, *input_shape) if example is None else example
    net = split(module, head, given.to(like.device, like.dtype), known=example is None)
    # Statistics that other layers keep may be local too.
    unused = norm == "group" or (norm == "local" and not net.moving)
    if unused and not normed and example is not None:
        raise UserError(
            f"--norm {norm} is for nets with BatchNorm, and this one has none: leave it out, or say --norm shared."
        )
    return net


def _module(model: Model, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    if isinstance(model, nn.Module):
        refuse_lazy(model)
        return model
    factory = find_factory(model) if isinstance(model, str) else model
    name = model if isinstance(model, str) else repr(model)
    # A module can be called too, but with samples.
    if isinstance(factory, nn.Module) or not callable(factory):
        raise UserError(f"model '{name}' is a {type(factory).__name__}: name a function or class that gives a module.")
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required: list[str] = []
    try:
        parameters = inspect.signature(factory).parameters.values()
        required = [p.name for p in parameters if p.kind in positional and p.default is p.empty]
        if len(required) not in (0, 2):
            raise UserError(
                f"model '{name}' needs the arguments {', '.join(required)}: write a factory that needs none,"
                " or two, input_shape and num_outputs."
            )
        module = factory(input_shape, num_outputs) if required else factory()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        given = f" when called with input_shape {input_shape} and num_outputs {num_outputs}" if required else ""
        raise UserError(f"model '{name}' cannot be made{given}: {first_line(error)}") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"model '{name}' gives a {type(module).__name__}: it must give an nn.Module.")
    return module


def _refuse_wrappers(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        for kind in type(layer).__mro__:
            if kind.__module__.startswith("torch.") and kind.__name__ in _WRAPPERS:
                where = f"the model's layer {name}" if name else "the model"
                raise UserError(f"{where} is a {type(layer).__name__}, {_WRAPPERS[kind.__name__]}.")


def find_factory(spec: str) -> Callable[..., nn.Module]:
    """What makes the net that a spec names."""
    name, colon, rest = spec.partition(":")
    if name == "mlp" and colon:
        return partial(mlp, hidden=_sizes(spec, rest))
    if name in NETS and not colon:
        return NETS[name]
    if name in NETS:
        raise UserError(f"model '{spec}': {name} takes no sizes (only mlp does, as mlp:200,100): write '{name}'.")
    if not colon or rest[:1].isdigit():  # A factory's name begins with no digit: these are sizes of a misspelt mlp.
        raise unknown("model", name, [*NETS, "package.module:factory"])
    return find("model", spec, "a function or class that gives a module")


def _sizes(spec: str, text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    if not all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes):
        raise UserError(f"model '{spec}': hidden sizes are positive numbers with commas between them, as mlp:200,100.")
    return tuple(map(int, sizes))
