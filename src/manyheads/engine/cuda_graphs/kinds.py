"""Which phases can share recordings: those that do the same work with other weights, batches and rates."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from types import FunctionType

from manyheads.engine.cuda_graphs.descent import UpdateRule
from manyheads.engine.phase import Phase


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
    if not isinstance(function, FunctionType):
        return function if _hashes(function) else id(function)
    cells, named = function.__closure__ or (), function.__kwdefaults__ or {}
    things = [*(cell.cell_contents for cell in cells), *(function.__defaults__ or ()), *named.values()]
    within = inside_of | {id(function)}
    inside = tuple(meaning(thing, within) if callable(thing) else _identity(thing) for thing in things)
    return (function.__code__, inside)


def _hashes(thing: object) -> bool:
    try:
        hash(thing)
    except TypeError:
        return False
    return True


def _identity(thing: object) -> Hashable:
    """The thing itself for plain values, which are interchangeable if equal; for anything else its id."""
    # Recordings keep the function, and with it the thing, so that no other thing can get its id.
    return thing if isinstance(thing, (bool, int, float, str, bytes, type(None), frozenset)) else id(thing)
