import itertools
import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.algorithms import REGISTRY, DePRL
from manyheads.drawing import Picture
from manyheads.report.pictures import Axis, Line, colour_ends, colours_of, curves, graph, similarity_map, spread
from manyheads.units import short

ROUND = Axis("round", lambda value: f"round {value:.0f}", whole=True)
ACCURACY = Axis("accuracy, %", lambda value: f"{100 * value:.1f} %", 100)


def line(label: str = "DePRL", colour: int | None = 0, points: int = 5, **values) -> Line:
    x = np.arange(1.0, points + 1)
    return Line(**{"label": label, "colour": colour, "x": x, "y": x / 10, "deviation": 0 * x, **values})


def texts(picture: Picture) -> list[str]:
    return [element.text or "" for element in ET.fromstring(picture.inline).iter("{http://www.w3.org/2000/svg}text")]


def test_the_page_decides_about_size_and_colours():
    picture = curves("a", [line(), line("Local", 7)], ROUND, ACCURACY, floor=0.2)
    root = ET.fromstring(picture.inline)
    assert root.get("width") is None
    assert root.get("viewBox")
    assert "var(--c0)" in picture.inline
    assert "var(--c7)" in picture.inline
    assert not re.search(r": #[0-9a-f]{6}", picture.inline), "a colour that does not follow the theme"
    assert "<style" not in picture.inline, "a style would reach the whole page"
    assert {"DePRL", "Local", "majority floor", "accuracy, %", "round"} <= set(texts(picture))
    assert picture.png.startswith(b"\x89PNG")
    assert picture.svg.startswith(b"<?xml")


def test_the_files_stand_on_white_and_the_page_on_its_own_ground():
    """GitHub in dark colours shows an SVG file as it is: dark text without a ground could not be read."""
    picture = curves("a", [line()], ROUND, ACCURACY)
    ground = r'<g id="patch_1">\s*<path d="M 0 [^"]*" style="fill: #ffffff'
    assert re.search(ground, picture.svg.decode())
    assert "var(--paper)" in picture.inline and "#ffffff" not in picture.inline


def test_the_pdf_has_text_in_truetype_and_no_date():
    """Fonts of type 3 are turned away by conferences; dates would make every file another."""
    picture = curves("a", [line(y=10.0 ** -np.arange(5))], ROUND, Axis("loss, 10⁻³", str, log=True))
    pdf = picture.pdf()
    assert pdf.startswith(b"%PDF")
    assert b"/CIDFontType2" in pdf and b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    assert b"/CreationDate" not in pdf


def test_ids_of_two_pictures_do_not_meet():
    first, second = (curves(name, [line()], ROUND, ACCURACY).inline for name in ("a", "b"))
    ids = [set(re.findall(r' id="([^"]*)"', svg)) for svg in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]
    assert set(re.findall(r"url\(#([^)]*)\)", first)) <= ids[0]


def test_the_same_picture_is_the_same_file():
    one, other = (curves("a", [line()], ROUND, ACCURACY) for _ in range(2))
    assert one == other and one.pdf() == other.pdf()


def test_labels_from_files_are_text_and_nothing_else():
    label = '<script>alert(1)</script> & $\\frac$ "id"'
    picture = curves("a", [line(label)], ROUND, ACCURACY)
    assert "<script" not in picture.inline
    assert label[:39] in "".join(texts(picture))


def test_hovering_finds_every_point_where_it_is_drawn():
    values = line(deviation=np.full(5, 0.01))
    picture = curves("a", [values], ROUND, ACCURACY)
    points = picture.hover["points"]
    assert points[0][2] == "DePRL · round 1 · 10.0 ± 1.0 %"
    errors = curves("a", [line(deviation=np.full(5, 0.000437))], ROUND, Axis("error", short))
    assert errors.hover["points"][0][2] == "DePRL · round 1 · 0.100 ± 0.000"
    across, down = [x for x, _, _ in points], [y for _, y, _ in points]
    assert across == sorted(across)
    assert down == sorted(down, reverse=True)
    assert all(0 <= part <= 1 for part in across + down)
    assert len(curves("a", [line(points=1000)], ROUND, ACCURACY).hover["points"]) <= 120


def test_no_word_is_cut() -> None:
    """Capitals are wide, and titles long where a system is named by its options."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    measure = Axis("speed-up in rounds, squared gradient norm of the representation", short)
    named = "DePRL, head epochs 1, order mix-train, exponential"
    for picture in (
        curves("a", [line("FEDWWWWWWWWWW-MMMMMMMMMMMMM")], ROUND, measure),
        curves("b", [line("Local")], ROUND, measure),
        curves("c", [line("FEDWWWWWWWWWW-MMMMMMMMMMMMM")], ROUND, ACCURACY, values=True),
        graph("g", named, np.eye(2), [(0, 1)], {0: 0.5}, (0, 1), ACCURACY.show),
    ):
        renderer, (width, height) = FigureCanvasAgg(picture.figure).get_renderer(), picture.figure.bbox.size
        for text in (found for found in picture.figure.findobj(Text) if isinstance(found, Text)):
            box = text.get_window_extent(renderer)
            # Numbers beyond the ends of an axis are there, and not drawn.
            if text.get_text().upper() != text.get_text().lower():
                assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text.get_text()


def test_what_a_line_ends_with_may_stand_beside_its_name():
    lines = [line("A" * 50), line("Local", 7, x=np.zeros(5), y=np.full(5, 0.3))]
    shown = texts(curves("a", lines, ROUND, ACCURACY, floor=0.2, values=True))
    assert {f"{'A' * 39}… · 50.0 %", "Local · 30.0 %", "majority floor · 20.0 %"} <= set(shown)


def test_names_at_the_ends_keep_their_distance():
    lines = [line(f"system {i}", i, y=np.full(5, 0.9)) for i in range(8)]
    root = ET.fromstring(curves("a", lines, ROUND, ACCURACY).inline)
    heights = sorted(
        float(element.get("y", 0))
        for element in root.iter("{http://www.w3.org/2000/svg}text")
        if (element.text or "").startswith("system")
    )
    assert len(heights) == 8
    assert min(np.diff(heights)) > 8


def test_a_line_that_goes_nowhere_is_a_level_without_points():
    picture = curves("a", [line(), line("Local", 7, x=np.zeros(5))], ROUND, ACCURACY)
    assert {text.split(" · ")[0] for _, _, text in picture.hover["points"]} == {"DePRL"}
    assert "Local" in texts(picture)


def test_a_claim_lies_beneath_what_was_measured_and_has_no_points() -> None:
    """Where both are the same, what was measured is seen."""
    measured, claim = line(points=3), line("linear", None, points=3)
    axes = curves("a", [claim, measured, claim], ROUND, ACCURACY).figure.axes[0]
    first, own, last = axes.lines[:3]
    assert own.get_zorder() > max(first.get_zorder(), last.get_zorder())
    assert (own.get_marker(), first.get_marker()) == ("o", "")
    assert first.is_dashed() and not own.is_dashed()


def test_a_few_places_are_named_one_by_one_unless_they_are_too_close():
    apart, close = (line(points=4, x=np.array(x)) for x in ((4.0, 8.0, 16.0, 32.0), (1.0, 2.0, 3.0, 100.0)))
    assert {"4", "8", "16", "32"} <= set(texts(curves("a", [apart], ROUND, ACCURACY)))
    assert "3" not in texts(curves("a", [close], ROUND, ACCURACY))
    logarithmic = Axis("rounds", lambda value: f"{value:g}", log=True, whole=True)
    assert {"4", "8", "16", "32"} <= set(texts(curves("a", [apart], logarithmic, ACCURACY)))
    near = line(points=4, x=np.array([1.0, 2.0, 2.1, 100.0]))
    assert "2.1" not in texts(curves("a", [near], logarithmic, ACCURACY))
    kilobytes = Axis("sent, kB", lambda value: f"{value:g} B", 1e-3)
    shown = texts(curves("a", [line(points=3, x=33_280.0 * np.arange(1, 4))], kilobytes, ACCURACY))
    assert "33.28" not in shown and "60" in shown


@pytest.mark.parametrize("share", [True, False])
def test_the_band_of_a_share_stays_within_its_ends(monkeypatch: pytest.MonkeyPatch, share: bool) -> None:
    drawn = []
    monkeypatch.setattr(
        "matplotlib.axes.Axes.fill_between", lambda axes, x, low, high, **look: drawn.append((low, high))
    )
    axis = Axis("accuracy, %", lambda value: f"{100 * value:.1f} %", 100, share=share)
    curves("a", [line(points=3, y=np.array([0.1, 0.5, 0.9]), deviation=np.full(3, 0.2))], ROUND, axis)
    ((low, high),) = drawn
    np.testing.assert_allclose(low, [0 if share else -10, 30, 70])
    np.testing.assert_allclose(high, [30, 70, 100 if share else 110])


def test_logarithmic_axes_say_so_and_have_some_ticks():
    axis = Axis("consensus error", lambda value: f"{value:.2g}", log=True)
    shown = texts(curves("a", [line(y=np.linspace(0.24, 0.05, 5))], ROUND, axis))
    assert "consensus error, log scale" in shown and {"0.05", "0.1", "0.2"} <= set(shown)


@pytest.mark.parametrize(("low", "high"), [(0.82, 1.3), (9, 11), (80, 120), (0.6, 1.6), (1.05, 2.9)])
def test_short_logarithmic_axes_have_two_ticks_or_more(low: float, high: float):
    axis = Axis("consensus error", lambda value: f"{value:.2g}", log=True)
    axes = curves("a", [line(points=2, y=np.array([low, high]))], ROUND, axis).figure.axes[0]
    (bottom, top), ticks = axes.get_ylim(), axes.get_yticks()
    assert 2 <= sum(bottom <= tick <= top for tick in ticks) <= 7


def test_logarithmic_axes_name_their_powers():
    axis = Axis("consensus error", lambda value: f"{value:.2g}", log=True)
    y = 10.0 ** -np.arange(1, 11)
    shown = texts(curves("a", [line(points=10, y=y, deviation=2 * y)], ROUND, axis))
    assert any(text.startswith("10⁻") for text in shown)
    assert "0.1" in shown or "0.01" in shown


@pytest.mark.parametrize("server", [True, False])
def test_a_graph_names_workers_and_leaves_out_those_without_values(server: bool):
    angle = np.linspace(0, 2 * np.pi, 5)[:4]
    places = np.stack([np.sin(angle), np.cos(angle)], axis=1)
    picture = graph("g", "DePRL", places, [(0, 1), (1, 2)], {0: 0.5, 3: 0.7}, (0.5, 0.7), ACCURACY.show, server=server)
    assert [text for _, _, text in picture.hover["points"]] == ["worker 0 · 50.0 %", "worker 3 · 70.0 %"]
    (x, y, _), *_ = picture.hover["points"]
    assert x == pytest.approx(0.5, abs=0.02)
    assert y < 0.3
    assert "lowest 50.0 %, highest 70.0 %" in picture.alt


def test_many_links_are_one_image():
    places = np.random.default_rng(0).normal(size=(80, 2))
    edges = [(i, j) for i in range(80) for j in range(i)]
    picture = graph("g", "full", places, edges, {0: 0.5}, (0, 1), ACCURACY.show)
    colour_bar, links = 1, 1
    assert picture.inline.count("<image") == colour_bar + links
    assert len(picture.inline) < 300_000


def test_a_map_knows_its_cells_and_skips_what_is_no_number():
    values = np.array([[1.0, 0.25], [np.nan, 1.0]])
    picture = similarity_map("m", "heads", values, (0.25, 1.0))
    cells = picture.hover["cells"]
    assert cells["values"] == [[1.0, 0.25], [None, 1.0]]
    left, top, right, bottom = cells["box"]
    assert 0 < left < right < 1
    assert 0 < top < bottom < 1
    assert json.loads(json.dumps(picture.hover, allow_nan=False)) == picture.hover
    assert similarity_map("m", "heads", np.eye(200), (0.0, 1.0)).hover == {}


def test_a_scale_of_values_that_are_one_stays_where_such_values_are() -> None:
    assert colour_ends([1.0, 1.0]) == pytest.approx((0.99, 1.0))
    assert colour_ends([0.0]) == pytest.approx((0.0, 0.01))
    assert colour_ends([0.2, float("nan"), 0.7]) == (0.2, 0.7)


def test_a_cosine_just_below_zero_is_no_minus_zero() -> None:
    picture = similarity_map("heads", "heads", np.array([[1.0, -0.004], [-0.004, 1.0]]), (-0.004, 1.0))
    assert "from 0.00 to 1.00" in picture.alt and b"-0.00<" not in picture.svg
    assert "-0.0" not in str(picture.hover)


def test_the_middle_of_a_wide_scale_is_not_rounded_away() -> None:
    assert {"−0.10", "0.45", "1.00"} <= set(texts(similarity_map("m", "heads", np.eye(2), (-0.1, 1.0))))


@given(st.lists(st.floats(-100, 100), max_size=12), st.floats(0.1, 10))
def test_spread_keeps_order_and_distance(values: list[float], gap: float) -> None:
    places = spread(values, gap)
    order = sorted(range(len(values)), key=values.__getitem__)
    for a, b in itertools.pairwise(order):
        assert places[b] - places[a] >= gap - 1e-9
    # Moving labels apart leaves their centre where it was.
    assert sum(places) == pytest.approx(sum(values), abs=1e-6)


def test_spread_leaves_alone_what_is_apart() -> None:
    assert spread([5.0, 1.0, 3.0], 1.5) == pytest.approx([5.0, 1.0, 3.0])
    assert spread([1.0, 1.0], 2.0) == pytest.approx([0.0, 2.0])


def test_variants_and_algorithms_of_ones_own_take_no_colour_from_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(REGISTRY, "mine", DePRL)
    assert colours_of(["deprl", "deprl", "fedrep", "fedrep", "local", "mine", "join"]) == [0, 1, 4, 2, 7, 3, 5]
    assert colours_of(["mine", "deprl"]) == [1, 0]
    assert sorted(colours_of(["deprl"] * 8)) == list(range(8))
    assert len(colours_of(["deprl"] * 20)) == 20
