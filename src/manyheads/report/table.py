"""The comparison table: what each system came to over seeds, the best marked, and the majority floor."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from manyheads.report.collect import Finished
from manyheads.report.comparison import Comparison, Setting, ignores
from manyheads.report.naming import shown
from manyheads.report.numbers import Stat, at_end, best_system, best_systems, difference, majority_floor
from manyheads.units import human_bytes, human_seconds, plus_minus, short

_Show = Callable[[float], str]


@dataclass(frozen=True)
class Column:
    """A metric of the table."""

    metric: str
    label: str
    show: _Show | None = None
    """How a value reads; None: as a score."""
    best: Literal["highest", "lowest"] | None = None
    meaning: str = ""


COLUMNS = (
    Column(
        "accuracy_mean",
        "accuracy",
        best="highest",
        meaning="The headline. Each worker's model is scored on that worker's own test samples at the end of the last "
        "round: after mixing, but with order mix-train after local training. The mean is over workers: each counts the "
        "same, however many samples it has. It is the last round, not the best one.",
    ),
    Column(
        "accuracy_std",
        "spread over workers",
        best="lowest",
        meaning="Population deviation of that accuracy over workers: how unequally they fare. It is not an error of the"
        " mean.",
    ),
    Column(
        "accuracy_worst10",
        "worst tenth",
        best="highest",
        meaning="Mean accuracy of the tenth of the workers, rounded up, with the lowest accuracy.",
    ),
    Column(
        "accuracy_before_mixing",
        "before mixing",
        best="highest",
        meaning="The same mean between local training and mixing: what the workers score with models fresh from their"
        " own data. With order mix-train these are the models that the round before ended with.",
    ),
    Column("consensus_error", "consensus error", short),
    Column("bytes_sent_per_worker", "sent per worker", human_bytes),
    Column(
        "seconds",
        "time",
        human_seconds,
        meaning="Measured where the run was made, and longer where several runs shared that machine, as those of"
        " compare do on several cores: --threads 1 runs them one after the other.",
    ),
)


@dataclass(frozen=True)
class Cell:
    """A cell of the table."""

    text: str
    order: float | None
    """What the column is sorted by; None comes last."""
    best: bool = False


@dataclass(frozen=True)
class Row:
    """A row of the table; the majority floor is one without a system."""

    label: str
    setting: tuple[str, ...]
    cells: tuple[Cell, ...]
    floor: bool = False
    begins: bool = False
    """Whether another setting begins with it."""


_EMPTY = Cell("–", None)
_BEHIND = "behind"
"""Of the column that is no metric."""


def headers(comparison: Comparison) -> list[str]:
    """The titles of the columns after the system and the grid's options."""
    unit = ", %" if comparison.is_accuracy else ""
    labels = [comparison.score_name, *(column.label for column in COLUMNS[1:])]
    titles = [label + (unit if column.show is None else "") for label, column in zip(labels, COLUMNS, strict=True)]
    if len(comparison.systems) > 1:
        titles.insert(1, "behind the best" + (", points" if comparison.is_accuracy else ""))
    return [*titles, "seeds"] if _uneven(comparison) else titles


def rows(comparison: Comparison) -> list[Row]:
    """The table, setting by setting, from the highest accuracy to the lowest."""
    found, shows = [], _shows(comparison)
    for j, setting in enumerate(comparison.settings):
        values = tuple(shown(value) for value in setting.values.values())
        here = [
            Row(system.label, _settings(comparison.cells[i, j][0], setting), tuple(_cells(comparison, i, j, shows)))
            for i, system in enumerate(comparison.systems)
            if (i, j) in comparison.cells
        ]
        floor = majority_floor(comparison.at(j))
        if floor is not None:
            others = [_EMPTY] * (len(headers(comparison)) - 1)
            here.append(Row("majority floor", values, (_cell(floor, shows["accuracy_mean"]), *others), floor=True))
        here.sort(key=_accuracy, reverse=True)
        found += [replace(row, begins=j > 0 and row is here[0]) for row in here]
    return found


def _shows(comparison: Comparison) -> dict[str, _Show]:
    """How the numbers of each column read, by its metric; of one more by how far systems are behind the best."""
    cells = comparison.cells
    ends = {column: [at_end(runs, column.metric) for runs in cells.values()] for column in COLUMNS}
    shows = {column.metric: column.show or comparison.scores(_means(found)) for column, found in ends.items()}
    return {**shows, _BEHIND: comparison.scores(_means(_gap(comparison, *place) for place in cells))}


def _means(found: Iterable[Stat | None]) -> list[float]:
    return [stat.mean for stat in found if stat is not None]


def _settings(run: Finished, setting: Setting) -> tuple[str, ...]:
    """The grid's values for a run; those that its algorithm ignores are shown as a dash, or as its own graph."""
    own = {name: "–" for name in setting.values if ignores(run, name)}
    if "graph" in own:
        own["graph"] = shown(run.options["graph"])
    return tuple(own.get(name, shown(value)) for name, value in setting.values.items())


def _accuracy(row: Row) -> float:
    order = row.cells[0].order
    return float("-inf") if order is None else order


def _cells(comparison: Comparison, system: int, setting: int, shows: Mapping[str, _Show]) -> list[Cell]:
    runs = comparison.cells[system, setting]
    several = len(comparison.systems) > 1
    cells = []
    for column in COLUMNS:
        found = at_end(runs, column.metric)
        highest = column.best == "highest"
        ahead = column.best and system in best_systems(comparison, setting, column.metric, highest=highest)
        cells.append(_cell(found, shows[column.metric], best=several and bool(ahead)))
    if several:
        cells.insert(1, _behind(comparison, system, setting, shows[_BEHIND]))
    if _uneven(comparison):
        cells.append(Cell(", ".join(str(run.seed) for run in runs), len(runs)))
    return cells


def _cell(found: Stat | None, show: _Show, *, best: bool = False) -> Cell:
    if found is None:
        return _EMPTY
    return Cell(plus_minus(found.mean, found.deviation or None, show), found.mean, best)


def _behind(comparison: Comparison, system: int, setting: int, show: _Show) -> Cell:
    """How far a system is behind the best, seed by seed, with the standard error of that."""
    gap = _gap(comparison, system, setting)
    if gap is None or best_system(comparison, setting) == system:
        return Cell("–", None if gap is None else 0.0)
    return Cell(plus_minus(gap.mean, gap.error, show), gap.mean)


def _gap(comparison: Comparison, system: int, setting: int) -> Stat | None:
    best = best_system(comparison, setting)
    return None if best is None else difference(comparison, setting, best, system)


def _uneven(comparison: Comparison) -> bool:
    """Whether not every mean is over the same seeds."""
    return len({frozenset(run.seed for run in runs) for runs in comparison.cells.values()}) > 1
