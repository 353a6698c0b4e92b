"""How the report's pictures are drawn: in one style, once in the page's colours and once for the files."""

import io
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from manyheads.figures import COLOURS, FAINT, INK, RULE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
        file = io.BytesIO()
        with style():
            self.figure.savefig(file, format="pdf", dpi=200, metadata={"CreationDate": None})
        return file.getvalue()


def style() -> Any:
    from matplotlib import rc_context

    return rc_context(_STYLE)


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=100, facecolor="none")


def new_axes(figure: "Figure", left: float, bottom: float, width: float, height: float) -> "Axes":
    """Plain axes at a place of the figure, in inches."""
    whole = figure.get_size_inches()
    axes = figure.add_axes((left / whole[0], bottom / whole[1], width / whole[0], height / whole[1]))
    axes.set_facecolor("none")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(colors=FAINT, labelsize=LABEL_SIZE, length=0)
    axes.xaxis.label.set(color=FAINT, fontsize=LABEL_SIZE)
    axes.set_axisbelow(True)
    return axes


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
    svg, png = io.BytesIO(), io.BytesIO()
    # With a background, or a viewer in dark colours would show the dark text on a dark ground.
    figure.savefig(svg, format="svg", facecolor=_PAPER, metadata={"Date": None})
    figure.savefig(png, format="png", dpi=200, facecolor=_PAPER, pil_kwargs={"compress_level": 4})
    return Picture(name, alt, _inlined(svg.getvalue().decode(), name), svg.getvalue(), png.getvalue(), hover, figure)


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
