"""Sizes, times and numbers in words: where a unit ends and the next begins, and how fine a deviation is."""

import pytest

from manyheads.units import (
    alike,
    counted,
    human_bytes,
    human_seconds,
    no_finer,
    numbered,
    plural,
    plus_minus,
    short,
    some,
)


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
     (3599.6, "1:00 h"), (7500, "2:05 h"), (172_799, "47:59 h"), (172_800, "2.0 days"), (5.8e7, "671.3 days")],
)  # fmt: skip
def test_human_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.05586, "0.0559"), (-0.05, "-0.0500"), (0.0, "0"), (12.0, "12.0"), (100.2, "100"), (1.98e-6, "1.98e-06")],
)
def test_a_number_has_three_digits_of_whatever_size_it_is(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    ("values", "texts"),
    [([-0.641, -1.13], ["-0.641", "-1.130"]), ([0.0, 64.1, 1210], ["0.0", "64.1", "1210.0"]),
     ([120, 3456], ["120", "3456"]), ([1.2e-6, 3.4], ["1.20e-06", "3.40"]), ([0.5, 2e6], ["0.500", "2.00e+06"]),
     ([0.5, -0.0001], ["0.500000", "-0.000100"]), ([0.0], ["0.00"]), ([], [])],
)  # fmt: skip
def test_the_numbers_of_a_column_have_one_number_of_decimals(values: list[float], texts: list[str]) -> None:
    assert [alike(values)(value) for value in values] == texts


@pytest.mark.parametrize(
    ("mean", "deviation", "text"),
    [("0.0559", "0.000437", "0.0004"), ("-0.0500", "0.0312", "0.0312"), ("100", "3.26", "3"),
     ("12.3", "4.1e-09", "0.0"),
     ("0.00213", "1.41e-05", "0.00001"), ("1.98e-06", "1.41e-08", "0.01e-06"), ("90.0 %", "1.4 %", "1.4 %"),
     ("100 kB", "3.2 kB", "3 kB"), ("1.2 MB", "30.1 kB", "30.1 kB"), ("1:23 min", "0.4 s", "0.4 s"),
     ("1:23 min", "1:05 min", "1:05 min"), ("0.00496", "0.0413", "0.0413"), ("1.23e-05", "0.200", "0.200")],
)  # fmt: skip
def test_a_deviation_is_no_finer_than_its_mean(mean: str, deviation: str, text: str) -> None:
    assert no_finer(deviation, mean) == text


def test_a_mean_stands_alone_where_it_has_no_deviation() -> None:
    assert plus_minus(0.0559, 0.000437, short) == "0.0559 ± 0.0004"
    assert plus_minus(0.0559, 0.0, short) == "0.0559 ± 0"
    assert plus_minus(0.0559, None, short) == "0.0559"
    assert plus_minus(1.3, 0.8, human_seconds) == "1.3 ± 0.8 s", "a unit that both have is said once"
    assert plus_minus(61, 3, human_seconds) == "1:01 min ± 3.0 s"
    assert plus_minus(1_730_000, 20_000, human_bytes) == "1.7 MB ± 20.0 kB"


@pytest.mark.parametrize(("noun", "several"), [("round", "rounds"), ("process", "processes"), ("batch", "batches")])
def test_one_is_called_otherwise_than_several(noun: str, several: str) -> None:
    assert [plural(noun, count) for count in (0, 1, 2)] == [several, noun, several]
    assert [counted(count, noun) for count in (1, 2)] == [f"1 {noun}", f"2 {several}"]


def test_of_many_names_the_first_are_given() -> None:
    assert [some("abcde"[:count]) for count in (0, 1, 3, 5)] == ["", "a", "a, b, c", "a, b, c, 2 more"]
    assert some("abcd", between="; ") == "a; b; c; 1 more"


def test_many_numbers_are_given_by_their_ends() -> None:
    numbers = [[3], [0, 1, 2], [*range(1000), 1001, 1003], range(0, 100, 2)]
    assert [numbered("worker", each) for each in numbers[:3]] == [
        "worker 3",
        "workers 0, 1, 2",
        "workers 0 to 999, 1001, 1003",
    ]
    assert numbered("process", numbers[3]).endswith("36, 38, 30 more")
    # The rest are counted one by one, whatever stretches they make.
    assert numbered("process", [*range(0, 40, 2), *range(100, 200)]).endswith("36, 38, 100 more")
