"""The argument parser: argparse with one-line errors, near names, and options that are made only when needed."""

import argparse
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from manyheads.errors import UserError, unknown

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


def path(text: str) -> Path:
    """argparse's ``type`` for a file or folder: a shell leaves the ~ of --out=~/runs alone."""
    return Path(text).expanduser()


class _Formatter(argparse.HelpFormatter):
    """Paragraphs as wide as the terminal; examples, whose lines are indented, as they are written."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.strip().split("\n\n")
        return "\n\n".join(part if "\n  " in part else textwrap.fill(part, width) for part in parts)


class Parser(argparse.ArgumentParser):
    """A parser that raises UserError instead of printing its usage.

    ``fill`` adds the options when the parser is first used: those of most commands need torch, which takes seconds to
    import, and the list of commands must not wait for it. ``run`` is what the command does; without it, show the help.
    """

    def __init__(
        self,
        *,
        fill: Callable[["Parser"], None] | None = None,
        run: Callable[[argparse.Namespace], None] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **settings)
        self._fill = fill
        # argparse's own type for it has no public name.
        self._commands: Any = None
        self.set_defaults(parser=self, run=run or (lambda args: self.print_help()))

    def add_commands(self, modules: Iterable[ModuleType]) -> None:
        """Let the first word choose among commands, each a module of that name, ``inspect_data`` for ``data``.

        It says HELP in the list of commands, and USAGE, ABOUT and perhaps EXAMPLES in its own help.
        """
        self._commands = self.add_subparsers(metavar="COMMAND", title="commands", prog=self.prog, parser_class=Parser)
        for module in modules:
            self._commands.add_parser(
                re.split(r"[._]", module.__name__)[-1],
                help=module.HELP,
                usage=module.USAGE,
                description=module.ABOUT,
                epilog=vars(module).get("EXAMPLES"),
                fill=module.fill,
                run=module.run,
            )

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._fill is not None:
            fill, self._fill = self._fill, None
            fill(self)
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
        # Before Python 3.12 an optional word that stands after options is left over.
        if extra and getattr(args, "algorithm", "") is None:
            args.algorithm = extra.pop(0)
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
