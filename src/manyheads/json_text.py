"""JSON as it is written here, for every reader, and as it is read, from files that may be damaged or foreign."""

import json
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from sys import float_info
from typing import Any

from manyheads.files import write_atomically


def write_json(path: Path, value: Any) -> None:
    """Replace a file by JSON for people and programs."""
    write_atomically(path, (to_json(value, indent=2) + "\n").encode())


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: numbers that are not finite become null."""
    return json.dumps(with_floats(value, lambda x: x if isfinite(x) else None), indent=indent, allow_nan=False)


def with_floats(value: Any, change: Callable[[float], Any]) -> Any:
    """A value that JSON can hold, every float in it changed."""
    if isinstance(value, float):
        return change(value)
    if isinstance(value, Mapping):
        return {key: with_floats(item, change) for key, item in value.items()}
    return [with_floats(item, change) for item in value] if isinstance(value, (list, tuple)) else value


def read_json(path: Path) -> Any:
    """The value in a JSON file; None: there is no file, or it is damaged."""
    try:
        return parse_json(path.read_bytes())
    except PermissionError:
        # The file is there: it must not be taken for missing.
        raise
    except OSError:
        return None


def parse_json(text: bytes) -> Any:
    """The value in a JSON text; None: it is damaged, or holds what ``to_json`` never writes."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        if b"\\u" in text:
            # Halves of characters, which no file takes.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def fits(value: Any, kind: Any) -> bool:
    """Whether a value from a file is of a kind, so that damaged and foreign files are noticed where they are read.

    A kind is a type (float: any number that a float holds), a range of whole numbers, ``[kind]`` of every item,
    ``{key: kind}`` with no other keys, or a tuple of kinds.
    """
    # The most frequent first: files of records have a number for every metric and round.
    if isinstance(kind, tuple):
        return fits(value, kind[0]) or (len(kind) > 1 and fits(value, kind[1:]))
    if kind is float:
        return type(value) in (float, int) and -float_info.max <= value <= float_info.max
    if isinstance(kind, range):
        return type(value) is int and value in kind
    if isinstance(kind, list):
        return isinstance(value, list) and all(fits(each, kind[0]) for each in value)
    if isinstance(kind, dict):
        same = isinstance(value, dict) and value.keys() == kind.keys()
        return same and all(fits(value[key], kind[key]) for key in kind)
    return isinstance(value, kind)


def _refuse(constant: str) -> None:
    """NaN and the infinite."""
    raise ValueError(constant)
