"""Runs in their places: systems, the settings of a grid, seeds; and the refusal of runs that cannot be compared."""

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from manyheads.algorithms import REGISTRY, attribute_of
from manyheads.errors import UserError, flag
from manyheads.experiment import Experiment
from manyheads.own_code import PYTHON
from manyheads.recipes import follow_from_data, follow_from_others
from manyheads.report.collect import Finished, Found, find_runs
from manyheads.report.naming import shown, slugs, words
from manyheads.store.layout import METRICS, WORKERS
from manyheads.topology import parse_graph
from manyheads.units import alike, short, some

_GRAPH_OPTIONS = frozenset({"graph", "weights", "redraw", "link_failure"})
"""Options that an algorithm without neighbours ignores."""

_RATES = frozenset({"batch_size", "lr", "head_lr", "momentum", "weight_decay", "clip", "decay", "step_seconds"})
"""Options that may be tuned for each algorithm and still be compared; a step's time follows from the batch size."""

_IDS = frozenset({"teacher"})
"""Options that mean nothing to people: named only if no others distinguish two systems."""


@dataclass(frozen=True)
class System:
    """What is compared: an algorithm with its options."""

    label: str
    algorithm: str
    own: dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """One point of the grid: a value for each option that takes several."""

    values: dict[str, Any]

    def __str__(self) -> str:
        return ", ".join(f"{words(name)} {shown(value)}" for name, value in self.values.items())


@dataclass(frozen=True)
class Comparison:
    """Every finished run in its place."""

    folder: Path
    systems: tuple[System, ...]
    settings: tuple[Setting, ...]
    """At least one; without a grid its values are empty."""
    cells: dict[tuple[int, int], tuple[Finished, ...]]
    """(system, setting) -> a run for each seed, ascending. Settings that a system cannot tell apart share its runs."""
    shared: dict[str, Any]
    """The options all runs agree on."""
    apart: tuple[str, ...]
    """Rates that were chosen for each algorithm by itself."""
    by_data: tuple[str, ...]
    """Options that follow from the data set, if there are several data sets."""
    found: Found
    """All that lay under the folder."""

    @cached_property
    def runs(self) -> tuple[Finished, ...]:
        """Every run once, system by system."""
        return tuple(dict.fromkeys(run for _, runs in sorted(self.cells.items()) for run in runs))

    @property
    def grid(self) -> tuple[str, ...]:
        """The options that take several values."""
        return tuple(self.settings[0].values)

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({run.seed for run in self.runs}))

    @cached_property
    def is_accuracy(self) -> bool:
        """Whether the scores are accuracies, and not a regression's metric."""
        return all(run.summary["majority_floor"] is not None for run in self.runs)

    @property
    def score_name(self) -> str:
        """What the scores are called."""
        return "accuracy" if self.is_accuracy else "score"

    @property
    def score_title(self) -> str:
        """What a column of scores is called, with their unit."""
        return "accuracy, %" if self.is_accuracy else "score"

    def score(self, value: float) -> str:
        """A score for people; an accuracy in percent."""
        return f"{100 * value:.1f}" if self.is_accuracy else short(value)

    def scores(self, column: Iterable[float]) -> Callable[[float], str]:
        """How the scores of a column read: as ``score`` shows them, with one number of decimals."""
        return self.score if self.is_accuracy else alike(column)

    def at(self, setting: int) -> list[Finished]:
        """All runs of a setting."""
        return [run for (_, j), runs in self.cells.items() if j == setting for run in runs]

    def prefix(self, setting: int) -> str:
        """What the names of a setting's files begin with."""
        return f"{slugs(map(str, self.settings))[setting]}-" if self.grid else ""

    @property
    def slugs(self) -> list[str]:
        """What the names of the files about each system contain."""
        return slugs(system.label for system in self.systems)

    def place(self, run: Finished) -> str:
        """A run's directory within the folder."""
        return _within(self.folder, run.path)

    @property
    def remarks(self) -> list[str]:
        """What was left out, a line each."""
        here, damaged = self.found, sum(run.damaged for run in self.runs)
        said = [
            (here.unfinished, "unfinished run is left out", "unfinished runs are left out"),
            (here.repeated, "run is left out: its experiment is here twice", "runs are left out: repeated experiments"),
            (damaged, "damaged line of a run's metrics is skipped", "damaged lines of the runs' metrics are skipped"),
        ]
        counted = [f"{count} {one if count == 1 else many}." for count, one, many in said if count]
        alone = "is left out: it ended without the sites whose result is shown. Report on it separately."
        return [*counted, *self._gaps(), *(f"{_within(self.folder, path)} {alone}" for path in here.parted)]

    def _gaps(self) -> Iterator[str]:
        """What pictures lack, unlike the table, which is made of summaries."""
        ends = {run: f"{self.place(run)} (round {run.recorded} of {run.summary['rounds']})" for run in self.runs}
        if early := [end for run, end in ends.items() if run.cut_off]:
            yield f"{METRICS} ends early in {some(early)}: the curves are incomplete."
        if silent := [self.place(run) for run in self.runs if not run.workers]:
            yield f"{WORKERS} lacks the last round in {some(silent)}: these workers are not shown."


def open_comparison(folder: Path, among: Collection[Path] | None = None) -> Comparison:
    """The comparison that the runs under a folder make, or some ``among`` them.

    Their options must agree or form a full grid. Exceptions are the seed, an algorithm's own options, and those that
    follow from the data set.
    """
    found = find_runs(folder, among)
    runs = found.runs
    there = {name: None for run in runs for name in run.options if name != "seed"}
    names = sorted(there, key=[*Experiment.__dataclass_fields__, *there].index)
    varying = [name for name in names if len(_values(runs, name)) > 1]
    tables = [run.options for run in runs]
    implied, by_data = follow_from_others(tables), follow_from_data(tables)
    free = [name for name in varying if name not in implied]
    grid, missing = free, _missing(runs, free)
    if missing:
        grid = [name for name in free if name not in _RATES]
        missing = _missing(runs, grid)
    if missing:
        raise UserError(
            f"the runs under {folder} disagree on {missing}: run what is missing, or report on them separately."
        )
    systems = _systems(runs)
    settings, placed = [], []
    for values in itertools.product(*(_values(runs, name) for name in grid)):
        setting = Setting(dict(zip(grid, values, strict=True)))
        here = [[run for run in runs if _is(run, system) and _belongs(run, setting)] for system in systems]
        # All may ignore an option here: a ring is the same at any value of redraw.
        if here not in placed:
            settings.append(setting)
            placed.append(here)
    cells = {
        (i, j): tuple(sorted(mine, key=attrgetter("seed")))
        for j, here in enumerate(placed)
        for i, mine in enumerate(here)
        if mine
    }
    for (i, _), mine in cells.items():
        _check_seeds(folder, systems[i], mine)
    _check_code(folder, runs)
    return Comparison(
        folder=folder,
        systems=tuple(systems),
        settings=tuple(settings),
        cells=cells,
        shared={name: _common(runs, name) for name in names if name not in varying},
        apart=tuple(name for name in free if name not in grid),
        by_data=tuple(name for name in varying if name in by_data),
        found=found,
    )


def ignores(run: Finished, name: str) -> bool:
    """Whether the algorithm ignores an option, so that the run belongs to any value of it."""
    if name == "weights":
        # None: the links have weights of their own.
        return run.options.get("weights") is None or bool(attribute_of(run.algorithm, run.own, "row_stochastic"))
    if name == "redraw" and run.on_graph:
        return not parse_graph(run.options["graph"]).random
    return name in _GRAPH_OPTIONS and not run.on_graph


def _values(runs: Iterable[Finished], name: str) -> list[Any]:
    """The different values of an option among the runs that do not ignore it, sorted."""
    values = [run.options.get(name) for run in runs if not ignores(run, name)]
    return sorted({json.dumps(value): value for value in values}.values(), key=_natural)


def _common(runs: Sequence[Finished], name: str) -> Any:
    """The value that all runs share: that of the first run which does not ignore it."""
    return next((run for run in runs if not ignores(run, name)), runs[0]).options.get(name)


def _natural(value: Any) -> tuple[str, float]:
    """A sort key: words alphabetically; numbers, and numbers after a colon, by size."""
    word, _, number = str(value).rpartition(":")
    try:
        return word, float(number)
    except ValueError:
        return str(value), 0.0


def _missing(runs: Sequence[Finished], names: Sequence[str]) -> str:
    """Which options do not form a full grid, and what was not run; empty: they form one."""
    values = {name: _values(runs, name) for name in names}
    for algorithm in dict.fromkeys(run.algorithm for run in runs):
        mine = [run for run in runs if run.algorithm == algorithm]
        looked_at = [name for name in names if not all(ignores(run, name) for run in mine)]
        points = itertools.product(*(values[name] for name in looked_at))
        if all(_is_run(mine, dict(zip(looked_at, point, strict=True))) for point in points):
            continue
        # What another algorithm was run with can be run; any other combination may not go together.
        others = ({name: run.options.get(name) for name in looked_at if not ignores(run, name)} for run in runs)
        point = next((values for values in others if not _is_run(mine, values)), None)
        if point is None:
            return f"{', '.join(map(flag, looked_at))} ({algorithm} was run with some of their combinations only)"
        # Name the options of which the algorithm lacks a value; if there are none, a combination is missing.
        guilty = [name for name in point if len(_values(mine, name)) < len(values[name])] or point
        lacking = [f"{flag(name)} {shown(point[name])}" for name in guilty]
        return f"{', '.join(map(flag, guilty))} ({algorithm} has no finished run with {', '.join(lacking)})"
    return ""


def _is_run(runs: Iterable[Finished], values: dict[str, Any]) -> bool:
    """Whether one of the runs has these values of options."""
    return any(_belongs(run, Setting(values)) for run in runs)


def _check_seeds(folder: Path, system: System, runs: Sequence[Finished]) -> None:
    """Refuse runs that are to be averaged over seeds but differ in more than the seed."""
    for name in runs[0].options:
        places: dict[str, list[str]] = {}
        for run in runs:
            places.setdefault(shown(run.options.get(name)), []).append(_within(folder, run.path))
        if name != "seed" and len(places) > 1:
            has = "; ".join(f"{value} in {some(places[value])}" for value in sorted(places))
            raise UserError(
                f"the runs under {folder} disagree on {flag(name)} ({system.label} ran with {has}): move some away,"
                " or report on them separately."
            )
    for one, other in itertools.combinations(runs, 2):
        if one.seed == other.seed:
            pair = " and ".join(_within(folder, run.path) for run in (one, other))
            raise UserError(f"{pair} under {folder} are both {system.label} with seed {one.seed}: move one away.")


def _check_code(folder: Path, runs: Sequence[Finished]) -> None:
    """Refuse runs in which code of one name differs: the algorithm's, or that of an option such as the model."""
    first: dict[str, Finished] = {}
    for run, name in ((one, name) for one in runs for name in one.code if name != PYTHON):
        of = run.algorithm if name == "algorithm" else run.options.get(name)
        # Two versions of Python compile the same lines into different code.
        earlier = first.setdefault(json.dumps([name, of, run.code.get(PYTHON)]), run)
        if earlier.code[name] != run.code[name]:
            pair = " and ".join(_within(folder, each.path) for each in (earlier, run))
            raise UserError(f"{pair} under {folder} were run with different code in their {name}: move one away.")


def _within(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def _systems(runs: Sequence[Finished]) -> list[System]:
    """The algorithms in the registry's order; variants of one are labelled with the options in which they differ."""
    # A user's own algorithm need not be registered here: then its runs say what it is called, but for older ones.
    titles = {run.algorithm: run.summary.get("title") for run in runs}
    systems = []
    for algorithm in sorted(titles, key=[*REGISTRY, *sorted(titles)].index):
        mine = [run for run in runs if run.algorithm == algorithm]
        variants = list({json.dumps(run.own, sort_keys=True): run.own for run in mine}.values())
        names = [name for name in variants[0] if len({json.dumps(own.get(name)) for own in variants}) > 1]
        told = [name for name in names if name not in _IDS]
        if len({json.dumps([own.get(name) for name in told]) for own in variants}) == len(variants):
            names = told
        title = attribute_of(algorithm, mine[0].own, "title") or titles[algorithm] or algorithm
        lessons = _lessons(mine, told) if "teacher" in names else {}
        for own in sorted(variants, key=lambda own: [_natural(_told(own, n, lessons, own.get(n))) for n in names]):
            said = [_told(own, name, lessons, f"{words(name)} {shown(own.get(name))}") for name in names]
            systems.append(System(", ".join(filter(None, [title, *said])), algorithm, own))
    return systems


def _told(own: dict[str, Any], name: str, lessons: dict[str, str], otherwise: Any) -> Any:
    """What is said of an option, which may be a list: of a teacher its lessons, of another ``otherwise``."""
    return lessons.get(json.dumps(own.get(name)), otherwise)


def _lessons(runs: Sequence[Finished], told: Sequence[str]) -> dict[str, str]:
    """What tells the runs that new workers joined from others: the options in which they differ; by their ids in JSON.

    An only one needs no words; one whose options are not known has none.
    """
    groups: dict[str, dict[Any, Any]] = {}
    for run in runs:
        group = groups.setdefault(json.dumps([run.own.get(name) for name in told]), {})
        group[json.dumps(run.own.get("teacher"))] = run.summary.get("teacher")
    found = {}
    for group in groups.values():
        known = [options for options in group.values() if isinstance(options, dict)]
        if len(group) > 1 and len(known) < len(group):
            continue
        there = dict.fromkeys(name for options in known for name in options if name != "seed")
        names = [name for name in there if len({json.dumps(options.get(name)) for options in known}) > 1]
        for teacher, options in group.items():
            said = ", ".join(f"{words(name)} {shown(options[name])}" for name in names if name in options)
            found[teacher] = f"learned with {said}" if said else ""
    return found


def _is(run: Finished, system: System) -> bool:
    return run.algorithm == system.algorithm and run.own == system.own


def _belongs(run: Finished, setting: Setting) -> bool:
    """Whether every option of the grid has the setting's value in a run, or is ignored."""
    return all(ignores(run, name) or run.options.get(name) == value for name, value in setting.values.items())
