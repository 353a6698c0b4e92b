"""Command-line options made out of dataclass fields, and experiments made out of the options that were given."""

import argparse
import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any

from manyheads.algorithms import REGISTRY, Algorithm, registered, unknown_algorithm
from manyheads.algorithms.base import epochs_by_steps
from manyheads.algorithms.checking import making
from manyheads.checks import field_kinds
from manyheads.cli.parser import by_spaces, number, one_of_several, path, whole_number
from manyheads.derived import exchange_of
from manyheads.errors import UserError, flag, unknown
from manyheads.experiment import FUNCTIONS, Experiment, Runtime, check_algorithm
from manyheads.presets import PRESETS, apply
from manyheads.recipes import Recipe, step_seconds
from manyheads.store.layout import EXPERIMENT
from manyheads.topology import is_graph, parse_graph

_SECTIONS = {
    "data": "data and net",
    "workers": "who holds what",
    "graph": "who mixes with whom",
    "rounds": "training",
    "step_seconds": "simulated time",
}
"""Titles of the help page's sections, each under the experiment field that it begins with."""

_AUTO = "auto"
"""The word for a value that is left open: None in Python."""

_SWITCH = {"yes": True, "no": False}


@dataclass(frozen=True)
class Option:
    """One dataclass field as the command line sees it."""

    name: str
    kind: type
    """bool, int, float, str or Path."""
    choices: tuple[str, ...]
    """The words of its Literal; empty: it has none."""
    open: bool
    """Whether None is allowed."""
    default: Any
    help: str

    @property
    def flag(self) -> str:
        return flag(self.name)

    @property
    def words(self) -> tuple[str, ...]:
        """The words that may be given, those of a switch included; empty: any."""
        return self.choices or (tuple(_SWITCH) if self.kind is bool else ())

    def read(self, text: str) -> Any:
        """The value that a word on the command line stands for: argparse's ``type``."""
        if self.open and text == _AUTO and self.kind is not Path:
            return None
        if self.words and text not in self.words:
            raise argparse.ArgumentTypeError(str(unknown("value", text, self.words)))
        if self.kind is bool:
            return _SWITCH[text]
        return {int: whole_number, float: number}.get(self.kind, self.kind)(text)


@cache
def options_of(owner: type) -> dict[str, Option]:
    """A dataclass's fields as options. A field that no word can stand for, such as a function, is left out."""
    docs, takes = _field_docs(owner), field_kinds(owner)
    found = {}
    # A class's own fields come before those it inherits.
    for spec in sorted(fields(owner), key=lambda spec: spec.name not in inspect.get_annotations(owner)):
        types, words = takes[spec.name].types, takes[spec.name].words
        kind = str if words else next((plain for plain in (bool, int, float, str, Path) if plain in types), None)
        if kind is not None:
            default = None if spec.default is MISSING else spec.default
            found[spec.name] = Option(spec.name, kind, words, NoneType in types, default, docs.get(spec.name, ""))
    return found


def add_options(
    parser: argparse.ArgumentParser, *, several: bool = False, runtime: Iterable[str] | None = None
) -> None:
    """Add ALGORITHM and every option of Experiment, of each algorithm and of Runtime (all, unless named).

    Only options that are given reach the namespace. ``several``: those of Experiment and the algorithms take one value
    or more (a grid), so that the namespace holds lists; a switch then takes ``yes`` and ``no``, or nothing for ``yes``,
    and ``--seed`` is ``--seeds``.
    """
    parser.add_argument("algorithm", metavar="ALGORITHM", nargs="+" if several else "?", help=", ".join(REGISTRY))
    parser.add_argument(
        "--from",
        dest="source",
        type=path,
        metavar="RUN",
        help="start from the options of another run (its directory or experiment.json); options given here override"
        " them",
    )
    parser.add_argument(
        "--preset",
        default="recipe",
        metavar="{" + ",".join(PRESETS) + "}",
        help="start from the data set's recipe, each paper's own values, or those of the DePRL authors' code [recipe]",
    )
    group = parser
    for name, option in options_of(Experiment).items():
        if name in _SECTIONS:
            group = parser.add_argument_group(_SECTIONS[name])
        if not (several and name == "seed"):
            _add(group, option, _explained(option), several)
    group = parser.add_argument_group("the algorithm's own")
    for name, owners in _algorithm_options().items():
        try:
            _add(group, _merged(owners), _explained_by_algorithm(owners), several)
        except argparse.ArgumentError:
            who = ", ".join(owners)
            raise UserError(
                f"{flag(name)} of {who} clashes with an option of the command line itself: rename it."
            ) from None
    add_fields(parser, Runtime, runtime, title="where and how")


def add_fields(parser: argparse.ArgumentParser, owner: type, names: Iterable[str] | None = None, *, title: str) -> None:
    """Add some of a dataclass's fields (all, unless named) as a section of options."""
    group, known = parser.add_argument_group(title), options_of(owner)
    for option in known.values() if names is None else [known[name] for name in names]:
        _add(group, option, _explained(option), several=False)


def given(args: argparse.Namespace, owner: type) -> dict[str, Any]:
    """The values of a dataclass's fields that were given as options."""
    return {name: vars(args)[name] for name in options_of(owner) if name in args}


def _read(path: Path, named: Mapping[str, Any]) -> Experiment:
    """The experiment in a file or a run directory; what followed from its net or algorithm is left open again.

    ``named``: functions that replace those of the file, which may be known by their kind alone.
    """
    path = path / EXPERIMENT if path.is_dir() else path
    try:
        experiment = Experiment.from_json(path.read_text(encoding="utf-8"), **named)
        changes = {}
        if experiment.batch_size and experiment.step_seconds == step_seconds(experiment.model, experiment.batch_size):
            changes["step_seconds"] = None
        if (
            is_graph(experiment.graph)
            and experiment.weights == exchange_of(replace(experiment, weights=None))["weights"]
        ):
            changes["weights"] = None
        return replace(experiment, **changes)
    except OSError as error:
        raise UserError(f"--from {path}: {error.strerror}: give a run's directory, or its experiment.json.") from None
    except UnicodeDecodeError:
        raise UserError(f"--from {path} is not a text file: give an experiment.json that manyheads wrote.") from None
    except UserError as error:
        raise UserError(f"--from {path}: {error}") from None


def experiments(args: argparse.Namespace) -> list[Experiment]:
    """The experiments that were asked for: every combination of the values given, algorithm by algorithm."""
    named = {name: _listed(value)[0] for name, value in given(args, Experiment).items() if name in FUNCTIONS}
    base = None if args.source is None else _read(args.source, named)
    names = _listed(args.algorithm)
    if names == [None]:
        if base is None:
            raise UserError(f"no algorithm given: name one of {', '.join(REGISTRY)}, or an experiment with --from.")
        names = [base.algorithm.name]
    for name in names:
        if name not in REGISTRY:
            several = isinstance(args.algorithm, list)
            raise UserError(f"{unknown_algorithm(name)}{by_spaces(name) if several else ''}")
    for name, owners in _algorithm_options().items():
        if name in args and not owners.keys() & set(names):
            raise UserError(
                f"{flag(name)} is an option of {', '.join(owners)}, not of {', '.join(names)}: leave it out."
            )
    if base is not None and "graph" in args and any(parse_graph(graph).weighted for graph in _listed(args.graph)):
        # The other run's weights were those of its graph.
        base = replace(base, weights=None)
    starts = [apply(args.preset, _with_algorithm(base or Experiment(), REGISTRY[name])) for name in names]
    return [
        replace(start, algorithm=algorithm, **values)
        for start in starts
        for algorithm in _algorithms(start.algorithm, args)
        for values in _combinations(given(args, Experiment))
    ]


def _with_algorithm(base: Experiment, kind: type[Algorithm]) -> Experiment:
    if isinstance(base.algorithm, kind):
        return base
    # A run with a server, or with nobody, has no graph to take over.
    return replace(base, algorithm=kind(), graph=base.graph if is_graph(base.graph) else Experiment.graph)


def _algorithms(start: Any, args: argparse.Namespace) -> list[Algorithm]:
    """An algorithm with every combination of the values given for its options."""
    kind = type(start)
    values, known = given(args, kind), options_of(kind)
    for steps, epochs in epochs_by_steps(known).items():
        if steps in values and epochs in values:
            raise UserError(f"{flag(epochs)} and {flag(steps)} exclude each other: give one.")
        if steps in values or epochs in values:
            # Whichever is given replaces both values of the file or preset.
            values = {name: known[name].default for name in (steps, epochs)} | values
    found = []
    for chosen in _combinations(values):
        with making(kind, chosen):
            found.append(replace(start, **chosen))
    return found


def _combinations(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every way to take one value for each name."""
    choices = itertools.product(*map(_listed, values.values()))
    return [dict(zip(values, chosen, strict=True)) for chosen in choices]


def _listed(value: Any) -> list[Any]:
    """The values given for an option; a bare switch of a grid is an empty list and means yes."""
    return (value or [True]) if isinstance(value, list) else [value]


def _add(group: Any, option: Option, text: str, several: bool) -> None:
    shared: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if option.kind is bool and not several:
        group.add_argument(option.flag, action=argparse.BooleanOptionalAction, **shared)
        return
    if option.words:
        metavar = "{" + ",".join(option.words) + "}"
    else:
        metavar = {int: "N", float: "X"}.get(option.kind, option.name.upper())
    count = ("*" if option.kind is bool else "+") if several else None
    read = one_of_several(option.read) if several else option.read
    group.add_argument(option.flag, type=read, metavar=metavar, nargs=count, **shared)


def _algorithm_options() -> dict[str, dict[str, Option]]:
    """Option name -> algorithm name -> the option as that algorithm has it."""
    found: dict[str, dict[str, Option]] = {}
    for algorithm, kind in registered().items():
        with making(kind, {}):
            check_algorithm(kind())
        for name, option in options_of(kind).items():
            found.setdefault(name, {})[algorithm] = option
    return found


def _merged(owners: Mapping[str, Option]) -> Option:
    """One option for all the algorithms that have it. It takes the words of any; each algorithm refuses the others'."""
    first, *others = owners.values()
    for who, other in owners.items():
        if other.kind is not first.kind:
            kinds = f"{other.kind.__name__}, and {first.kind.__name__} with {next(iter(owners))}"
            raise UserError(f"{first.flag} of {who} is {kinds}: give both the same type, or rename one.")
    words = dict.fromkeys(word for option in (first, *others) for word in option.choices)
    return replace(first, choices=tuple(words), open=any(option.open for option in (first, *others)))


def _explained(option: Option) -> str:
    """A field's docstring and its default."""
    if option.default is None:
        by_data = option.name in Recipe.__dataclass_fields__
        return f"{option.help} [by data set]" if by_data else option.help
    return option.help if option.kind is bool else f"{option.help} [{option.default}]"


def _explained_by_algorithm(owners: Mapping[str, Option]) -> str:
    """The docstring, who has the option, and the defaults where there are any."""
    by_default: dict[Any, list[str]] = {}
    for algorithm, option in owners.items():
        by_default.setdefault(option.default, []).append(algorithm)
    parts = [", ".join(names) + ("" if value is None else f": {value}") for value, names in by_default.items()]
    return f"{next(iter(owners.values())).help} [{'; '.join(parts)}]"


def _field_docs(owner: type) -> dict[str, str]:
    """The string under each field of a dataclass and of its bases, which Python itself does not keep."""
    bodies = []
    for kind in reversed(owner.__mro__):
        # A class that was typed into an interpreter, or piped to one, has no source.
        with suppress(OSError):
            if "__dataclass_fields__" in vars(kind):
                bodies.append(ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0])
    return {
        field.target.id: text.value.value
        for body in bodies
        if isinstance(body, ast.ClassDef)
        for field, text in itertools.pairwise(body.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
