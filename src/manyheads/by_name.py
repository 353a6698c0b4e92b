"""What a user has written, found by its name: ``package.module:name``."""

import importlib
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from manyheads.errors import UserError, first_line

_FUNCTION = "a function, or an object that can be called like one"


def find(option: str, spec: str, what: str) -> Any:
    """What ``spec`` names for an ``option``; ``what`` it should be is said where there is no such name."""
    name, _, rest = spec.partition(":")
    if name.endswith(".py"):
        raise UserError(f"{option} '{spec}': write {Path(name).stem}:{rest}, and start in the folder of that file.")
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]
        hint = ": start in the folder that holds it, or add that folder to PYTHONPATH." if absent else ""
        raise UserError(f"{option} '{spec}': cannot import {name}: {first_line(error)}{hint}") from error
    if rest not in vars(module):
        near = get_close_matches(rest, vars(module), n=1)
        hint = f". Did you mean '{near[0]}'?" if near else f": name {what}."
        raise UserError(f"{option} '{spec}': {name} has no '{rest}'{hint}")
    return vars(module)[rest]


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
        raise UserError(f"{option} '{spec}' is not package.module:function: name {_FUNCTION} of your own so.")
