"""How all pictures are drawn: in one style and in colours that colour-blind people can tell apart."""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from manyheads.randomness import generator

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import LineCollection, PathCollection
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#B03A02", "#146F45", "#E4658D", "#B28D1B", "#28A1B5", "#826DED", "#434343")
"""The hues of Okabe and Ito's palette, dark enough for lines on white, and apart in lightness where hues are alike."""

INK, FAINT, RULE = "#222222", "#6E6E6E", "#DDDDDD"
_PAPER = "#ffffff"
_THEME = {
    INK: "var(--ink)",
    FAINT: "var(--faint)",
    RULE: "var(--rule)",
    _PAPER: "var(--paper)",
    **{colour: f"var(--c{i})" for i, colour in enumerate(COLOURS)},
}
"""Colours of the files -> those of the page, which change with light and dark."""

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "manyheads",
    "pdf.fonttype": 42,
    "text.parse_math": False,
    "font.size": 8.5,
}
"""Text stays text, with TrueType fonts in a PDF; equal pictures give equal files; a dollar in a label is a dollar."""

LABEL_SIZE, TITLE_SIZE = 8.0, 9.5

MOST_LINKS = 20_000
"""Lines in the picture of a graph: with more it takes minutes and looks the same."""

FORMATS: dict[str, Any] = {
    # With a background, or a viewer in dark colours would show the dark text on a dark ground.
    "png": {"dpi": 200, "facecolor": _PAPER, "pil_kwargs": {"compress_level": 4}},
    "svg": {"facecolor": _PAPER, "metadata": {"Date": None}},
    "pdf": {"dpi": 200, "metadata": {"CreationDate": None}},
}
"""Kinds of files, and how each is written: without a date the same picture is the same file."""


@dataclass(frozen=True)
class Picture:
    """A drawn picture."""

    name: str
    """The files' name without its ending."""
    alt: str
    """What it shows, for those who cannot see it."""
    inline: str
    """The SVG to stand in the page."""
    svg: bytes
    png: bytes
    hover: dict[str, Any]
    """What the pointer finds: ``points`` (x, y, text) or ``cells`` (values in a box), in parts of width and height."""
    figure: "Figure" = field(compare=False)

    def pdf(self) -> bytes:
        """The same for LaTeX. Made only on request, as the fonts take as long as everything else."""
        return as_file(self.figure, "pdf")


def style() -> Any:
    from matplotlib import rc_context

    return rc_context(_STYLE)


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of its own, in inches: pyplot would keep it and choose a window for it."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=100, facecolor="none")


def new_axes(figure: "Figure", left: float, bottom: float, width: float, height: float) -> "Axes":
    """Plain axes at a place of the figure, in inches."""
    whole = figure.get_size_inches()
    axes = figure.add_axes((left / whole[0], bottom / whole[1], width / whole[0], height / whole[1]))
    axes.set_facecolor("none")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(colors=FAINT, labelsize=LABEL_SIZE, length=0, which="both")
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set(color=FAINT, fontsize=LABEL_SIZE)
    axes.set_axisbelow(True)
    return axes


def add_scale(figure: "Figure", mappable: Any, show: Callable[[float], str]) -> None:
    """A bar under the picture that says which colour is which value."""
    width, height = figure.get_size_inches()
    place = figure.add_axes((0.5 - 0.9 / width, 0.3 / height, 1.8 / width, 0.07 / height))
    bar = figure.colorbar(mappable, cax=place, orientation="horizontal")
    bar.outline.set_visible(False)
    low, high = mappable.get_clim()
    bar.set_ticks([low, (low + high) / 2, high], labels=[show(value) for value in (low, (low + high) / 2, high)])
    place.tick_params(colors=FAINT, labelsize=LABEL_SIZE - 0.5, length=0)


def segments_of(places: np.ndarray, edges: Sequence[tuple[int, int]]) -> np.ndarray:
    """The ends of the lines to draw for ``edges``, [lines, 2, 2]: all, or MOST_LINKS of them drawn by lot."""
    pairs = np.array(edges, dtype=np.int64).reshape(-1, 2)
    if len(pairs) > MOST_LINKS:
        pairs = generator(0, "links").choice(pairs, MOST_LINKS, replace=False)
    return places[pairs]


def draw_graph(
    axes: "Axes", places: np.ndarray, segments: np.ndarray, *, zoom: float = 1.0, **look: Any
) -> "tuple[LineCollection, PathCollection]":
    """Links as lines [lines, 2, 2] and workers as dots at their places [N, 2], on a map without axes.

    ``zoom``: how many times as large the dots are, and as strong the links, as on a map of 2.25 inches.
    """
    from matplotlib.collections import LineCollection

    # Lighter where there are many, so that a dense graph does not become a blot.
    alpha = min(0.6, 5 * zoom / max(1, len(segments)) ** 0.5)
    links = LineCollection(list(segments), colors=FAINT, linewidths=0.4 + alpha, alpha=alpha)
    axes.add_collection(links)
    # So large that neighbours on a circle just do not touch.
    size = zoom**2 * np.clip((420 / len(places)) ** 2, 8, 110)
    dots = axes.scatter(*places.T, s=size, zorder=2, **look)
    axes.set_aspect("equal")
    axes.margins(0.09)
    axes.set_axis_off()
    return links, dots


def text_width(text: str, size: float) -> float:
    """Inches that a text of so many points takes."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    return text_to_path.get_text_width_height_descent(text, FontProperties(size=size), ismath=False)[0] / 72


def fractions(axes: "Axes", points: np.ndarray) -> np.ndarray:
    """Data coordinates [points, 2] as parts of the picture's width and height, from the upper left."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    # matplotlib computes automatic limits only when they are asked for.
    _ = axes.get_xlim(), axes.get_ylim()
    parts = axes.transData.transform(points) / figure.bbox.size
    return np.round(np.stack([parts[:, 0], 1 - parts[:, 1]], axis=1), 4)


def finish(name: str, figure: "Figure", alt: str, hover: dict[str, Any]) -> Picture:
    svg, png = as_file(figure, "svg"), as_file(figure, "png")
    return Picture(name, alt, _inlined(svg.decode(), name), svg, png, hover, figure)


def as_file(figure: "Figure", kind: str) -> bytes:
    """What a file of one of the FORMATS holds."""
    file = io.BytesIO()
    with style():
        figure.savefig(file, format=kind, **FORMATS[kind])
    return file.getvalue()


def _inlined(svg: str, name: str) -> str:
    """matplotlib's file as an element of a page: no prologue, no fixed size, ids of its own, colours of the theme."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    head, tail = svg.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    svg = f'{head} aria-hidden="true" focusable="false">{tail}'
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{name}-", svg)
    svg = re.sub(r" font-family: [^;\"]*;?", "", re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg))
    for colour, variable in _THEME.items():
        svg = re.sub(rf"(?<=: ){colour}\b", variable, svg, flags=re.IGNORECASE)
    return re.sub(r"\n\s*", "\n", svg)
