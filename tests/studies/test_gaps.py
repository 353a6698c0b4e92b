"""The picture of our numbers beside the paper's."""

from dataclasses import replace

from manyheads.studies.gaps import Gap, Panel, side_by_side

PANEL = Panel("Dirichlet 0.1", 74.0, [Gap("DePRL", 84.4, 1.2, 89.6), Gap("Local", 81.5, None, None)])


def test_says_what_it_shows() -> None:
    other = Panel("Dirichlet 0.5", None, [Gap("DePRL", None, None, 72.5), Gap("Local", None, None, None)])
    picture = side_by_side("cifar10", "CIFAR-10, VGG-11", [PANEL, other])
    assert picture.alt == (
        "CIFAR-10, VGG-11, accuracy in percent. Dirichlet 0.1: DePRL 84.4 (paper 89.6), Local 81.5. "
        "Dirichlet 0.5: DePRL not run (paper 72.5), Local not run."
    )
    text = picture.svg.decode()
    for word in ("CIFAR-10, VGG-11", "Dirichlet 0.1", "Dirichlet 0.5", "DePRL", "Local", "majority floor"):
        assert f">{word}<" in text
    assert text.count(">DePRL<") == 1, "methods are named once, at the left"


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
