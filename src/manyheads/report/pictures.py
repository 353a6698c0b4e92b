"""The report's pictures: curves, graphs and maps, with what the pointer finds on them."""

import itertools
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from manyheads.algorithms import REGISTRY
from manyheads.drawing import (
    COLOURS,
    FAINT,
    INK,
    LABEL_SIZE,
    RULE,
    TITLE_SIZE,
    Picture,
    add_scale,
    draw_graph,
    finish,
    fractions,
    new_axes,
    new_figure,
    segments_of,
    style,
    text_width,
)
from manyheads.units import counted, plus_minus

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LONGEST_LABEL = 40
_TITLE_LETTERS = 30
"""In a line of a graph's title."""
_MOST_HOVERED = 120
"""Points of a line that answer the pointer."""
_MOST_VECTORS = 1500
"""With more links than this, those of a graph are drawn as one image."""
_MOST_MAPPED = 100
"""Workers whose similarities answer the pointer; the values of more would make the page heavy."""
_FEW_PLACES = 8
"""Up to so many places on the x axis are marked and labelled one by one, unless two of them are too close."""
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """An axis: its title, how a value reads, and its scale."""

    label: str
    show: Callable[[float], str]
    factor: float = 1.0
    """From the metric's unit to the axis's."""
    log: bool = False
    whole: bool = False
    """Whether only whole numbers make sense."""
    share: bool = False
    """Whether every value lies between 0 and 1."""

    @property
    def title(self) -> str:
        return f"{self.label}, log scale" if self.log else self.label


ROUND = Axis("round", lambda value: f"round {value:.0f}", whole=True)


@dataclass(frozen=True, eq=False)
class Line:
    """A curve with a band of its deviation; every array [points]."""

    label: str
    colour: int | None
    """Its place in the palette; None: a claim, not a measurement, drawn dashed and grey beneath the others."""
    x: np.ndarray
    y: np.ndarray
    deviation: np.ndarray
    dashed: bool = False
    ended: bool = True
    """Whether it goes on to the end of its runs, so that its last value is theirs."""

    @property
    def level(self) -> bool:
        """Whether x never moves, as when a system that sends nothing is drawn against bytes."""
        return len(self.x) > 1 and np.ptp(self.x) == 0


@dataclass(frozen=True)
class _End:
    """The right end of a line, where its name stands; ``x`` is None where it crosses the whole picture."""

    label: str
    colour: str
    y: float
    x: float | None


def own_colours() -> dict[str, int]:
    """Algorithm -> its place in the palette, as far as that goes, so that it looks the same in every picture."""
    return dict(zip(REGISTRY, range(len(COLOURS)), strict=False))


def colours_of(algorithms: Sequence[str]) -> list[int]:
    """Places in the palette for lines of some algorithms: the first of each has its own, any other a free one."""
    own = own_colours()
    used = {own.get(name) for name in algorithms}
    # Once all are used they are used again.
    free = itertools.chain((place for place in range(len(COLOURS)) if place not in used), itertools.count())
    return [own.pop(name) if name in own else next(free) for name in algorithms]


def curves(
    name: str, lines: Sequence[Line], x: Axis, y: Axis, *, floor: float | None = None, values: bool = False
) -> Picture:
    """Lines named at their right ends, over a ``floor`` where there is one. A line whose x never moves is a level.

    ``values``: beside its name stands what a line that goes on to the end ends with.
    """

    def named(label: str, end: float, *, ended: bool = True) -> str:
        return _cut(label) + (f" · {y.show(end)}" if values and ended else "")

    with style():
        labels = [named(line.label, line.y[-1], ended=line.ended) for line in lines]
        if floor is not None:
            labels.append(named("majority floor", floor))
        room = 0.25 + max(text_width(label, LABEL_SIZE) for label in labels)
        width = max(4.05, 2.5 + room, 0.54 + text_width(y.title, TITLE_SIZE))
        figure, axes = _axes(width, 2.8, right=room)
        ends: list[_End] = []
        places = _few_places(lines, x)
        for line, label in zip(lines, labels, strict=False):
            colour = FAINT if line.colour is None else COLOURS[line.colour % len(COLOURS)]
            height = y.factor * line.y[-1]
            if line.level:
                axes.axhline(height, color=colour, linewidth=1.2, linestyle=(0, (1, 2)))
            else:
                _plot(axes, line, x, y, colour, marked=bool(places))
            ends.append(_End(label, colour, height, None if line.level else x.factor * line.x[-1]))
        if floor is not None:
            axes.axhline(y.factor * floor, color=FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
            ends.append(_End(labels[-1], FAINT, y.factor * floor, None))
        _ticks(axes, x, y)
        if places and x.whole:
            axes.set_xticks(places)
        axes.set_xlabel(x.title)
        axes.set_title(y.title, loc="left", color=INK, fontsize=TITLE_SIZE, pad=8)
        _name_ends(figure, axes, ends)
        hover = [point for line in lines if not line.level for point in _hovered(axes, line, x, y)]
        said = "; ".join(f"{line.label} {y.show(line.y[-1]) if line.ended else 'unknown'}" for line in lines)
        return finish(name, figure, f"{y.label} against {x.label}. At the end: {said}.", {"points": hover})


def graph(
    name: str,
    title: str,
    places: np.ndarray,
    edges: Sequence[tuple[int, int]],
    values: dict[int, float],
    limits: tuple[float, float],
    show: Callable[[float], str],
    *,
    server: bool = False,
) -> Picture:
    """Workers at their places [N, 2] and their links, coloured by ``values``; a server stands in the middle."""
    with style():
        lines = textwrap.wrap(title, _TITLE_LETTERS)
        top = 0.15 * (1 + len(lines))
        figure, axes = _axes(2.7, 2.75 + top, left=0.1, right=0.1, bottom=0.5, top=top)
        segments = np.stack([0 * places, places], axis=1) if server else segments_of(places, edges)
        colours = [values.get(worker, np.nan) for worker in range(len(places))]
        look: Any = {"cmap": "viridis", "vmin": limits[0], "vmax": limits[1], "edgecolors": FAINT, "linewidths": 0.5}
        # Workers without test samples have no value: an empty dot.
        links, dots = draw_graph(axes, places, segments, c=colours, plotnonfinite=True, **look)
        links.set_rasterized(len(segments) > _MOST_VECTORS)
        if server:
            axes.scatter([0], [0], s=70, marker="s", color=INK, zorder=3)
        axes.set_title("\n".join(lines), loc="center", color=INK, fontsize=TITLE_SIZE, pad=4)
        add_scale(figure, dots, show)
        axes.apply_aspect()
        at = fractions(axes, places).tolist()
        hover = [(*at[worker], f"worker {worker} · {show(value)}") for worker, value in values.items()]
        said = f"lowest {show(min(values.values()))}, highest {show(max(values.values()))}"
        who = counted(len(places), "worker")
        return finish(name, figure, f"{title}: {who} coloured by score, {said}.", {"points": hover})


def colour_ends(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """The ends of a colour scale, apart even if all values are equal: then the value is the end further from zero."""
    found = np.array(values, dtype=float)
    found = found[np.isfinite(found)]
    low, high = (float(found.min()), float(found.max())) if len(found) else (0.0, 1.0)
    if high > low:
        return low, high
    # No cosine or accuracy is above 1, nor an accuracy below 0.
    return (low - 0.01, high) if high > 0 else (low, high + 0.01)


def similarity_map(name: str, title: str, values: np.ndarray, limits: tuple[float, float]) -> Picture:
    """Cosines between all workers, [N, N], as a map."""
    from matplotlib.ticker import MaxNLocator

    with style():
        figure, axes = _axes(2.7, 3.05, left=0.36, right=0.1, bottom=0.62, top=0.3)
        image = axes.imshow(values, cmap="viridis", vmin=limits[0], vmax=limits[1], interpolation="none")
        axes.grid(False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_title(title, loc="center", color=INK, fontsize=TITLE_SIZE, pad=4)
        digits = int(np.clip(1 - np.floor(np.log10(limits[1] - limits[0])), 2, 6))
        add_scale(figure, image, lambda value: f"{value:z.{digits}f}".replace("-", "−"))
        axes.apply_aspect()
        hover = {}
        if len(values) <= _MOST_MAPPED:
            corners = fractions(axes, np.array([[-0.5, -0.5], [len(values) - 0.5] * 2]))
            # Where a worker has no cosine there is none to show: JSON knows no NaN.
            rounded = [[round(v, digits) + 0.0 if np.isfinite(v) else None for v in row] for row in values.tolist()]
            hover = {"cells": {"box": corners.ravel().tolist(), "values": rounded}}
        said = f"on a scale from {limits[0]:z.{digits}f} to {limits[1]:z.{digits}f}"
        return finish(name, figure, f"{title}: cosines of {counted(len(values), 'worker')}, {said}.", hover)


def _axes(
    width: float, height: float, *, left: float = 0.44, right: float, bottom: float = 0.44, top: float = 0.34
) -> "tuple[Figure, Axes]":
    """A figure with one axes; sizes and margins in inches."""
    figure = new_figure(width, height)
    axes = new_axes(figure, left, bottom, width - left - right, height - bottom - top)
    axes.grid(axis="y", color=RULE, linewidth=0.7)
    return figure, axes


def _ticks(axes: "Axes", x: Axis, y: Axis) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    axes.set_xscale("log" if x.log else "linear")
    axes.set_yscale("log" if y.log else "linear")
    for axis, kind in ((axes.xaxis, x), (axes.yaxis, y)):
        low, high = axis.get_view_interval()
        finer = (1, 2, 3, 5, 7) if high < 10 * low else (1, 2, 5) if high < 100 * low else (1,)
        decades = LogLocator(subs=finer, numticks=8 if len(finer) > 1 else 6)
        # Only over a factor of 3 are there always two of these numbers, and one alone gives no scale.
        logarithmic = kind.log and high >= 3 * low
        axis.set_major_locator(decades if logarithmic else MaxNLocator(5, integer=kind.whole))
        axis.set_major_formatter(FuncFormatter(_tick))
    axes.minorticks_off()
    axes.margins(x=0)


def _few_places(lines: Sequence[Line], x: Axis) -> list[float]:
    """The places of the lines' points on the x axis, if they are few and not too close; else none."""
    places = np.unique([x.factor * value for line in lines if not line.level for value in line.x])
    along = np.log(places) if x.log else places
    apart = 2 <= len(places) <= _FEW_PLACES and np.diff(along).min() > 0.05 * np.ptp(along)
    return places.tolist() if apart else []


def _tick(value: float, _: int) -> str:
    """A number on an axis; far from 1 as 10⁻⁷."""
    if value == 0 or 1e-4 < abs(value) < 1e6:
        return f"{value:g}"
    mantissa, exponent = f"{value:.0e}".split("e")
    return ("" if mantissa == "1" else f"{mantissa}·") + "10" + str(int(exponent)).translate(_SUPERSCRIPTS)


def _cut(label: str) -> str:
    return label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1]}…"


def _plot(axes: "Axes", line: Line, to_x: Axis, to_y: Axis, colour: str, *, marked: bool) -> None:
    x, y, deviation = to_x.factor * line.x, to_y.factor * line.y, to_y.factor * line.deviation
    if deviation.any():
        # On a logarithmic axis the band must not reach zero, where it would have no end.
        low = np.maximum(y - deviation, y / 10) if to_y.log else y - deviation
        high = y + deviation
        if to_y.share:
            low, high = np.maximum(low, 0), np.minimum(high, to_y.factor)
        axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
    claim = line.colour is None
    look: Any = {"linestyle": (0, (4, 1.6)) if line.dashed or claim else "-", "linewidth": 1.2 if claim else 1.6}
    look["zorder"] = 1.5 if claim else 2
    marker = "o" if (marked or len(x) == 1) and not claim else ""
    axes.plot(x, y, color=colour, marker=marker, markersize=4, clip_on=not marker, **look)


def _name_ends(figure: "Figure", axes: "Axes", ends: Sequence[_End]) -> None:
    """A name beside each line's end, moved apart where they would overlap, and a thread that leads to it."""
    box, limits = axes.get_position(), axes.get_xlim()
    width, height = box.width * figure.get_figwidth(), box.height * figure.get_figheight()
    to_part = axes.transData + axes.transAxes.inverted()
    heights = [float(np.clip(to_part.transform((limits[1], end.y))[1], 0, 1)) for end in ends]
    places = _below(spread(heights, gap := 1.2 * LABEL_SIZE / 72 / height), gap)
    knees = [1 + inches / width for inches in (0.02, 0.1, 0.14)]
    for end, at, place in zip(ends, heights, places, strict=True):
        if end.x is not None and end.x < limits[1]:
            axes.plot(
                [end.x, limits[1]], [end.y] * 2, color=end.colour, linewidth=0.7, linestyle=(0, (1, 2)), alpha=0.8
            )
        axes.plot(knees, [at, place, place], color=end.colour, linewidth=1.2, clip_on=False, transform=axes.transAxes)
        text = {"fontsize": LABEL_SIZE, "color": INK, "va": "center_baseline", "transform": axes.transAxes}
        axes.text(1 + 0.17 / width, place, end.label, **text)
    axes.set_xlim(limits)


def spread(values: Sequence[float], gap: float) -> list[float]:
    """Places with the least squared distance from the values, in the same order and at least ``gap`` apart."""
    order = sorted(range(len(values)), key=values.__getitem__)
    # Labels that would touch form a block, which sits where the mean of its members wants it.
    blocks: list[list[float]] = []
    for rank, i in enumerate(order):
        blocks.append([values[i] - rank * gap])
        while len(blocks) > 1 and fmean(blocks[-2]) >= fmean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    moved = [fmean(block) for block in blocks for _ in block]
    return [moved[rank] + rank * gap for rank in map(order.index, range(len(values)))]


def _below(places: list[float], gap: float) -> list[float]:
    """Places at least ``gap`` apart, pushed down to leave the room above 1 to the title."""
    return [min(place, 1 - gap * sum(other > place for other in places)) for place in places]


def _hovered(axes: "Axes", line: Line, x: Axis, y: Axis) -> list[tuple[float, float, str]]:
    """The points of a line that answer the pointer, evenly over a long one."""
    count = len(line.x)
    chosen = np.unique(np.linspace(0, count - 1, min(count, _MOST_HOVERED)).round().astype(int))
    places = fractions(axes, np.stack([x.factor * line.x, y.factor * line.y], axis=1)[chosen]).tolist()

    def said(i: int) -> str:
        return f"{line.label} · {x.show(line.x[i])} · {plus_minus(line.y[i], line.deviation[i] or None, y.show)}"

    return [(*place, said(i)) for place, i in zip(places, chosen, strict=True)]
