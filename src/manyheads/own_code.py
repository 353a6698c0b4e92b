"""The user's own code in an experiment, known by a hash of what runs, so that a run is of one algorithm to its end."""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from functools import cache, cached_property, partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from manyheads.algorithms import Algorithm
from manyheads.errors import UserError
from manyheads.experiment import FUNCTIONS, Experiment
from manyheads.identity import described
from manyheads.models.registry import find_factory

_NOT_OWN = {"manyheads", "torch", "numpy", "builtins"}
"""Packages whose code is not hashed: a run's summary has their versions."""

PYTHON = "python"
"""Python's version, kept beside the hashes: two versions compile the same lines into different code."""

_CACHED = type(cache(len))
"""What functools.cache and lru_cache make of a function."""

_PLAIN = (bool, int, float, str, tuple, frozenset)
"""Attributes of a class whose values are hashed."""


def hashes(experiment: Experiment) -> dict[str, str]:
    """A hash for each field of the experiment that holds code of the user's, and Python's version; empty: none does."""
    held: dict[str, Any] = {"algorithm": experiment.algorithm}
    held |= {name: experiment.own(name) for name in FUNCTIONS}
    held["model"] = find_factory(experiment.model) if isinstance(experiment.model, str) else experiment.model
    found = {name: _hash(value) for name, value in held.items() if value is not None}
    own = {name: known for name, known in found.items() if known is not None}
    return {PYTHON: f"{sys.version_info.major}.{sys.version_info.minor}", **own} if own else {}


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """The first field whose code has changed; None: none has, or the Pythons differ and nobody can tell."""
    if before.get(PYTHON) != after.get(PYTHON):
        return None
    return next((name for name in before if name in after and before[name] != after[name]), None)


def _hash(value: Any) -> str | None:
    """The hash of a function, a class or an object's class; None: it is not the user's.

    For a class its own functions and plain attributes count, not what these call or what it inherits. Docstrings,
    comments, the place in the file and an algorithm's title do not count.
    """
    value = _unwrapped(value)
    known = value if isinstance(value, (type, FunctionType)) else type(value)
    if (known.__module__ or "").partition(".")[0] in _NOT_OWN:
        return None
    parts = _of_class(known) if isinstance(known, type) else _of_function(known)
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()


def _unwrapped(value: Any) -> Any:
    """What Python's and functools' wrappers hold: the function of a method, a partial or a cache."""
    while True:
        if isinstance(value, (partial, cached_property)):
            value = value.func
        elif isinstance(value, (MethodType, staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, _CACHED):
            value = value.__wrapped__
        else:
            return value


def _of_class(kind: type) -> Iterator[Any]:
    held = dict(vars(kind))
    if issubclass(kind, Algorithm):
        # It is only shown.
        held.pop("title", None)
    for name, value in sorted(held.items()):
        for each in (value.fget, value.fset) if isinstance(value, property) else (_unwrapped(value),):
            if isinstance(each, FunctionType):
                yield [name, *_of_function(each)]
        if isinstance(value, _PLAIN) and not name.startswith("__"):
            yield [name, _constant(value)]


def _of_function(function: FunctionType) -> Iterator[Any]:
    yield _of_code(function.__code__, function.__doc__)
    positional = None if function.__defaults__ is None else [*map(_default, function.__defaults__)]
    named = sorted((function.__kwdefaults__ or {}).items())
    yield [positional, *([name, _default(value)] for name, value in named)]
    if isinstance(wrapped := getattr(function, "__wrapped__", None), FunctionType):
        yield from _of_function(wrapped)


def _default(value: Any) -> Any:
    try:
        return described(value)
    except UserError:
        # A mere marker for an argument that was not given, such as object().
        return type(value).__name__


def _of_code(code: CodeType, docstring: str | None = None) -> list[Any]:
    constants = [None if docstring is not None and each == docstring else _constant(each) for each in code.co_consts]
    return [code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, constants]


def _constant(value: Any) -> Any:
    """A constant in a form that is the same in every process, unlike the order of sets and the repr of code."""
    if isinstance(value, CodeType):
        return _of_code(value)
    if isinstance(value, tuple):
        return [_constant(each) for each in value]
    if isinstance(value, frozenset):
        return sorted(map(repr, value))
    return [type(value).__name__, repr(value)]
