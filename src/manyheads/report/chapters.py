"""What the report shows, chapter by chapter: which pictures are drawn of a setting and of the whole grid."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from manyheads.drawing import COLOURS, MOST_LINKS, Picture
from manyheads.recipes import is_guess
from manyheads.report import pictures
from manyheads.report.collect import Finished
from manyheads.report.comparison import Comparison, Setting, ignores
from manyheads.report.mixing import steady_mixing
from manyheads.report.naming import shown
from manyheads.report.numbers import (
    Curve,
    correlation,
    curve,
    majority_floor,
    off_diagonal,
    sorted_workers,
    worker_accuracies,
)
from manyheads.report.pictures import ROUND, Axis, Line, colour_ends, colours_of
from manyheads.topology import edges, positions
from manyheads.units import human_bytes, short

_TERMS = {
    "theory_grad_phi": "|G_φ|²",
    "theory_grad_theta": "|G_θ|²",
    "theory_grad_theta_mean": "mean |∇_θ Fᵢ|²",
    "theory_consensus": "consensus",
    "theory_m": "M(k)",
}
_WIDE_RANGE = 8
"""If the lines' ends differ by more than this factor, an axis of bytes or seconds is logarithmic."""
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")), "sent per worker"
_SECONDS = ((3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")), "simulated time"


@dataclass(frozen=True)
class Chapter:
    """A heading, a few words, and pictures in rows that may have a heading of their own."""

    title: str
    text: str
    rows: tuple[tuple[str, tuple[Picture, ...]], ...]
    small: bool = False
    """Whether the pictures are maps, of which many stand side by side."""

    @property
    def single(self) -> bool:
        """Whether there is only one picture, so that the text fits beside it."""
        return not self.small and sum(len(row) for _, row in self.rows) == 1


@dataclass(frozen=True)
class _Drawn:
    """One line of a chart: what it is called, how it looks, and the runs it is the mean of."""

    label: str
    colour: int
    runs: tuple[Finished, ...]
    dashed: bool = False
    slug: str = ""
    """What the names of a system's own pictures contain."""


def of_setting(comparison: Comparison, setting: int) -> list[Chapter]:
    """The chapters of one point of the grid."""
    prefix, slugs = comparison.prefix(setting), comparison.slugs
    colours = colours_of([system.algorithm for system in comparison.systems])
    drawn = [
        _Drawn(system.label, colours[i], runs, dashed=runs[0].options["graph"] == "server", slug=slugs[i])
        for i, system in enumerate(comparison.systems)
        if (runs := comparison.cells.get((i, setting)))
    ]
    floor = majority_floor(comparison.at(setting))
    chapters = [
        _learning(f"{prefix}learning", comparison, drawn, None if floor is None else floor.mean),
        _workers(f"{prefix}workers", comparison, drawn),
        _graphs(f"{prefix}graph", comparison, drawn),
        _similarities(f"{prefix}similarity", drawn),
        _consensus(prefix, drawn),
        _theory(f"{prefix}theory", drawn),
    ]
    return [chapter for chapter in chapters if any(row for _, row in chapter.rows)]


def of_systems(comparison: Comparison) -> list[Chapter]:
    """How each system depends on the grid's options; empty without a grid."""
    chapters = []
    for i, name in enumerate(comparison.slugs):
        cells = {j: runs for j in range(len(comparison.settings)) if (runs := comparison.cells.get((i, j)))}
        # Settings that differ only in what the algorithm ignores share their runs.
        settings = [j for j in cells if cells[j] not in [cells[k] for k in cells if k < j]]
        if len(settings) > 1:
            drawn = [
                _Drawn(_looked_at(comparison.settings[j], cells[j][0]), place, cells[j], place >= len(COLOURS))
                for place, j in enumerate(settings)
            ]
            chapter = _learning(f"{name}-by-setting", comparison, drawn, None)
            chapters.append(Chapter(comparison.systems[i].label, "", chapter.rows))
    return chapters


def _looked_at(setting: Setting, run: Finished) -> str:
    """The values of a setting that a run's algorithm does not ignore."""
    return ", ".join(shown(value) for name, value in setting.values.items() if not ignores(run, name))


def _score_axis(comparison: Comparison, what: str) -> Axis:
    """An axis of accuracies in percent, or of a regression's metric as it is."""
    label = f"{comparison.score_name}{what}"
    if comparison.is_accuracy:
        return Axis(f"{label}, %", lambda value: f"{comparison.score(value)} %", 100, share=True)
    return Axis(label, comparison.score)


def _learning(name: str, comparison: Comparison, drawn: Sequence[_Drawn], floor: float | None) -> Chapter:
    y = _score_axis(comparison, ", mean over workers")
    row, charts, timed = [], [], False
    for what, x in (("rounds", "round"), ("bytes", "bytes_sent_per_worker"), ("time", "simulated_seconds")):
        lines = _lines(drawn, x, "accuracy_mean")
        if not lines or (x != "round" and not any(np.ptp(line.x) for line in lines)):
            continue
        row.append(pictures.curves(f"{name}-{what}", lines, x_axis(x, lines), y, floor=floor, values=True))
        timed = what == "time"
        charts.append(lines)
    options = [line.runs[0].options for line in drawn]
    explained = {
        f"{comparison.score_name.capitalize()} on each worker's own test samples, at the end of each round.": True,
        "Bands are the deviation over seeds.": len(comparison.seeds) > 1,
        "Dashed: needs a server.": any(line.dashed for line in drawn),
        "The time of a mini-batch is a guess: manyheads inspect speed measures it.": timed
        and any(is_guess(own.get("step_seconds"), own["model"], own["batch_size"]) for own in options),
        "A dotted level is a system that sends nothing.": any(line.level for lines in charts for line in lines),
        "Fine dots lead from a line that ends early to its name.": any(map(_end_apart, charts)),
    }
    text = " ".join(sentence for sentence, needed in explained.items() if needed)
    return Chapter("Learning curves", text, (("", tuple(row)),))


def _workers(name: str, comparison: Comparison, drawn: Sequence[_Drawn]) -> Chapter:
    lines = [_line(line, found) for line in drawn if (found := sorted_workers(line.runs)) is not None]
    label = f"workers, from the lowest {comparison.score_name} to the highest"
    rank = Axis(label, lambda value: f"rank {value:.0f}", whole=True)
    row = (pictures.curves(name, lines, rank, _score_axis(comparison, " of each worker")),) if lines else ()
    over_seeds = ", the mean over seeds of each rank" if len(comparison.seeds) > 1 else ""
    text = (
        f"Every worker's {comparison.score_name} after the last round, sorted{over_seeds}. A flat line treats all "
        "workers alike; its left end is the worst served."
    )
    return Chapter("The workers", text, (("", row),))


def _graphs(name: str, comparison: Comparison, drawn: Sequence[_Drawn]) -> Chapter:
    values = [worker_accuracies(line.runs[0]) for line in drawn]
    limits = colour_ends([value for found in values for value in found.values()])
    show = _score_axis(comparison, "").show
    row, most = [], 0
    for line, found in zip(drawn, values, strict=True):
        if found:
            run, mixing = line.runs[0], steady_mixing(line.runs[0])
            graph = run.options["graph"]
            title = f"{line.label}, {'no exchange' if graph == 'none' else shown(graph)}"
            links = edges(mixing) if run.on_graph else []
            most = max(most, len(links))
            args = (positions(mixing), links, found, limits, show)
            row.append(pictures.graph(f"{name}-{line.slug}", title, *args, server=graph == "server"))
    text = (
        "Who mixes with whom, and how well each worker fares after the last round "
        f"(seed {drawn[0].runs[0].seed}). Yellow is the highest {comparison.score_name}."
    )
    if most > MOST_LINKS:
        text += f" At most {MOST_LINKS:,} links are drawn, chosen at random."
    return Chapter("The graph", text, (("", tuple(row)),), small=True)


def _similarities(name: str, drawn: Sequence[_Drawn]) -> Chapter:
    mapped = [(line, maps) for line in drawn if (maps := line.runs[0].similarity)]
    kinds = {kind for _, maps in mapped for kind in maps}
    limits = {
        kind: colour_ends(np.concatenate([off_diagonal(maps[kind]) for _, maps in mapped if kind in maps]))
        for kind in kinds
    }
    rows = []
    for line, maps in mapped:
        follows = correlation(maps["data"], maps["heads"]) if {"data", "heads"} <= maps.keys() else None
        heading = line.label if follows is None else f"{line.label} (correlation of heads with data: {follows:.2f})"
        named = [(f"{name}-{line.slug}-{kind}", kind, maps[kind], limits[kind]) for kind in maps]
        rows.append((heading, tuple(pictures.similarity_map(*one) for one in named)))
    text = (
        f"Cosine similarity between every two workers (seed {drawn[0].runs[0].seed}): of their class distributions,"
        " where there are classes, their heads and their representations, with one scale for each. The scale covers"
        " pairs of different workers; the diagonal, each worker beside itself, is always 1."
    )
    return Chapter("How alike the workers are", text, tuple(rows), small=True)


def _consensus(prefix: str, drawn: Sequence[_Drawn]) -> Chapter:
    row, agreeing = [], []
    for metric in ("consensus_error", "consensus_error_relative"):
        found = _lines(drawn, "round", metric)
        agreeing = agreeing or [line.label for line in found if not line.y.any()]
        if lines := _positive(found):
            label = "consensus error" + (", relative to |φ̄|²" if metric.endswith("relative") else "")
            name = prefix + metric.replace("_", "-")
            row.append(pictures.curves(name, lines, ROUND, Axis(label, short, log=True)))
    text = (
        "How far the workers' representations lie from their mean after mixing: (1/N) Σ |φᵢ − φ̄|², on a logarithmic "
        "axis."
    )
    if agreeing:
        text += f" No line: {'; '.join(agreeing)}, whose workers all end a round with the mean."
    return Chapter("Consensus", text, (("", tuple(row)),))


def _theory(name: str, drawn: Sequence[_Drawn]) -> Chapter:
    row = []
    for line in drawn:
        terms = [(term, _Drawn(label, place, line.runs)) for place, (term, label) in enumerate(_TERMS.items())]
        if lines := _positive(found for term, drawn in terms for found in _lines([drawn], "round", term)):
            axis = Axis(f"{line.label}: M(k) and its terms", short, log=True)
            row.append(pictures.curves(f"{name}-{line.slug}", lines, ROUND, axis))
    text = (
        "The paper's convergence measure M(k) and its terms, from full-batch gradients at the mean representation. "
        "G_θ is a mean over the workers' heads, in which gradients may cancel; in the mean of |∇_θ Fᵢ|² they cannot."
    )
    return Chapter("Convergence", text, (("", tuple(row)),))


def _lines(drawn: Sequence[_Drawn], x: str, y: str) -> list[Line]:
    found = [(line, points) for line in drawn if (points := curve(line.runs, x, y)) is not None]
    return [replace(_line(line, points), ended=not any(run.cut_off for run in line.runs)) for line, points in found]


def _line(drawn: _Drawn, found: Curve) -> Line:
    return Line(drawn.label, drawn.colour, found.x, found.y, found.deviation, drawn.dashed)


def _end_apart(lines: Sequence[Line]) -> bool:
    """Whether some lines go on where others have ended."""
    return len({line.x[-1] for line in lines if not line.level}) > 1


def _positive(lines: Iterable[Line]) -> list[Line]:
    """The parts of some lines that a logarithmic axis can show."""
    kept = ((line, line.y > 0) for line in lines)
    return [replace(line, x=line.x[at], y=line.y[at], deviation=line.deviation[at]) for line, at in kept if at.any()]


def x_axis(metric: str, lines: Sequence[Line]) -> Axis:
    """The axis of a metric in a unit that suits its numbers."""
    if metric == "round":
        return ROUND
    ends = [line.x[-1] for line in lines if np.ptp(line.x)]
    sent = metric == "bytes_sent_per_worker"
    units, what = _BYTES if sent else _SECONDS
    size, unit = next(((size, unit) for size, unit in units if max(ends) >= size), units[-1])
    show = human_bytes if sent else lambda seconds: f"{short(seconds / size)} {unit}"
    return Axis(f"{what}, {unit}", show, 1 / size, log=max(ends) > _WIDE_RANGE * min(ends))
