"""Sizes and times in words: where a unit ends and the next begins."""

import pytest

from manyheads.units import human_bytes, human_seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (99_949, "99.9 kB"), (99_951, "100 kB"), (999_499, "999 kB"),
     (999_501, "1.0 MB"), (12_345_678, "12.3 MB"), (134.6e9, "135 GB"), (999.6e9, "1.0 TB"), (2.5e15, "2500.0 TB")],
)  # fmt: skip
def test_human_bytes(count: float, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1:00 min"), (200, "3:20 min"),
     (3599.6, "1:00 h"), (7500, "2:05 h")],
)  # fmt: skip
def test_human_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text
