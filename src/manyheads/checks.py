"""What the fields of an experiment, a runtime and an algorithm take: their types, their words, and numbers in range."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from os import PathLike, fspath
from pathlib import Path
from sys import float_info
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from torch import nn

from manyheads.data.dataset import Dataset
from manyheads.errors import UserError, flag, unknown
from manyheads.machine import expanded

_NAMES: dict[Any, str] = {
    Callable: "a function",
    Dataset: "a Dataset, which from_arrays makes",
    frozenset: "a frozenset such as frozenset({'head'})",
    nn.Module: "an nn.Module",
}
"""Types as messages name them, where that is not their own name."""

_FIELDS = {"graph": "a spec such as 'ring', or your own links as in 'links:0-1,1-2,0-2'"}
"""Fields whose type alone does not say what to give."""


def positive(owner: object, *names: str) -> None:
    """Refuse numbers that are not above 0."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and value <= 0:
            raise UserError(f"{flag(name)} {value} is not positive: give a number above 0.")


def not_negative(owner: object, *names: str) -> None:
    """Refuse numbers below 0."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and value < 0:
            raise UserError(f"{flag(name)} {value} is negative: give a number of at least 0.")


def normalise_fields(owner: Any) -> None:
    """Convert the fields of a dataclass to the types they declare, so that equal values are written alike.

    numpy's numbers become Python's, ints become floats where only floats are declared, and texts and paths become each
    other. A value that does not fit is refused, and so are NaN and infinite numbers.
    """
    for name, kind in field_kinds(type(owner)).items():
        value = getattr(owner, name)
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, (int, float)) and not abs(value) <= float_info.max:
            raise UserError(f"{flag(name)} {value} is not finite, or too large: give another number.")
        if isinstance(value, (str, Path)) and Path in kind.types and str not in kind.types:
            value = expanded(value)
        elif isinstance(value, PathLike) and str in kind.types:
            value = fspath(value)
        elif type(value) is int and float in kind.types and int not in kind.types:
            value = float(value)
        kind.check(flag(name), value, _FIELDS.get(name))
        if type(value) is int and value >= 2**63:
            raise UserError(f"{flag(name)} {value} is too large: give a number below 2**63.")
        if isinstance(value, (str, Path)):
            check_text(flag(name), str(value))
        object.__setattr__(owner, name, value)


def check_text(what: str, text: str) -> None:
    """Refuse zero bytes, which no path can hold, and lone surrogates, which Python has for bytes it cannot decode."""
    if "\0" in text:
        raise UserError(f"{what} {text!a} holds a zero byte: give it another name.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{what} {text!a} is not valid UTF-8: give it another name, or use a UTF-8 locale.") from None


@dataclass(frozen=True)
class Kind:
    """What a field takes: values of its types alone, or the words of its Literal."""

    types: tuple[type, ...]
    words: tuple[str, ...]

    def check(self, what: str, value: Any, give: str | None = None) -> None:
        """Refuse a value that does not fit. ``what`` names it; ``give``: what to give, if the types do not say that."""
        if self.words:
            # Types first: an array would be compared element by element.
            known = any(isinstance(value, type(word)) and value == word for word in self.words)
            if not known and not (value is None and NoneType in self.types):
                raise unknown(what, value if isinstance(value, str) else shown(value), self.words)
            return
        if not all(isinstance(each, type) and each is not Any for each in self.types):
            # A user's own algorithm may declare what cannot be checked, such as Any.
            return
        also = [int] if float in self.types else [set] if frozenset in self.types else []
        # Python counts True as a number.
        fits = bool in self.types if isinstance(value, bool) else isinstance(value, (*self.types, *also))
        if not fits:
            names = " or ".join(_NAMES.get(kind, kind.__name__) for kind in self.types if kind is not NoneType)
            raise UserError(f"{what} {shown(value)} is of the wrong type: give {give or names}.")


@cache
def field_kinds(owner: type) -> dict[str, Kind]:
    """What each field of a dataclass takes."""
    types = get_type_hints(owner)
    return {spec.name: kind_of(types[spec.name]) for spec in fields(owner)}


def shown(value: Any) -> str:
    """A value in a message of one line: arrays and other objects by their type."""
    return repr(value) if isinstance(value, (str, int, float, type, NoneType)) else f"({type(value).__name__})"


def kind_of(annotation: Any) -> Kind:
    """What a field with this annotation takes."""
    if get_origin(annotation) is ClassVar:
        (annotation,) = get_args(annotation)
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    literals = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    types = [get_origin(part) or part for part in parts]
    return Kind(
        tuple(NoneType if None in literals and each is Literal else each for each in types),
        tuple(word for word in literals if word is not None),
    )
