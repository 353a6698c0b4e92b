"""The argument parser: argparse with one-line errors, near names, and options that are made only when needed."""

import argparse
import textwrap
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from manyheads.errors import UserError, unknown
from manyheads.machine import expanded

_NEAR = 0.7
"""How alike an unknown option and the one that may have been meant must be, 0 to 1."""


def whole_number(text: str) -> int:
    """argparse's ``type`` for a whole number."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number.") from None
    if abs(number) >= 2**63:
        raise argparse.ArgumentTypeError(f"'{text}' is too large: give a number that fits into 64 bits.")
    return number


def number(text: str) -> float:
    """argparse's ``type`` for a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number.") from None


def one_of_several(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """argparse's ``type`` for an option of several values, each read by ``read``."""

    def one(text: str) -> Any:
        try:
            return read(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}{by_spaces(text)}") from None

    return one


def by_spaces(text: str) -> str:
    """What to add to the refusal of one of several values: how to separate them, if there are commas in it."""
    parts = " ".join(filter(None, text.split(",")))
    return f" Separate values by spaces: {parts}." if "," in text else ""


def path(text: str) -> Path:
    """argparse's ``type`` for a file or folder: a shell leaves the ~ of --out=~/runs alone."""
    try:
        return expanded(text)
    except UserError as error:
        # argparse would take it for a ValueError, and say less.
        raise argparse.ArgumentTypeError(str(error)) from None


class _Formatter(argparse.HelpFormatter):
    """Paragraphs as wide as the terminal; examples, whose lines are indented, as they are written."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.strip().split("\n\n")
        return "\n\n".join(part if "\n  " in part else textwrap.fill(part, width) for part in parts)


class Parser(argparse.ArgumentParser):
    """A parser that raises UserError instead of printing its usage.

    ``module``: what the command is, imported when the parser is first used: most commands need torch, which takes
    seconds to import, and the list of commands must not wait for it. Without a module, show the help.
    """

    def __init__(self, *, module: str = "", **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **settings)
        self._module = module
        # argparse's own type for it has no public name.
        self._commands: Any = None
        self.set_defaults(parser=self, run=lambda args: self.print_help())

    def add_commands(self, prefix: str, commands: Mapping[str, str]) -> None:
        """Let the first word choose among commands, given with what each does; each is a module ``prefix`` + name.

        It has ``fill(parser)`` and ``run(args)``, and USAGE, ABOUT and perhaps EXAMPLES for its own help.
        """
        self._commands = self.add_subparsers(metavar="COMMAND", title="commands", prog=self.prog, parser_class=Parser)
        for name, what in commands.items():
            self._commands.add_parser(name, help=what, module=f"{prefix}{name}")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._module:
            module, self._module = import_module(self._module), ""
            self.usage, self.description, self.epilog = module.USAGE, module.ABOUT, vars(module).get("EXAMPLES")
            module.fill(self)
            self.set_defaults(run=module.run)
        if self._commands is not None:
            word = next(iter(args or ()), "").partition("=")[0]
            if word.startswith("-") and word not in self._option_string_actions:
                # Otherwise argparse would take the option's value for the command.
                raise self.unknown_option(word)
            if word and not word.startswith("-") and word not in self._commands.choices:
                raise unknown("command", word, self._commands.choices)
        return super().parse_known_args(args, namespace)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The arguments; one that fits nowhere is an error that names the nearest option."""
        args, extra = self.parse_known_args(argv)
        for word in extra:
            if word.startswith("-"):
                raise args.parser.unknown_option(word.partition("=")[0])
        if extra:
            raise UserError(f"unexpected word '{extra[0]}': see {args.parser.prog} --help.")
        return args

    def unknown_option(self, flag: str) -> UserError:
        close = get_close_matches(flag, self._option_string_actions, n=1, cutoff=_NEAR)
        hint = f"Did you mean {close[0]}?" if close else f"See {self.prog} --help."
        return UserError(f"unknown option {flag}. {hint}")

    def error(self, message: str) -> NoReturn:
        _, required, missing = message.partition("arguments are required: ")
        if required:
            raise UserError(f"{missing} not given: see {self.prog} --help.")
        raise UserError(message.removeprefix("argument ").replace("ignored explicit argument", "takes no value, given"))
