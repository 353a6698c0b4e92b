"""JSON files that were cut or overwritten at any place are read as far as they are whole."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.store.layout import read_description, read_lines, read_object


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"null"])
def test_what_is_no_object_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.json"
    assert read_object(path) is None
    path.write_bytes(content)
    assert read_object(path) is None
    path.write_bytes(b'{"round": 1}')
    assert read_object(path) == {"round": 1}


def test_a_description_is_an_experiments(tmp_path: Path, shelf) -> None:
    path, whole = tmp_path / "experiment.json", shelf.experiment.describe()
    for damaged in ({}, {**whole, "algorithm": "deprl"}, {**whole, "algorithm": {}}, {**whole, "rounds": None}):
        path.write_text(json.dumps(damaged))
        assert read_description(path) is None
    path.write_text(json.dumps({**whole, "data": {"kind": "arrays"}}))
    assert read_description(path) == {**whole, "data": {"kind": "arrays"}}


@given(rounds=st.lists(st.integers(0, 999), max_size=5), cut=st.integers(0, 80))
def test_a_file_that_was_cut_gives_its_whole_lines(tmp_path_factory, rounds: list[int], cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "file.jsonl"
    lines = [json.dumps({"round": round}).encode() + b"\n" for round in rounds]
    path.write_bytes(b"".join(lines)[:cut])
    found = list(read_lines(path))
    assert b"".join(line for line, _ in found) == path.read_bytes()
    whole = path.read_bytes().count(b"\n")
    assert [record and record["round"] for _, record in found] == rounds[:whole] + [None] * (len(found) - whole)


def test_a_line_without_a_round_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    assert list(read_lines(path)) == []
    path.write_bytes(b'[2]\n{"loss": 1}\n\xff\n{"round": 3}\n')
    assert [record for _, record in read_lines(path)] == [None, None, None, {"round": 3}]
