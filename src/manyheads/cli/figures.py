"""Pictures of graphs and splits, each written to a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from manyheads import drawing
from manyheads.errors import UserError
from manyheads.files import make_folder, write_atomically
from manyheads.units import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_NAMED = 64
"""With more workers their numbers no longer fit into a graph's dots."""

_TITLE = "train samples of each worker, and of which class"


def class_map(counts: np.ndarray, out: Path) -> None:
    """Train samples by worker and class, ``counts`` [W, C], darker where there are more; above, each worker's total."""
    from matplotlib.ticker import MaxNLocator

    num_workers, num_classes = counts.shape
    totals = counts.sum(1)
    with drawing.style():
        numbers = [drawing.text_width(f"{number:.0f}", drawing.LABEL_SIZE) for number in (totals.max(), num_classes)]
        left = max(0.15 + numbers[0], 0.3 + numbers[1])
        width = max(drawing.text_width(_TITLE, drawing.TITLE_SIZE), min(9.0, 0.22 * num_workers))
        height = min(6.5, max(1.4, 0.19 * num_classes))
        figure = drawing.new_figure(left + width + 0.1, height + 2.05)
        below = drawing.new_axes(figure, left, 0.84, width, height)
        bars = drawing.new_axes(figure, left, height + 0.99, width, 0.72)
        # An even number, so that the middle of the scale is a whole one.
        most = max(2, counts.max() + counts.max() % 2)
        image = below.imshow(counts.T, aspect="auto", cmap="Blues", vmin=0, vmax=most, interpolation="none")
        below.set(xlabel="worker", ylabel="class")
        below.xaxis.set_major_locator(MaxNLocator(min(num_workers, 16), integer=True, min_n_ticks=1))
        below.yaxis.set_major_locator(MaxNLocator(min(num_classes, 10), integer=True, min_n_ticks=1))
        # White seams make single cells visible until there are too many of them.
        if num_workers <= _MOST_NAMED and num_classes <= _MOST_NAMED:
            below.set_xticks(np.arange(num_workers + 1) - 0.5, minor=True)
            below.set_yticks(np.arange(num_classes + 1) - 0.5, minor=True)
            below.grid(which="minor", color="white", linewidth=1)
        bars.bar(np.arange(num_workers), totals, width=0.8, color=drawing.COLOURS[0])
        bars.set(xlim=below.get_xlim(), xticks=[])
        bars.yaxis.set_major_locator(MaxNLocator(2, integer=True))
        bars.set_title(_TITLE, loc="left", color=drawing.INK, fontsize=drawing.TITLE_SIZE, pad=8)
        drawing.add_scale(figure, image, lambda value: counted(round(value), "sample"))
    _write(figure, out)


def graph(places: np.ndarray, edges: Sequence[tuple[int, int]], out: Path) -> None:
    """Workers at their places [N, 2], joined by ``edges``, of which at most MOST_LINKS are drawn."""
    with drawing.style():
        figure = drawing.new_figure(4.5, 4.5)
        axes = drawing.new_axes(figure, 0, 0, 4.5, 4.5)
        look: Any = {"color": drawing.COLOURS[0], "edgecolors": "white", "linewidths": 1.2}
        # The map is twice as large, its dots are less, so that the links between neighbours are seen.
        _, dots = drawing.draw_graph(axes, places, drawing.segments_of(places, edges), zoom=1.5, **look)
        if len(places) <= _MOST_NAMED:
            size = min(drawing.LABEL_SIZE, 0.42 * dots.get_sizes()[0] ** 0.5 + 1)
            text: Any = {"color": "white", "ha": "center", "va": "center_baseline", "zorder": 3, "fontsize": size}
            for worker, (x, y) in enumerate(places):
                axes.text(x, y, str(worker), **text)
    _write(figure, out)


def check_name(out: Path) -> None:
    """Refuse a file whose name does not end like a picture's."""
    if out.suffix[1:] not in drawing.FORMATS:
        endings = ", ".join(f".{kind}" for kind in drawing.FORMATS)
        raise UserError(f"{out} is not a picture that can be written: end its name with {endings}.")


def _write(figure: "Figure", out: Path) -> None:
    """Write the picture whole or not at all, in the format its name ends with."""
    make_folder(out.parent)
    write_atomically(out, drawing.as_file(figure, out.suffix[1:]))
