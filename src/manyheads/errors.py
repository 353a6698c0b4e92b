"""What a user did wrong, said in one line: what was given, what is allowed, what to do."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from traceback import walk_tb

_LONGEST_LINE = 2000
_NOT_THE_USERS = {"manyheads", "torch", "triton", "numpy", "networkx", "safetensors", "rich", "matplotlib", "jinja2"}
"""This package and those it stands on."""


class UserError(ValueError):
    """A mistake the user can fix. Its message is one line; the command line prints it and exits with 2."""


class Diverged(UserError):
    """A loss is not a number any more: with these rates the run cannot go on."""


class Transient(UserError):
    """An error that may be gone when the same command is started again: something is missing just now."""


@contextmanager
def user_code(what: str, *, maybe_ours: bool = False) -> Iterator[None]:
    """Turn what goes wrong in the user's own code into one line that says what and where; the cause stays attached.

    With ``maybe_ours`` the code may also be ours: an error is then turned only if it came through a file of the
    user's, or out of one of torch's layers.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        line, layer = _places(error)
        if is_out_of_memory(error) or (maybe_ours and not (line or layer)):
            raise
        said = f"{what} fails{line or layer}: {first_line(error)}"
        if layer and not line:
            said = f"{said.rstrip('.')}. Change this layer, or what it is given."
        raise UserError(said) from error


def _places(error: Exception) -> tuple[str, str]:
    """Where an error came from: the last line in the user's files, and the layer of torch's; each may be empty."""
    line, layer = "", ""
    for frame, number in walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__"))
        package = module.partition(".")[0]
        if package not in _NOT_THE_USERS and package not in sys.stdlib_module_names:
            line = f" in {frame.f_code.co_filename}, line {number}"
        elif package == "manyheads":
            layer = ""
        elif module.startswith("torch.nn.modules.") and frame.f_code.co_name == "forward":
            failing = frame.f_locals["self"]
            layer = f" in {type(failing).__name__}({failing.extra_repr()})"
    return line, layer


def first_line(error: BaseException) -> str:
    """The type of an error and, if it has a message, the first line of that."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def is_out_of_memory(error: Exception) -> bool:
    """torch has an error of its own for GPUs, and a plain RuntimeError for the host's memory."""
    if isinstance(error, RuntimeError):
        return "out of memory" in str(error) or "can't allocate memory" in str(error)
    return isinstance(error, MemoryError)


def one_line(message: str) -> str:
    """A message as it is shown: one line of bearable length, without control characters for a terminal."""
    line = " ".join(message.split())[:_LONGEST_LINE]
    return "".join(character if character.isprintable() else "?" for character in line)


def flag(name: str) -> str:
    """The option that sets a field, as messages name it: ``head_lr`` -> ``--head-lr``."""
    return "--" + name.replace("_", "-")


def unknown(kind: str, given: str, allowed: Iterable[str]) -> UserError:
    """The error for an unknown name, with the nearest allowed one: ``unknown("graph", "Rong", ["ring"])``."""
    names = sorted(allowed)
    by_lower = {name.lower(): name for name in names}
    close = get_close_matches(given.lower(), by_lower, n=1)
    hint = f" Did you mean '{by_lower[close[0]]}'?" if close else ""
    return UserError(f"unknown {kind} '{given}'.{hint} Allowed: {', '.join(names)}.")
