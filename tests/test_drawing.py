"""The colours of all pictures; the rest is tested through the pictures themselves."""

import re
from importlib import resources
from itertools import combinations

import numpy as np
import pytest

from manyheads.drawing import COLOURS

SIGHTS = {
    "all cones": np.eye(3),
    "no L cones": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no M cones": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no S cones": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""What is left of linear red, green and blue (Machado, Oliveira and Fernandes, 2009)."""

TO_LMS = [[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]
TO_LAB = [[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]]
"""Oklab, in which equal distances look about equally large."""


def page_colours() -> list[list[str]]:
    """The colours of the report's lines in light, in dark and on paper."""
    style = (resources.files("manyheads.report") / "page.css").read_text()
    found = re.findall(r"--c\d: (#[0-9a-f]{6});", style)
    return [found[start : start + 8] for start in (0, 8, 16)]


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("sight", SIGHTS)
def test_everybody_can_tell_the_colours_apart(sight: str) -> None:
    for colours in page_colours()[:2]:
        seen = [np.clip(SIGHTS[sight] @ linear(colour), 0, 1) for colour in colours]
        places = [TO_LAB @ np.cbrt(TO_LMS @ light) for light in seen]
        nearest = min(combinations(range(8), 2), key=lambda pair: np.linalg.norm(places[pair[0]] - places[pair[1]]))
        distance = np.linalg.norm(places[nearest[0]] - places[nearest[1]])
        assert distance > (0.12 if sight == "all cones" else 0.07), [colours[i] for i in nearest]


def test_files_have_the_colours_of_the_page_in_light() -> None:
    """And so its contrast on white."""
    light, _, print_ = page_colours()
    assert light == print_ == [colour.lower() for colour in COLOURS]
