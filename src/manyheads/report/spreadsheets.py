"""Every number of the report as CSV."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from manyheads.errors import UserError
from manyheads.report.collect import Finished
from manyheads.report.comparison import Comparison
from manyheads.report.mixing import mixed_by
from manyheads.report.naming import shown
from manyheads.report.numbers import at_end, best_system, curve, difference
from manyheads.report.options import used
from manyheads.report.rates import tried
from manyheads.report.table import COLUMNS

Line = dict[str, Any]
RUNS = "runs.csv"


def csv_files(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """(name, text) of every file."""
    yield "comparison.csv", _csv(_comparison(comparison))
    yield "curves.csv", _csv(_curves(comparison))
    yield RUNS, _csv(_of_runs(comparison, lambda run: [_plain(run.summary)]))
    yield "rounds.csv", _csv(_of_runs(comparison, lambda run: run.metrics))
    yield "workers.csv", _csv(_of_runs(comparison, _workers))
    yield "mixing.csv", _csv(_of_runs(comparison, _mixing))
    yield "options.csv", _csv(_of_runs(comparison, lambda run: [{**used(run.options), **run.own}]))
    if rates := tried(comparison):
        yield "rates.csv", _csv(map(asdict, rates))
    yield from _similarities(comparison)


def reported(folder: Path) -> list[str]:
    """The folders of the runs that the report in a comparison's folder is about; none where there is no report."""
    path = folder / "csv" / RUNS
    if not path.exists():
        return []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [line["folder"] for line in csv.DictReader(file) if line.get("folder")]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read ({error}): put it back, or delete it.") from None


def _comparison(comparison: Comparison) -> Iterator[Line]:
    """The comparison table in full precision."""
    for (i, j), runs in sorted(comparison.cells.items()):
        line: Line = {**_names(comparison, i, j), "seeds": len(runs)}
        for metric in (*(column.metric for column in COLUMNS), "majority_floor"):
            if (found := at_end(runs, metric)) is not None:
                line |= {metric: found.mean, f"{metric}_deviation": found.deviation}
        best = best_system(comparison, j)
        if best is not None and (gap := difference(comparison, j, best, i)) is not None:
            line |= {"behind_best": gap.mean, "behind_best_standard_error": gap.error}
        # A run may belong to several rows: a system without a graph stands beside each graph of the grid.
        yield {**line, "folders": "; ".join(map(comparison.place, runs))}


def _curves(comparison: Comparison) -> Iterator[Line]:
    """Mean and deviation over seeds of every metric in every round that all seeds have."""
    for (i, j), runs in sorted(comparison.cells.items()):
        for metric in dict.fromkeys(name for run in runs for record in run.metrics for name in record):
            found = None if metric == "round" else curve(runs, "round", metric)
            if found is not None:
                start = {**_names(comparison, i, j), "seeds": len(runs), "metric": metric}
                for round, mean, deviation in zip(found.x, found.y, found.deviation, strict=True):
                    yield {**start, "round": int(round), "mean": mean, "deviation": deviation}


def _similarities(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """The maps of the page, under the same names; row and column are workers."""
    names = comparison.slugs
    for (i, j), runs in sorted(comparison.cells.items()):
        for kind, values in runs[0].similarity.items():
            rows = (",".join(f"{value:.6g}" for value in row) for row in values.tolist())
            yield f"{comparison.prefix(j)}similarity-{names[i]}-{kind}.csv", "\n".join(rows) + "\n"


def _names(comparison: Comparison, system: int, setting: int) -> Line:
    return {"system": comparison.systems[system].label, **comparison.settings[setting].values}


def _of_runs(comparison: Comparison, lines: Callable[[Finished], Iterable[Line]]) -> Iterator[Line]:
    """What there is to say about each run, its name before each line."""
    labels = {run: comparison.systems[i].label for (i, _), runs in comparison.cells.items() for run in runs}
    for run in comparison.runs:
        grid = {name: run.options.get(name) for name in comparison.grid}
        start = {"system": labels[run], **grid, "seed": run.seed, "folder": comparison.place(run)}
        for line in lines(run):
            yield {**start, **line}


def _workers(run: Finished) -> Iterator[Line]:
    """The values of each worker after the last round."""
    columns = {name: values for name, values in run.workers.items() if isinstance(values, list)}
    for worker, row in enumerate(zip(*columns.values(), strict=True)):
        yield {"worker": worker, **dict(zip(columns, row, strict=True))}


def _mixing(run: Finished) -> Iterator[Line]:
    """The spectral gap and Theorem 1's constants of a run on a graph."""
    if mixed := mixed_by(run):
        yield {"graph": run.options["graph"], "workers": run.options["workers"], **mixed}


def _plain(summary: Line) -> Line:
    return {name: value for name, value in summary.items() if not isinstance(value, (dict, list))}


def _csv(lines: Iterable[Line]) -> str:
    table = list(lines)
    header = list(dict.fromkeys(name for line in table for name in line))
    return csv_text(header, ([_harmless(line.get(name)) for name in header] for line in table))


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table as CSV."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([header, *rows])
    return out.getvalue()


def _harmless(value: Any) -> Any:
    """A value as a cell; a text that a spreadsheet would take for a formula is quoted."""
    value = shown(value) if isinstance(value, dict) else value
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
