from pathlib import Path

import pytest

from manyheads.json_text import fits, parse_json, read_json, to_json, write_json

COUNT = range(2**63)


def test_json_holds_no_number_that_is_not_finite() -> None:
    value = {"a": [1.5, float("nan")], "b": {"c": (float("inf"), -2)}, "d": None, "e": True}
    assert to_json(value) == '{"a": [1.5, null], "b": {"c": [null, -2]}, "d": null, "e": true}'


def test_what_is_written_is_read(tmp_path: Path) -> None:
    value = {"a": [1.5, None], "ä": {"c": "\N{SNOWMAN}"}, "n": 2**60}
    write_json(tmp_path / "t.json", value)
    assert read_json(tmp_path / "t.json") == value
    assert read_json(tmp_path / "missing.json") is None and read_json(tmp_path) is None


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[NaN]", b"[-Infinity]", b'"\\ud800"', b"[" * 100_000], ids=repr)
def test_what_is_never_written_is_damaged(text: bytes) -> None:
    assert parse_json(text) is None


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (str, ["", "a"], [None, 1, ["a"]]),
        (float, [0, -1.5, 10**300], [True, "1", None, float("inf"), 10**400]),
        (COUNT, [0, 2**63 - 1], [-1, 2**63, 1.0, True, "1", None]),
        ([COUNT], [[], [0, 3]], [[0, -1], [0.5], {"0": 0}, 3, None]),
        ({"a": str}, [{"a": "x"}], [{}, {"a": 1}, {"a": "x", "b": "y"}, ["a"], None]),
        ((float, type(None)), [1, None], ["1", [], False]),
        ([{"a": ([str], COUNT)}], [[{"a": ["x"]}, {"a": 3}]], [[{"a": [3]}], [{"a": -3}]]),
    ],
)
def test_values_fit_their_kind(kind: object, good: list[object], bad: list[object]) -> None:
    assert [fits(value, kind) for value in good] == [True] * len(good)
    assert [fits(value, kind) for value in bad] == [False] * len(bad)
