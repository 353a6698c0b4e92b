"""What a user has written, found by its name: ``package.module:name``."""

import sys
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from manyheads.errors import UserError, first_line

_FUNCTION = "a function, or an object that can be called like one"


def find(option: str, spec: str, what: str) -> Any:
    """What ``spec`` names for an ``option``; ``what`` it should be is said where there is no such name."""
    name, _, rest = spec.partition(":")
    if name.endswith(".py"):
        raise UserError(f"{option} '{spec}': write {Path(name).stem}:{rest}, and start in the folder of that file.")
    if not name or name.startswith("."):
        raise UserError(f"{option} '{spec}': write the whole name of the module, as package.module:{rest}.")
    try:
        module = _imported(name)
    except (Exception, SystemExit) as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]
        hint = ": start in the folder that holds it, or add that folder to PYTHONPATH." if absent else ""
        raise UserError(f"{option} '{spec}': cannot import {name}: {first_line(error)}{hint}") from error
    if rest not in vars(module):
        near = get_close_matches(rest, vars(module), n=1)
        hint = f". Did you mean '{near[0]}'?" if near else f": name {what}."
        raise UserError(f"{option} '{spec}': {name} has no '{rest}'{hint}")
    return vars(module)[rest]


def _imported(name: str) -> ModuleType:
    """A module; the file that Python was started with is not run again, as it may register an algorithm."""
    started = vars(sys.modules["__main__"]).get("__file__")
    if started is not None and name not in sys.modules:
        spec = find_spec(name)
        if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == Path(started).resolve():
            return sys.modules["__main__"]
    return import_module(name)


def find_function(option: str, spec: str) -> Any:
    """The function that ``spec`` names for an ``option``."""
    found = find(option, spec, _FUNCTION)
    if isinstance(found, type) or not callable(found):
        kind = "a class" if isinstance(found, type) else f"of type {type(found).__name__}"
        raise UserError(f"{option} '{spec}' is {kind}: name {_FUNCTION}.")
    return found


def check_name(option: str, spec: str) -> None:
    """Refuse what cannot be the name of a function of the user's; nothing is imported."""
    if ":" not in spec:
        raise UserError(f"{option} '{spec}' is not package.module:function: name one of yours so, as losses:squared.")
