"""What the fields of an experiment, a runtime and an algorithm take: their types, their words, and numbers in range."""

from collections.abc import Callable
from dataclasses import fields
from math import isfinite
from os import PathLike, fspath
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
from torch import nn

from manyheads.data.dataset import Dataset
from manyheads.errors import UserError, flag, unknown

_NAMES: dict[Any, str] = {
    Callable: "a function",
    Dataset: "a Dataset, which from_arrays makes",
    nn.Module: "an nn.Module",
}
"""Types as messages name them, where that is not their own name."""


def positive(owner: object, *names: str) -> None:
    """Refuse numbers that are not above 0."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not (value > 0 and isfinite(value)):
            raise UserError(f"{flag(name)} {value} is not positive: give a number above 0.")


def not_negative(owner: object, *names: str) -> None:
    """Refuse numbers below 0."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not (value >= 0 and isfinite(value)):
            raise UserError(f"{flag(name)} {value} is negative: give a number of at least 0.")


def settle(owner: Any) -> None:
    """Numbers of numpy become Python's, words and paths what is wanted of the two; what does not fit is refused."""
    for spec in fields(owner):
        value = getattr(owner, spec.name)
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, str) and spec.type == Path | None:
            value = Path(value)
        elif isinstance(value, PathLike) and str in get_args(spec.type):
            value = fspath(value)
        check_value(spec.name, value, spec.type)
        object.__setattr__(owner, spec.name, value)


def check_value(name: str, value: Any, kind: Any) -> None:
    """A field takes values of its types alone; one typed as a Literal takes its words."""
    if words := _words(kind):
        may_be_none = not {None, NoneType}.isdisjoint(get_args(kind))
        if value not in words and not (value is None and may_be_none):
            raise unknown(flag(name), str(value), words)
        return
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    types: list[type] = [get_origin(part) or part for part in parts]
    if not all(isinstance(each, type) and each is not Any for each in types):
        # Of an algorithm of the user's own, such as Any.
        return
    also = [int] if float in types else []
    # Python counts True as a number.
    fits = bool in types if isinstance(value, bool) else isinstance(value, (*types, *also))
    if not fits:
        wanted = " or ".join(_NAMES.get(kind, kind.__name__) for kind in types if kind is not NoneType)
        raise UserError(f"{flag(name)} {shown(value)} is of the wrong type: give {wanted}.")


def shown(value: Any) -> str:
    """A value in a message of one line: arrays and the like by what they are."""
    return repr(value) if isinstance(value, (str, int, float, type, NoneType)) else f"({type(value).__name__})"


def _words(kind: Any) -> list[str]:
    args = get_args(kind)
    if get_origin(kind) is Literal:
        return [word for word in args if word is not None]
    return [word for part in args for word in _words(part)]
