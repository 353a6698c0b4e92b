"""What a user did wrong, said in one line: what was given, what is allowed, what to do."""

from collections.abc import Iterable
from difflib import get_close_matches

_LONGEST_LINE = 2000


class UserError(ValueError):
    """A mistake the user can mend. Its message is one line; the command line prints it and exits with 2."""


class Diverged(UserError):
    """A loss became no number: with these rates the run cannot go on."""


class Passing(UserError):
    """One that may have passed when the same command is started again: somebody or something is not there just now."""


def one_line(message: str) -> str:
    """A message as it is shown: on one line of bearable length, with nothing in it that a terminal would obey."""
    line = " ".join(message.split())[:_LONGEST_LINE]
    return "".join(character if character.isprintable() else "?" for character in line)


def flag(name: str) -> str:
    """The option that sets a field, as messages name it: ``head_lr`` -> ``--head-lr``."""
    return "--" + name.replace("_", "-")


def unknown(kind: str, given: str, allowed: Iterable[str]) -> UserError:
    """An unknown name, with the nearest allowed one, in whatever case: ``unknown("graph", "Rong", ["ring"])``."""
    names = sorted(allowed)
    by_lower = {name.lower(): name for name in names}
    close = get_close_matches(given.lower(), by_lower, n=1)
    hint = f" Did you mean '{by_lower[close[0]]}'?" if close else ""
    return UserError(f"unknown {kind} '{given}'.{hint} Allowed: {', '.join(names)}.")
