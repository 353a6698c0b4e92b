"""The picture of our numbers beside the paper's."""

from dataclasses import replace

from manyheads.studies.gaps import Gap, Panel, side_by_side

PANEL = Panel("Dirichlet 0.1", 74.0, [Gap("DePRL", 84.4, 1.2, 89.6), Gap("Local", 81.5, None, None)])


def test_says_what_it_shows() -> None:
    other = Panel("Dirichlet 0.5", None, [Gap("DePRL", None, None, 72.5), Gap("Local", None, None, None)])
    picture = side_by_side("cifar10", "CIFAR-10, VGG-11", [PANEL, other])
    assert picture.alt == (
        "CIFAR-10, VGG-11, accuracy in percent. Dirichlet 0.1 (majority floor 74.0): DePRL 84.4 (paper 89.6), "
        "Local 81.5. "
        "Dirichlet 0.5: DePRL not run (paper 72.5), Local not run."
    )
    text = picture.svg.decode()
    for word in (
        "CIFAR-10, VGG-11: accuracy, %",
        "ours ± deviation over seeds",
        "Dirichlet 0.1",
        "Dirichlet 0.5",
        "DePRL",
        "Local",
        "majority floor",
    ):
        assert f">{word}<" in text
    assert text.count(">DePRL<") == 1, "methods are named once, at the left"


def test_numbers_on_other_data_are_not_joined_to_ours() -> None:
    for data, joined in (("", 1), ("HARBox", 0)):
        picture = side_by_side("p", "t", [replace(PANEL, floor=None)], papers_data=data)
        assert sum(line.get_linestyle() == "-" for line in picture.figure.axes[0].lines) == joined
        assert ("the paper's on HARBox" in picture.alt) == bool(data)
        assert (">the paper's on HARBox<" in picture.svg.decode()) == bool(data)


def test_a_ring_alone_is_explained() -> None:
    alone = replace(PANEL, gaps=[Gap("DePRL", None, None, 72.5), PANEL.gaps[1]])
    for panel, said in ((PANEL, False), (alone, True)):
        assert ("(alone: we have not run it)" in side_by_side("p", "t", [panel]).svg.decode()) == said


def test_every_number_changes_the_picture() -> None:
    first, second = PANEL.gaps
    drawn = {
        side_by_side("p", "t", [panel]).svg
        for panel in (
            PANEL,
            replace(PANEL, floor=50.0),
            replace(PANEL, gaps=[replace(first, ours=80.0), second]),
            replace(PANEL, gaps=[replace(first, deviation=3.0), second]),
            replace(PANEL, gaps=[replace(first, paper=80.0), second]),
        )
    }
    assert len(drawn) == 5
    assert side_by_side("p", "t", [PANEL]).svg in drawn, "the same numbers are the same file"


def test_panels_have_one_scale_that_holds_every_number() -> None:
    other = Panel("Dirichlet 0.5", 42.0, [Gap("DePRL", 64.4, 3.0, 72.5), Gap("Local", 97.0, 2.0, None)])
    ends = {axes.get_xlim() for axes in side_by_side("p", "t", [PANEL, other]).figure.axes}
    ((low, high),) = ends
    assert low < 42 and high > 99
    for gap, least, most in (
        (Gap("DePRL", 50.0, 10.0, None), 40, 60),
        (Gap("DePRL", 50.0, None, 70.0), 50, 70),
        (Gap("DePRL", 50.0, None, None), 50, 50),
    ):
        (axes,) = side_by_side("p", "t", [Panel("one", None, [gap])]).figure.axes
        assert axes.get_xlim()[0] < least and axes.get_xlim()[1] > most


def test_where_both_are_the_same_both_are_seen() -> None:
    same = Panel("Dirichlet 0.3", None, [Gap("D-PSGD", 59.2, None, 59.2)])
    dots = [line for line in side_by_side("p", "t", [same]).figure.axes[0].lines if line.get_marker() == "o"]
    ours, papers = sorted(dots, key=lambda line: line.get_markersize())
    assert papers.get_markersize() > ours.get_markersize() + 2 and ours.get_zorder() > papers.get_zorder()
    (legend,) = side_by_side("p", "t", [same]).figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ours", "the paper's"]
