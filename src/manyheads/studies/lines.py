"""Lines of figures out of recorded runs: means over seeds with their deviation."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from manyheads.report.collect import Finished
from manyheads.report.numbers import at_end, curve
from manyheads.report.pictures import Axis, Line
from manyheads.studies.results import Results

ACCURACY = Axis("accuracy, %", lambda value: f"{100 * value:.1f} %", factor=100, share=True)


def along(label: str, colour: int, runs: Sequence[Finished], x: str, y: str) -> list[Line]:
    """A metric along the rounds of some runs: one line, or none where nothing is recorded."""
    found = curve(runs, x, y) if runs else None
    return [] if found is None else [Line(label, colour, found.x, found.y, found.deviation)]


def across(label: str, colour: int, results: Results, key: str, metric: str, **place: Any) -> list[Line]:
    """A metric after the last round against a part of the place: one line, or none where there is nothing to draw.

    Only seeds that all its points have are used, or differences between seeds would shape the line.
    """
    found = {value: at_end(runs, metric) for value, runs in results.alike(key, **place).items()}
    there = [(value, stat) for value, stat in found.items() if stat is not None]
    if not there:
        return []
    x, y, deviation = zip(*((value, stat.mean, stat.deviation or 0.0) for value, stat in there), strict=True)
    return [Line(label, colour, np.array(x, float), np.array(y), np.array(deviation))]
