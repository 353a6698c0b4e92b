"""Our numbers beside the paper's, as a picture: a row for every method, a dot for ours, a ring for the paper's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from manyheads.drawing import (
    COLOURS,
    FAINT,
    INK,
    LABEL_SIZE,
    RULE,
    TITLE_SIZE,
    Picture,
    finish,
    new_axes,
    new_figure,
    style,
    text_width,
)

_ROW, _PANEL, _BETWEEN = 0.23, 2.0, 0.22
_TOP, _BOTTOM = 0.55, 0.5
"""Inches, all of them."""

_OURS: Any = {"color": COLOURS[0], "marker": "o", "linestyle": "none", "markersize": 4.5}
_PAPERS: Any = {**_OURS, "color": "white", "markeredgecolor": FAINT, "markersize": 7}
"""Large enough to be seen around ours where both are the same."""
_FLOOR: Any = {"color": FAINT, "linewidth": 0.9, "linestyle": (0, (1, 2))}


@dataclass(frozen=True)
class Gap:
    """One method's numbers, in percent; None: there is none."""

    method: str
    ours: float | None
    deviation: float | None
    paper: float | None


@dataclass(frozen=True)
class Panel:
    """The methods under one heading, with what naming the most frequent class scores."""

    title: str
    floor: float | None
    gaps: Sequence[Gap]


def side_by_side(name: str, title: str, panels: Sequence[Panel], *, papers_data: str = "") -> Picture:
    """Panels with the same methods in the same order, on one scale, so that gaps can be compared across panels.

    ``papers_data``: those of the paper where ours are others; then a gap means nothing, and no line joins the two.
    """
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    methods = [gap.method for gap in panels[0].gaps]
    several = any(gap.deviation for panel in panels for gap in panel.gaps)
    legend = {"ours ± deviation over seeds" if several else "ours": _OURS}
    papers = "the paper's" + (papers_data and f" on {papers_data}")
    known = [gap for panel in panels for gap in panel.gaps if gap.paper is not None]
    if known:
        alone = any(gap.ours is None for gap in known)
        legend[papers + (" (alone: we have not run it)" if alone else "")] = _PAPERS
    if any(panel.floor is not None for panel in panels):
        legend["majority floor"] = _FLOOR
    left = 0.2 + max(text_width(method, LABEL_SIZE) for method in methods)
    width, height = left + len(panels) * (_PANEL + _BETWEEN), _TOP + _BOTTOM + _ROW * len(methods)
    with style():
        figure = new_figure(width, height)
        ends = _ends(panels)
        for k, panel in enumerate(panels):
            axes = new_axes(figure, left + k * (_PANEL + _BETWEEN), _BOTTOM, _PANEL, _ROW * len(methods))
            axes.grid(axis="x", color=RULE, linewidth=0.7)
            if panel.floor is not None:
                axes.axvline(panel.floor, **_FLOOR)
            for row, gap in enumerate(panel.gaps):
                if gap.ours is not None and gap.paper is not None and not papers_data:
                    axes.plot([gap.ours, gap.paper], [row] * 2, color=FAINT, linewidth=0.8, alpha=0.6, zorder=2)
                if gap.paper is not None:
                    axes.plot(gap.paper, row, zorder=3, **_PAPERS)
                if gap.ours is not None:
                    axes.errorbar(gap.ours, row, xerr=gap.deviation, zorder=4, **_OURS)
            axes.set_xlim(ends)
            axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
            axes.set_ylim(len(methods) - 0.5, -0.5)
            axes.set_yticks(np.arange(len(methods)), labels=methods if k == 0 else [""] * len(methods))
            axes.tick_params(axis="y", colors=INK)
            axes.set_title(panel.title, loc="left", color=INK, fontsize=LABEL_SIZE, pad=4)
        figure.text(0.1 / width, 1 - 0.18 / height, f"{title}: accuracy, %", color=INK, fontsize=TITLE_SIZE)
        figure.legend(
            handles=[Line2D([], [], label=label, **look) for label, look in legend.items()],
            loc="lower left", bbox_to_anchor=(left / width, 0), ncols=len(legend), frameon=False,
            fontsize=LABEL_SIZE, labelcolor=FAINT, borderaxespad=0.3, borderpad=0, handletextpad=0.3,
        )  # fmt: skip
        about = f"{title}, accuracy in percent{papers_data and f', {papers}'}."
        return finish(name, figure, f"{about} {' '.join(map(_said, panels))}", {})


def _ends(panels: Sequence[Panel]) -> tuple[float, float]:
    """Where a scale begins and ends that holds every number."""
    numbers = [panel.floor for panel in panels]
    for gap in (gap for panel in panels for gap in panel.gaps):
        numbers.append(gap.paper)
        if gap.ours is not None:
            numbers += [gap.ours - (gap.deviation or 0), gap.ours + (gap.deviation or 0)]
    known = [number for number in numbers if number is not None]
    room = 0.05 * (max(known) - min(known)) or 1.0
    return min(known) - room, max(known) + room


def _said(panel: Panel) -> str:
    """A panel in words."""

    def number(value: float | None) -> str:
        return "not run" if value is None else f"{value:.1f}"

    both = [
        f"{gap.method} {number(gap.ours)}" + ("" if gap.paper is None else f" (paper {gap.paper:.1f})")
        for gap in panel.gaps
    ]
    floor = "" if panel.floor is None else f" (majority floor {panel.floor:.1f})"
    return f"{panel.title}{floor}: {', '.join(both)}."
