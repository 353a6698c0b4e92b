"""Which phases can share recordings: those that do the same work with other weights, batches and rates."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType, ModuleType

from manyheads.engine.cuda_graphs.descent import UpdateRule
from manyheads.engine.phase import Phase

_PLAIN = (bool, int, float, str, bytes, type(None), frozenset)


def bare(phase: Phase) -> Phase:
    """The phase without any worker's tensors, which a recording must not keep in memory."""
    return replace(
        phase,
        constants={name: leaf.new_zeros(1, *leaf.shape[1:]) for name, leaf in phase.constants.items()},
        proximal=None if phase.proximal is None else ({}, phase.proximal[1]),
        mask=None if phase.mask is None else {name: leaf.new_empty(0) for name, leaf in phase.mask.items()},
    )


def kind(phase: Phase) -> Hashable:
    """Equal for phases that differ at most in their stream, their rate and their workers' tensors."""
    constants = tuple((name, tuple(leaf.shape[1:]), leaf.dtype) for name, leaf in phase.constants.items())
    return (
        phase.update,
        phase.amount,
        phase.frozen,
        UpdateRule.of(phase),
        phase.proximal is None,
        # Which leaves have a mask: those of the others are ones from the start, and are never loaded.
        None if phase.mask is None else frozenset(phase.mask),
        constants,
        meaning(phase.objective),
    )


def meaning(function: Callable, inside_of: frozenset[int] = frozenset()) -> Hashable:
    """Equal for functions with the same code, closure and defaults, such as a closure made anew in every round.

    ``inside_of``: the functions in whose closures it was found, by id. One of these calls itself.
    """
    if id(function) in inside_of:
        return None
    if isinstance(function, MethodType):
        return (function.__func__, _identity(function.__self__))
    if isinstance(function, partial):
        code, things = None, [function.func, *function.args, *function.keywords, *function.keywords.values()]
    elif isinstance(function, FunctionType):
        cells, named = function.__closure__ or (), function.__kwdefaults__ or {}
        code = function.__code__
        things = [*(cell.cell_contents for cell in cells), *(function.__defaults__ or ()), *named.values()]
    else:
        return function if _equal_by_value(function) else _identity(function)
    within = inside_of | {id(function)}
    return (code, tuple(meaning(thing, within) if callable(thing) else _identity(thing) for thing in things))


def _equal_by_value(thing: object) -> bool:
    """Whether a thing can be hashed by what it holds, which then does not change."""
    try:
        hash(thing)
    except TypeError:
        return False
    return type(thing).__hash__ is not object.__hash__


class _Same:
    """Equal to itself only; it keeps the thing, so that no other thing can get its id."""

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)


def _identity(thing: object, seen: set[int] | None = None) -> Hashable:
    """The thing itself for plain values, which are interchangeable if equal.

    Anything else is only what it is, and that only while it and what is in it hold what they hold now: they may change
    between rounds. ``seen``: what was looked into before, by id.
    """
    if isinstance(thing, _PLAIN):
        return thing
    seen = set() if seen is None else seen
    # A module of Python's gets new names whenever something is imported.
    if id(thing) in seen or isinstance(thing, (ModuleType, type)):
        return _Same(thing)
    seen.add(id(thing))
    return (_Same(thing), tuple(_identity(part, seen) for part in _parts(thing)))


def _parts(thing: object) -> list[object]:
    if isinstance(thing, (list, tuple)):
        return list(thing)
    held = thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})
    # Attributes that begin with _ are the thing's own business, as everywhere: a counter is no other objective.
    return [part for name, value in held.items() if not str(name).startswith("_") for part in (name, value)]
