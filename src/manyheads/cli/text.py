"""What a run is and what it came to, as text: in a line, as facts, as a table."""

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from math import isnan
from typing import Any

from manyheads.topology import brief
from manyheads.units import counted, human_bytes, human_seconds, no_finer, short

_NOTHING = "–"


def headline(title: str, options: Mapping[str, Any]) -> str:
    """What a run is, in a line: the algorithm's title and the main options of a complete experiment."""
    graph = "no graph" if options["graph"] == "none" else brief(options["graph"])
    workers, rounds = options["workers"], options["rounds"]
    trains = f"{options['split']}, {graph}, {options['model']}, {counted(rounds, 'round')}"
    return f"{title} on {options['data']}: {counted(workers, 'worker')}, {trains}"


def facts(lines: Iterable[tuple[str, str]]) -> str:
    """(label, value) pairs, the values in one column."""
    pairs = list(lines)
    width = max(len(label) for label, _ in pairs)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in pairs)


def columns() -> int:
    """Letters in a line of the terminal, or $COLUMNS; unlimited for a pipe or file without it."""
    return shutil.get_terminal_size((sys.maxsize, 0)).columns


def summary_table(values: Mapping[str, Any]) -> str:
    """The outcome of a run, from its last record or summary: as a row or, where that is too wide, line by line."""
    cells = {
        ("", "algorithm"): str(values["algorithm"]),
        ("", score_name(values)): _with_spread(values),
        ("worst", "tenth"): score(values, "accuracy_worst10"),
        ("before", "mixing"): score(values, "accuracy_before_mixing"),
        ("majority", "floor"): score(values, "majority_floor"),
        ("consensus", "error"): _NOTHING if values["consensus_error"] is None else short(values["consensus_error"]),
        ("sent per", "worker"): human_bytes(values["bytes_sent_per_worker"]),
        ("", "time"): human_seconds(values["seconds"]),
    }
    if values["bytes_sent_per_worker"] == 0:
        # Workers who exchange nothing do not mix, and need not agree.
        del cells["before", "mixing"], cells["consensus", "error"]
    text = table([*zip(*cells, strict=True)], [[*cells.values()]])
    if max(map(len, text.splitlines())) > columns():
        text = facts((" ".join(title).strip(), value) for title, value in cells.items())
    if _nobody_tested(values):
        text += "\n\nNo worker here has test samples, so there is no score."
    elif left_out := _left_out(values):
        text += f"\n\n{left_out} of these means: no test samples, or away."
    return text


def summary_line(summary: Mapping[str, Any]) -> str:
    """The outcome of a run in one line."""
    scores = outcome(summary)
    if not _nobody_tested(summary):
        left_out = _left_out(summary)
        scores += f"{left_out and f' ({left_out})'}, worst tenth {score(summary, 'accuracy_worst10')}"
    count = summary["rounds"]
    return f"{summary['algorithm']}: {scores}, {counted(count, 'round')}, {human_seconds(summary['seconds'])}"


def table(header: Sequence[Sequence[str]], body: Sequence[Sequence[str]], words: int = 1) -> str:
    """Rows under a header of one or more lines, every column as wide as it must be; the first ``words`` to the left."""
    widths = [max(map(len, column)) for column in zip(*header, *body, strict=True)]

    def line(cells: Sequence[str]) -> str:
        placed = (f"{cell:{'<' if i < words else '>'}{widths[i]}}" for i, cell in enumerate(cells))
        return "  ".join(placed).rstrip()

    rule = "  ".join("─" * width for width in widths)
    return "\n".join([*map(line, header), rule, *map(line, body)])


def outcome(values: Mapping[str, Any]) -> str:
    """What a record's accuracies come to, in words."""
    if _nobody_tested(values):
        return "no test samples"
    return f"{score_name(values)} {score(values, 'accuracy_mean')}"


def score(values: Mapping[str, Any], name: str) -> str:
    """A value on the scale of a record's accuracies: a percentage, or the plain number of a regression's metric."""
    value = values[name]
    if not _is_known(value):
        return _NOTHING
    return short(value, 4) if values["majority_floor"] is None else f"{100 * value:.1f} %"


def score_name(values: Mapping[str, Any]) -> str:
    """What a record's accuracies are: that, or a score by a regression's metric."""
    return "score" if values["majority_floor"] is None else "accuracy"


def _with_spread(values: Mapping[str, Any]) -> str:
    mean, spread = (score(values, name) for name in ("accuracy_mean", "accuracy_std"))
    return mean if mean == _NOTHING else f"{mean} ± {no_finer(spread, mean).removesuffix(' %')}"


def _nobody_tested(values: Mapping[str, Any]) -> bool:
    """Whether a record's accuracies are means over no worker."""
    return values["workers_without_test"] > 0 and not _is_known(values["accuracy_mean"])


def _is_known(value: float | None) -> bool:
    """Whether there is a number: NaN in a record is null in its file."""
    return value is not None and not isnan(value)


def _left_out(values: Mapping[str, Any]) -> str:
    """How many workers a record's accuracies leave out, in words; empty: none."""
    count = values["workers_without_test"]
    return f"{counted(count, 'worker')} left out" if count else ""
