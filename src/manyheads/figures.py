"""Pictures of graphs and splits, and the colours of all pictures, which colour-blind people can tell apart."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from manyheads.errors import UserError
from manyheads.files import disk_errors, make_folder, replacing
from manyheads.randomness import generator

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#B03A02", "#146F45", "#E4658D", "#B28D1B", "#28A1B5", "#826DED", "#434343")
"""The hues of Okabe and Ito's palette, dark enough for lines on white, and apart in lightness where hues are alike."""

INK, FAINT, RULE = "#222222", "#6E6E6E", "#DDDDDD"
FORMATS = (".png", ".svg", ".pdf")
MOST_LINKS = 20_000
"""Lines in the picture of a graph: with more it takes minutes and looks the same."""

_SIZE = 9.0
"""Points of ordinary text."""

_MOST_NAMED = 64
"""With more workers their numbers no longer fit into a graph's dots."""


def class_map(counts: np.ndarray, out: Path) -> None:
    """Train samples by worker and class, ``counts`` [W, C], darker where there are more; above, each worker's total."""
    from matplotlib.ticker import MaxNLocator

    num_workers, num_classes = counts.shape
    width = min(13.0, max(5.0, 1.6 + 0.28 * num_workers))
    height = min(9.0, max(2.4, 0.6 + 0.24 * num_classes))
    figure = _figure(width, height + 1.3)
    bars, below = figure.subplots(2, 1, sharex=True, height_ratios=(0.9, height), gridspec_kw={"hspace": 0.04})
    bars.bar(np.arange(num_workers), counts.sum(1), width=0.8, color=COLOURS[0])
    image = below.imshow(counts.T, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
    for part in (bars, below):
        _plain(part)
    bars.yaxis.set_major_locator(MaxNLocator(2, integer=True))
    below.set_xlabel("worker")
    below.set_ylabel("class")
    below.xaxis.set_major_locator(MaxNLocator(min(num_workers, 16), integer=True))
    below.yaxis.set_major_locator(MaxNLocator(min(num_classes, 10), integer=True))
    # White seams make single cells visible until there are too many of them.
    if num_workers <= _MOST_NAMED and num_classes <= _MOST_NAMED:
        below.set_xticks(np.arange(num_workers + 1) - 0.5, minor=True)
        below.set_yticks(np.arange(num_classes + 1) - 0.5, minor=True)
        below.grid(which="minor", color="white", linewidth=1)
    _title(bars, "train samples of each worker, and of which class")
    _scale(figure, image, [bars, below], "samples")
    _save(figure, out)


def graph(layout: np.ndarray, edges: Sequence[tuple[int, int]], out: Path) -> None:
    """Workers at their places ``layout`` [N, 2], joined by ``edges``, of which at most MOST_LINKS are drawn."""
    figure = _figure(6.0, 6.0)
    axes = figure.add_subplot()
    num_workers = len(layout)
    draw_links(axes, segments_of(layout, edges), strength=8, most=0.7)
    named = num_workers <= _MOST_NAMED
    size = min(420.0, 9000.0 / num_workers) if named else max(6.0, 4000.0 / num_workers)
    axes.scatter(layout[:, 0], layout[:, 1], s=size, zorder=2, color=COLOURS[0], edgecolors="white", linewidths=1.2)
    if named:
        text: Any = {"color": "white", "ha": "center", "va": "center_baseline", "zorder": 3}
        for worker, (x, y) in enumerate(layout):
            axes.text(x, y, str(worker), fontsize=min(_SIZE, 0.42 * size**0.5 + 1), **text)
    bare(axes, margin=0.08)
    _save(figure, out)


def draw_links(axes: "Axes", segments: Any, *, strength: float, most: float) -> "LineCollection":
    """Lines [lines, 2, 2], lighter where there are many, so that a dense graph does not become a blot."""
    from matplotlib.collections import LineCollection

    alpha = min(most, strength / max(1, len(segments)) ** 0.5)
    links = LineCollection(segments, colors=FAINT, linewidths=0.4 + alpha, alpha=alpha)
    axes.add_collection(links)
    return links


def bare(axes: "Axes", *, margin: float) -> None:
    """A map of places, with neither axes nor distortion."""
    axes.set_aspect("equal")
    axes.margins(margin)
    axes.set_axis_off()


def segments_of(layout: np.ndarray, edges: Sequence[tuple[int, int]]) -> Any:
    """The ends of the lines to draw for ``edges``, [lines, 2, 2]: all, or MOST_LINKS of them drawn by lot."""
    pairs = np.array(edges, dtype=np.int64).reshape(-1, 2)
    if len(pairs) > MOST_LINKS:
        pairs = generator(0, "links").choice(pairs, MOST_LINKS, replace=False)
    return layout[pairs]


def check_name(out: Path) -> None:
    """Refuse a file whose name does not end like a picture's."""
    if out.suffix not in FORMATS:
        raise UserError(f"{out} is not a picture that can be written: end its name with {', '.join(FORMATS)}.")


def _figure(width: float, height: float) -> "Figure":
    """A figure of its own, in inches: pyplot would keep it and choose a window for it."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=160, layout="constrained", facecolor="white")


def _plain(axes: "Axes") -> None:
    """No frame, quiet ticks."""
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(colors=FAINT, labelsize=_SIZE, which="both", length=0)
    axes.xaxis.label.set(color=FAINT, fontsize=_SIZE)
    axes.yaxis.label.set(color=FAINT, fontsize=_SIZE)


def _title(axes: "Axes", text: str) -> None:
    axes.set_title(text, loc="left", color=INK, fontsize=_SIZE + 2, pad=10)


def _scale(figure: "Figure", image: Any, axes: "list[Axes]", label: str) -> None:
    bar = figure.colorbar(image, ax=axes, shrink=0.8, aspect=30, pad=0.02)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    bar.ax.tick_params(colors=FAINT, labelsize=_SIZE, length=0)
    bar.set_label(label, color=FAINT, fontsize=_SIZE)


def _save(figure: "Figure", out: Path) -> None:
    """Write the picture whole or not at all, in the format its name ends with."""
    check_name(out)
    # Without a date the same picture is the same file.
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(out.suffix)
    make_folder(out.parent)
    with disk_errors(out), replacing(out) as file:
        figure.savefig(file, format=out.suffix[1:], metadata=metadata)
