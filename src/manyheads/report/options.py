"""The options that systems ran with, those marked that differ from the defaults."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from manyheads.algorithms import find_algorithm
from manyheads.derived import SET_BY_COROLLARY, usual_options
from manyheads.experiment import Experiment, option_defaults
from manyheads.recipes import Recipe
from manyheads.report.collect import Finished
from manyheads.report.comparison import Comparison, System
from manyheads.report.naming import shown, words


@dataclass(frozen=True)
class Option:
    """An option, its value, and whether that is not the default."""

    name: str
    value: str
    changed: bool


def used(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options without those that had no effect."""
    unused = SET_BY_COROLLARY if options.get("schedule") == "corollary" else ()
    return {name: value for name, value in options.items() if name not in unused}


def shared_options(comparison: Comparison) -> list[Option]:
    """The options of all runs, in the order of an Experiment; the data set's recipe is the default of its values."""
    shared = used(comparison.shared)
    defaults = {**usual_options(shared), "data": Experiment().data}
    # The weights are the algorithm's to choose, the precision is the device's.
    unknown = {"weights", "precision"}
    if "data" not in shared:
        # Each data set has a recipe of its own.
        unknown |= {spec.name for spec in fields(Recipe)}
    if not {"model", "batch_size"} <= shared.keys():
        unknown |= {"step_seconds"}
    return _options(shared, {name: value for name, value in defaults.items() if name not in unknown}, defaults)


def own_options(system: System) -> list[Option]:
    """The options of a system's algorithm."""
    kind = find_algorithm(system.algorithm)
    defaults = option_defaults(kind) if kind else {}
    return _options(system.own, defaults, system.own)


def options_apart(comparison: Comparison) -> dict[str, dict[str, str]]:
    """The rates that were chosen for each algorithm by itself: option -> system -> values."""
    labelled = [(comparison.systems[i].label, run) for (i, _), runs in sorted(comparison.cells.items()) for run in runs]
    return _by_label(comparison.apart, labelled)


def options_by_data(comparison: Comparison) -> dict[str, dict[str, str]]:
    """The options that follow from the data set: option -> data set -> value."""
    return _by_label(comparison.by_data, [(shown(run.options["data"]), run) for run in comparison.runs])


def _by_label(names: Iterable[str], runs: Sequence[tuple[str, Finished]]) -> dict[str, dict[str, str]]:
    """Option -> label -> the values that the runs of that label have."""
    found: dict[str, dict[str, dict[str, None]]] = {words(name): {} for name in names}
    for name, (label, run) in itertools.product(names, runs):
        found[words(name)].setdefault(label, {})[shown(run.options.get(name))] = None
    return {name: {label: ", ".join(values) for label, values in by.items()} for name, by in found.items()}


def _options(values: Mapping[str, Any], defaults: Mapping[str, Any], order: Mapping[str, Any]) -> list[Option]:
    """Options in an order, without those that are None by default and stayed so."""
    names = [*(name for name in order if name in values), *(name for name in values if name not in order)]
    changed = {name: name in defaults and values[name] != defaults[name] for name in names}
    return [Option(words(n), shown(values[n]), changed[n]) for n in names if changed[n] or values[n] is not None]
