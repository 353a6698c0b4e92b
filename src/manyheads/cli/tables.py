"""The tables of a comparison, as text."""

import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from manyheads.cli.text import table
from manyheads.data.site_files import is_site_path
from manyheads.report.findings import caveats, verdict
from manyheads.report.naming import words
from manyheads.report.table import headers, rows

if TYPE_CHECKING:
    from manyheads.report import Comparison
    from manyheads.tune import Tuning

_HEADER_WIDTH = 10
"""Letters in a line of a column's title."""


def result_table(comparison: "Comparison", width: int = sys.maxsize) -> str:
    """A row for each system and setting: means over seeds with their deviation, the best marked; and who is ahead.

    In ``width`` letters: the last columns are left out if the table is wider, and sentences are wrapped.
    """
    titles, named = ["", *map(words, comparison.grid), *headers(comparison)], 1 + len(comparison.grid)
    body = []
    for row in rows(comparison):
        if row.begins:
            body.append([""] * len(titles))
        body.append([row.label, *row.setting, *(cell.text + ("*" if cell.best else " ") for cell in row.cells)])
    count, text = len(titles), table(_wrapped(titles), body, named)
    while max(map(len, text.splitlines())) > width and count > named + 1:
        count -= 1
        text = table(_wrapped(titles[:count]), [row[:count] for row in body], named)
    several = len(comparison.systems) > 1
    marks = ["* best"] if several else []
    counts, (seed, *others) = [len(runs) for runs in comparison.cells.values()], comparison.seeds
    if max(counts) > 1:
        error = " (behind the best: standard error)" if several else ""
        number = " to ".join(map(str, sorted({min(counts), max(counts)})))
        marks.append(f"± deviation over {number} seeds{error}")
    elif others:
        marks.append("one seed each, not the same one, so no deviation: run the others too")
    elif not is_site_path(comparison.shared.get("data")):
        marks.append(f"one seed ({seed}), so no deviation: run others too")
    lines = ["; ".join(marks)] if marks else []
    if several and (said := verdict(comparison)):
        lines.append(said)
    lines += [f"note: {caveat[0].lower()}{caveat[1:-1]}" for caveat in caveats(comparison)]
    if "time" in titles[:count] and len(comparison.runs) > 1:
        lines.append("time: measured; longer where runs shared the cores, as in compare without --threads 1")
    if count < len(titles):
        lines.append(f"in the report: {', '.join(title.partition(',')[0] for title in titles[count:])}")
    return "\n".join([text, *(textwrap.fill(line, width, break_long_words=False) for line in lines)])


def tuning_table(tuned: "Sequence[Tuning]", comparison: "Comparison") -> str:
    """The validation accuracy of every rate that was tried, the chosen ones marked."""
    header = [
        f"validation {comparison.score_title}, rates ×",
        *(f"{factor:g} " for factor in tuned[0].factors),
        "lr",
        "head lr",
    ]
    body = []
    for tuning in tuned:
        best = tuning.best
        scores = [
            "failed " if score is None else comparison.score(score) + ("*" if place == best else " ")
            for place, score in enumerate(tuning.scores)
        ]
        rates = ("–", "–") if best is None else (f"{tuning.chosen.lr:g}", f"{tuning.chosen.head_lr:g}")
        body.append([tuning.title, *scores, *rates])
    lines = [table([header], body)]
    if any(len(tuning.seeds) > 1 for tuning in tuned):
        lines.append("each with the first seed; where rates were run with all seeds, the mean over them")
    if ends := "; ".join(tuning.title for tuning in tuned if len(tuning.factors) > 1 and tuning.best_at_edge):
        lines.append(f"note: the best is the first or last rate tried; give --tune factors beyond it: {ends}")
    return "\n".join(lines)


def _wrapped(titles: Sequence[str]) -> list[tuple[str, ...]]:
    """Titles of columns in as many lines as the longest needs, the last word of each in the last line."""
    lines = [textwrap.wrap(title, _HEADER_WIDTH)[::-1] for title in titles]
    return list(zip_longest(*lines, fillvalue=""))[::-1]
