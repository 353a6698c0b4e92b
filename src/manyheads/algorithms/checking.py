"""What an algorithm is and gives back, looked at before it is used: it may be the user's own, and mistaken."""

from collections.abc import Collection
from dataclasses import fields, is_dataclass
from functools import cache
from inspect import getattr_static, isfunction, signature
from typing import ClassVar, get_origin, get_type_hints

from manyheads.algorithms.base import Algorithm, Context, Log, State, Work
from manyheads.checks import Kind, kind_of
from manyheads.errors import UserError
from manyheads.models.split import statistics
from manyheads.tree import shapes


def check_class(algorithm: Algorithm, taken: Collection[str]) -> None:
    """What its class says must be there and of the kind that the base has it; ``taken``: names that no option may have.

    Of an object, since what the base says of a class a property may say of its options.
    """
    own = type(algorithm).__name__
    if not is_dataclass(algorithm):
        raise UserError(f"{own} is no dataclass: write @dataclass(frozen=True, kw_only=True) above it.")
    options = {spec.name for spec in fields(algorithm)}
    for name, (kind, of_class) in _facts().items():
        if name in options and of_class:
            raise UserError(f"{name} of {own} has become an option: write {name}: ClassVar[...] = ... in its place.")
        kind.check(f"{name} of {own}", getattr(algorithm, name))
    for name in ("name", "title"):
        if not getattr(algorithm, name):
            raise UserError(f"{own} has no {name}: give it one, as {name}: ClassVar[str] = '{own.lower()}'.")
    for name in sorted(options.intersection(taken)):
        raise UserError(f"{name}, an option of {own}, is one of every run's: call it otherwise.")
    _check_methods(type(algorithm))


@cache
def _facts() -> dict[str, tuple[Kind, bool]]:
    """What the base says of every algorithm: of which kind it is, and whether the class alone says it."""
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
            raise UserError(f"{name} of {kind.__name__} is no method: write def {name}({', '.join(wanted)}).")
        given = signature(own)
        # A function of the class is given the object as well; a static method is not.
        first = 0 if isfunction(getattr_static(kind, name)) else 1
        try:
            given.bind(*list(wanted)[first:])
        except TypeError:
            takes = ", ".join(given.parameters)
            raise UserError(
                f"{name} of {kind.__name__} takes ({takes}): write def {name}({', '.join(wanted)})."
            ) from None


def trained_state(algorithm: Algorithm, state: State, round: int, ctx: Context) -> tuple[State, Log]:
    """The state after local work, and its log."""
    found = algorithm.local(state, round, ctx)
    if not (isinstance(found, tuple) and len(found) == 2 and _is_log(found[1])):
        raise UserError(f"{algorithm.name}: local gives no (State, Log): return both, as run_phases does.")
    return _whole(found[0], f"{algorithm.name}: local", state), found[1]


def mixed_state(algorithm: Algorithm, state: State, round: int, ctx: Context) -> State:
    """The state after mixing."""
    return _whole(algorithm.mix(state, round, ctx), f"{algorithm.name}: mix", state)


def check_first(algorithm: Algorithm, state: State, ctx: Context) -> None:
    """What is said of the first state must fit it.

    A private group that is misspelt would guard nothing; models that are not the net's nobody could use in the end.
    """
    ctx.known(algorithm.private, state, f"private group of {algorithm.name}")
    if not isinstance(models := algorithm.models(state, ctx), State):
        raise UserError(f"{algorithm.name}: models gives a {type(models).__name__}: return a State.")
    given = {name: leaf.shape[1:] for name, leaf in {**models.params, **models.buffers}.items()}
    wanted = shapes({**dict(ctx.model.named_parameters()), **statistics(ctx.model)})
    for name in sorted({*given, *wanted}):
        if given.get(name) != wanted.get(name):
            what = "that the net has not" if name not in wanted else "not as the net has it"
            raise UserError(f"{algorithm.name}: models gives {name} {what}: give the net's own leaves, and no others.")


def _whole(found: State, where: str, before: State) -> State:
    """A state that has all it had before, and nothing else."""
    if not isinstance(found, State):
        raise UserError(f"{where} gives a {type(found).__name__}: return a State.")
    for had, has in ((before.params, found.params), (before.buffers, found.buffers)):
        if changed := sorted(had.keys() ^ has.keys()):
            lost = changed[0] in had
            raise UserError(f"{where} {'loses' if lost else 'adds'} {changed[0]}: a state has the leaves of its first.")
        for name, leaf in has.items():
            if (leaf.shape, leaf.dtype) != (had[name].shape, had[name].dtype):
                was, now = (f"{each.dtype} {list(each.shape)}" for each in (had[name], leaf))
                raise UserError(f"{where} makes {name} {now}, and it was {was}: leave shapes and types as they are.")
    return found


def _is_log(found: object) -> bool:
    return isinstance(found, dict) and all(isinstance(work, Work) for work in found.values())
