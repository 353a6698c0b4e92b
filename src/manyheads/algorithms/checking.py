"""Checks of an algorithm's class and of what its methods return: it may be the user's own, and mistaken."""

import re
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from functools import cache
from inspect import get_annotations, getattr_static, isfunction, signature
from typing import Any, ClassVar, get_origin, get_type_hints

import torch
from torch import Tensor

from manyheads.algorithms.base import Algorithm, Context, Log, State, Work
from manyheads.checks import Kind, kind_of, shown
from manyheads.errors import UserError, user_code
from manyheads.files import DTYPES
from manyheads.models.split import Split
from manyheads.randomness import generator_states
from manyheads.tree import Params


def making(kind: type[Algorithm], options: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Wrap the making of an algorithm, so that an error in its ``__post_init__`` names the options it was given."""
    given = ", ".join(f"{name}={shown(value)}" for name, value in options.items())
    return user_code(f"{kind.__name__}({given})")


def check_class(algorithm: Algorithm, taken: Collection[str]) -> None:
    """Refuse a class that is not as the base describes it; ``taken``: names that no option may have.

    Takes an object, not the class: what the base has as an attribute of the class may be a property of the options.
    """
    own = type(algorithm).__name__
    # Frozen, as no checkpoint would hold what an object remembers. A class derived from a dataclass that is not itself
    # decorated would only have the options of its base.
    made = getattr(type(algorithm), "__dataclass_params__", None)
    undone = "__dataclass_params__" not in vars(type(algorithm)) and get_annotations(type(algorithm)).keys() - _facts()
    if made is None or not made.frozen or undone:
        raise UserError(f"{own} is not a frozen dataclass: write @dataclass(frozen=True, kw_only=True) above it.")
    options = {spec.name for spec in fields(algorithm)}
    for name, (kind, of_class) in _facts().items():
        if name in options and of_class:
            raise UserError(f"{name} of {own} is declared as an option: write {name}: ClassVar[...] = ... instead.")
        kind.check(f"{name} of {own}", getattr(algorithm, name))
    for name in ("name", "title"):
        if not getattr(algorithm, name):
            raise UserError(f"{own} has no {name}: give it one, such as {name}: ClassVar[str] = '{own.lower()}'.")
    if not re.fullmatch("[a-z0-9][a-z0-9._-]*", algorithm.name):
        raise UserError(
            f"name of {own} {algorithm.name!r} will not do for commands and folders: give lower-case letters,"
            " digits, -, _ and ., a letter or digit first."
        )
    for name in sorted(options.intersection(taken)):
        raise UserError(f"{own} has an option called {name}, which every run already has: rename it.")
    _check_methods(type(algorithm))


@cache
def _facts() -> dict[str, tuple[Kind, bool]]:
    """The attributes that the base declares: the kind of each, and whether it is a ClassVar, so never an option."""
    hints = {name: hint for name, hint in get_type_hints(Algorithm).items() if not name.startswith("_")}
    return {name: (kind_of(hint), get_origin(hint) is ClassVar) for name, hint in hints.items()}


@cache
def _check_methods(kind: type[Algorithm]) -> None:
    """Every method of the base must take what it is called with."""
    for name, method in vars(Algorithm).items():
        if not isfunction(method) or name.startswith("_"):
            continue
        wanted, own = signature(method).parameters, getattr(kind, name)
        if not callable(own):
            raise UserError(f"{name} of {kind.__name__} is not a method: write def {name}({', '.join(wanted)}).")
        given = signature(own)
        # A plain method is also given the object; a static method is not.
        first = 0 if isfunction(getattr_static(kind, name)) else 1
        try:
            given.bind(*list(wanted)[first:])
        except TypeError:
            takes = ", ".join(given.parameters)
            raise UserError(
                f"{name} of {kind.__name__} takes ({takes}): write def {name}({', '.join(wanted)})."
            ) from None


def prepared_net(algorithm: Algorithm, net: Split) -> Split:
    """The net it trains."""
    with user_code(f"{algorithm.name}: prepare", maybe_ours=True):
        found = algorithm.prepare(net)
    if not isinstance(found, Split):
        raise UserError(
            f"{algorithm.name}: prepare returns a {type(found).__name__}: return a Split, like the one it is given."
        )
    return found


def starting_state(algorithm: Algorithm, ctx: Context) -> State:
    """The state that a run begins with."""
    where, workers = f"{algorithm.name}: init", len(ctx.ids)
    with user_code(where, maybe_ours=True), _repeatable(where):
        found = _state(algorithm.init(ctx), where)
    for name, leaf in {**found.params, **found.buffers}.items():
        if leaf.shape[:1] != (workers,):
            raise UserError(
                f"{where} returns {name} {list(leaf.shape)}: give it a row for each of the {workers} workers here,"
                f" [{workers}, ...]."
            )
        if leaf.dtype not in DTYPES:
            raise UserError(
                f"{where} returns {name} in {leaf.dtype}, which a checkpoint cannot hold: give it another type."
            )
    # A misspelt private group would protect nothing, and models that are not the net's could not be used in the end.
    ctx.known(algorithm.private, found, f"private group of {algorithm.name}")
    where = f"{algorithm.name}: models"
    with user_code(where, maybe_ours=True):
        models = _state(algorithm.models(found, ctx), where)
    given, wanted = (
        {name: _type_and_shape(leaf) for name, leaf in {**each.params, **each.buffers}.items()}
        for each in (models, ctx.initial)
    )
    for name in sorted({*given, *wanted}):
        if given.get(name) != wanted.get(name):
            what = f"not as the net has it, {wanted[name]}" if name in wanted else "that the net does not have"
            raise UserError(f"{where} returns {name} {what}: return the net's own leaves, and no others.")
    return found


def trained_state(algorithm: Algorithm, state: State, round: int, ctx: Context) -> tuple[State, Log]:
    """The state after local work, and its log."""
    where = f"{algorithm.name}: local"
    with _repeatable(where, state, round):
        found = algorithm.local(state, round, ctx)
    if not (isinstance(found, tuple) and len(found) == 2 and _is_log(found[1])):
        raise UserError(f"{where} does not return (State, Log): return both, as run_phases does.")
    workers = len(ctx.ids)
    for phase, work in found[1].items():
        for what, values, kind in (("loss", work.loss, "floats"), ("steps", work.steps, "int64")):
            fits = isinstance(values, Tensor) and values.shape == (workers,)
            if not (fits and (values.is_floating_point() if kind == "floats" else values.dtype == torch.int64)):
                raise UserError(
                    f"{where} returns a log in which '{phase}' has no {what} for each of the {workers} workers here:"
                    f" give a tensor [{workers}] of {kind}."
                )
    trained = _whole(found[0], where, state)
    # In the first round only, as it looks at every number.
    if round == 0 and not found[1] and (moved := _moved(state.params, trained.params)):
        raise UserError(
            f"{where} moves {moved}, but its log is empty, so that it would take no simulated time: return the log of"
            " run_phases, or your own, such as {'body': Work(loss, ctx.steps(Steps(1), rows))}."
        )
    return trained, found[1]


def mixed_state(algorithm: Algorithm, state: State, round: int, ctx: Context) -> State:
    """The state after mixing."""
    where = f"{algorithm.name}: mix"
    with _repeatable(where, state, round):
        found = algorithm.mix(state, round, ctx)
    return _whole(found, where, state)


def _state(found: object, where: str) -> State:
    """Refuse what is not a State of named tensors without gradients."""
    if not isinstance(found, State):
        raise UserError(f"{where} returns a {type(found).__name__}: return a State.")
    for what, leaves in (("params", found.params), ("buffers", found.buffers)):
        given: object = leaves
        if not isinstance(given, dict) or not all(
            isinstance(n, str) and isinstance(x, Tensor) for n, x in given.items()
        ):
            raise UserError(f"{where} returns a State whose {what} are not tensors by name: give a dict of them.")
        for name, leaf in leaves.items():
            if leaf.requires_grad:
                raise UserError(
                    f"{where} returns {name} with requires_grad=True: detach() it, or compute it under no_grad()."
                )
    return found


def _whole(found: object, where: str, before: State) -> State:
    """Refuse a state whose leaves are not those it had before, with the same shapes and types."""
    found = _state(found, where)
    for had, has in ((before.params, found.params), (before.buffers, found.buffers)):
        if changed := sorted(had.keys() ^ has.keys()):
            lost = changed[0] in had
            raise UserError(
                f"{where} {'loses' if lost else 'adds'} {changed[0]}: a state must keep the leaves it started with."
            )
        for name, leaf in has.items():
            if (now := _type_and_shape(leaf)) != (was := _type_and_shape(had[name])):
                raise UserError(f"{where} turns {name} from {was} into {now}: leave shapes and types as they are.")
    return found


def _moved(before: Params, after: Params) -> str | None:
    """The first leaf with other numbers than before; None: there is none."""
    return next((name for name, leaf in after.items() if not torch.equal(leaf, before[name])), None)


@contextmanager
def _repeatable(where: str, state: State | None = None, round: int = 0) -> Iterator[None]:
    """Refuse a block that changes ``state`` in place, as it is still used, or draws from a global generator.

    Draws are looked for in the first round only: later ones may come from another thread of the user's. Where runs go
    in threads they may do so even then, as when the net of the next run is made.
    """
    watched = round == 0 and threading.current_thread() is threading.main_thread()
    leaves = {} if state is None else {**state.params, **state.buffers}
    before = {name: leaf._version for name, leaf in leaves.items()}
    states = generator_states() if watched else None
    yield
    for name, leaf in leaves.items():
        if leaf._version != before[name]:
            raise UserError(f"{where} changes {name} in place, but it is still in use: return a new tensor.")
    if watched and generator_states() != states:
        raise UserError(
            f"{where} draws from torch's, numpy's or Python's own generator, so no run could be repeated: draw from"
            " manyheads.randomness.generator(ctx.seed, 'a name', worker=..., round=...)."
        )


def _type_and_shape(leaf: Tensor) -> str:
    return f"{leaf.dtype} {list(leaf.shape)}"


def _is_log(found: object) -> bool:
    return isinstance(found, dict) and all(isinstance(work, Work) for work in found.values())
