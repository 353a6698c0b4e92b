"""The comparison as a table for a paper: LaTeX with booktabs, a row for each system and a column for each setting."""

import re
from collections.abc import Callable, Iterable

from manyheads.report.collect import Finished
from manyheads.report.comparison import Comparison
from manyheads.report.findings import caveats
from manyheads.report.naming import shown, words
from manyheads.report.numbers import Stat, at_end, best_systems, majority_floor
from manyheads.units import no_finer

_ESCAPES = str.maketrans(
    {
        **{mark: f"\\{mark}" for mark in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        # After a line's end it would begin an option.
        "[": "{[}",
    }
)


def tabular(comparison: Comparison) -> str:
    """A complete ``tabular``, after lines of comment that say what its numbers are."""
    settings = range(len(comparison.settings))
    several = len(comparison.systems) > 1
    ends = {place: at_end(runs, "accuracy_mean") for place, runs in comparison.cells.items()}
    show = [
        comparison.scores(found.mean for (_, j), found in ends.items() if j == column and found) for column in settings
    ]
    best = [best_systems(comparison, j, shown=show[j]) if several else [] for j in settings]
    heads = [
        [_escaped(words(name)), *(_escaped(shown(setting.values[name])) for setting in comparison.settings)]
        for name in comparison.grid
    ]
    systems = [
        [
            _escaped(system.label),
            *(_cell(ends.get((i, j)), show[j], bold=i in best[j]) for j in settings),
        ]
        for i, system in enumerate(comparison.systems)
    ]
    floors = [majority_floor(comparison.at(j)) for j in settings]
    lines = [
        *_about(comparison),
        rf"\begin{{tabular}}{{l{'r' * len(settings)}}}",
        r"\toprule",
        *map(_row, heads or [["system", _escaped(comparison.score_title)]]),
        r"\midrule",
        *map(_row, systems),
    ]
    if any(floors):
        lines += [r"\midrule", _row(["majority floor", *map(_cell, floors, show)])]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _about(comparison: Comparison) -> list[str]:
    """What the numbers are, in words that stand in a paper's caption as well."""
    counts = sorted({len(runs) for runs in comparison.cells.values()})
    unit = " in percent" if comparison.is_accuracy else ""
    said = [
        r"Written by manyheads report; needs \usepackage{booktabs}.",
        f"Numbers: {comparison.score_name}{unit} after the last round, mean over workers, each on its test samples.",
    ]
    if counts[-1] == 1:
        said.append("From a single seed." if len(comparison.seeds) == 1 else "One seed each, not the same one.")
    else:
        seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        said.append(rf"Mean over {seeds} seeds; \pm is the sample deviation (n - 1) over these seeds.")
    columns: dict[str, list[tuple[Finished, ...]]] = {}
    for (i, _), runs in sorted(comparison.cells.items()):
        columns.setdefault(comparison.systems[i].label, []).append(runs)
    if alike := [label for label, found in columns.items() if len(set(found)) < len(found)]:
        who = _escaped("; ".join(alike))
        said.append(f"The same runs in several columns, since what differs does not concern them: {who}.")
    if len(comparison.systems) > 1:
        said.append("Bold: no other is ahead over the seeds that both have, as printed; need not be significant.")
    return [f"% {line}" for line in (*said, *map(_escaped, caveats(comparison)))]


def _cell(found: Stat | None, show: Callable[[float], str], *, bold: bool = False) -> str:
    if found is None:
        return "--"
    mean = show(found.mean)
    printed = rf"\mathbf{{{_number(mean)}}}" if bold else _number(mean)
    deviation = "" if found.deviation is None else rf" \pm {_number(no_finer(show(found.deviation), mean))}"
    return f"${printed}{deviation}$"


def _number(text: str) -> str:
    """A number in math: 1.2e-05 with a power of ten."""
    return re.sub(r"e([+-]\d+)", lambda found: rf" \cdot 10^{{{int(found[1])}}}", text)


def _row(cells: Iterable[str]) -> str:
    return rf"{' & '.join(cells)} \\"


def _escaped(text: str) -> str:
    """A text as LaTeX sets it, on one line."""
    return " ".join(text.split()).translate(_ESCAPES)
