"""JSON files that were cut or overwritten at any place are read as far as they are whole."""

import errno
import json
import math
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.store.layout import read_description, read_lines, read_object


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"null", b"[" * 100_000])
def test_what_is_no_object_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.json"
    assert read_object(path) is None
    path.write_bytes(content)
    assert read_object(path) is None
    path.write_bytes(b'{"round": 1}')
    assert read_object(path) == {"round": 1}


def test_what_nobody_may_read_is_not_taken_for_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        # As for anybody but root after chmod 000.
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(PermissionError, match=r"experiment\.json"):
        read_description(tmp_path / "experiment.json")


def test_a_description_is_an_experiments(tmp_path: Path, shelf) -> None:
    path, whole = tmp_path / "experiment.json", shelf.experiment.describe()
    lacking = [{key: value for key, value in whole.items() if key != name} for name in ("model", "relabel", "norm")]
    for damaged in ({}, {**whole, "algorithm": "deprl"}, {**whole, "algorithm": {}}, {**whole, "clip": None}, *lacking):
        path.write_text(json.dumps(damaged))
        with shelf.refused(path, r"experiment\.json is damaged or not a manyheads experiment: put it back"):
            read_description(path)
    # Objects, algorithms of the user's own, one worker by itself, and what a later version may add.
    for good in (
        {**whole, "data": {"kind": "arrays"}, "loss": {"kind": "function mine.loss"}},
        {**whole, "algorithm": {"name": "mine", "every": 3}, "workers": 1, "later": [1]},
    ):
        path.write_text(json.dumps(good))
        assert read_description(path) == good


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("workers", "8", "--workers '8' is of the wrong type: give int"),
        ("lr", -1.0, "--lr -1.0 is not positive"),
        ("norm", "none", "unknown --norm 'none'"),
        ("link_failure", [0.5], "--link-failure (list) is of the wrong type"),
        ("weights", {"kind": "module"}, "unknown --weights '(dict)'"),
    ],
)
def test_a_description_that_was_edited_says_what_is_wrong(
    tmp_path: Path, shelf, name: str, value: object, said: str
) -> None:
    path = tmp_path / "experiment.json"
    path.write_text(json.dumps({**shelf.experiment.describe(), name: value}))
    with shelf.refused(path, re.escape(f"{path}: {said}")):
        read_description(path)


def test_a_record_that_was_edited_is_damaged(tmp_path: Path, shelf) -> None:
    directory, record = shelf.start(tmp_path), shelf.record(1, consensus_error=math.nan)
    directory.append(record)
    directory.finish(record, {"runtime": {}})
    # The second is newer than some records.
    optional = ("runtime", "accuracy_by_samples")
    for name, read in (("summary.json", read_object), ("metrics.jsonl", lambda path: next(read_lines(path))[1])):
        path = tmp_path / name
        whole = json.loads(path.read_text())
        assert read(path) == whole
        for key in whole:
            lacking = {other: value for other, value in whole.items() if other != key}
            # The last two: what no float holds, and half a character, which no report could be written with.
            values = [[1], math.nan, math.inf, True, 10**400, "\ud800"]
            for damaged in (*({**whole, key: it} for it in values), *([lacking] if key not in optional else [])):
                path.write_text(json.dumps(damaged) + "\n")
                assert read(path) is None, damaged
        for key in ("workers_without_test", "bytes_on_wire"):
            path.write_text(json.dumps({**whole, key: -1}) + "\n")
            assert read(path) is None, key


@given(rounds=st.lists(st.integers(0, 999), max_size=5), cut=st.integers(0, 80))
def test_a_file_that_was_cut_gives_its_whole_lines(tmp_path_factory, rounds: list[int], cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "workers.jsonl"
    lines = [json.dumps({"round": round}).encode() + b"\n" for round in rounds]
    path.write_bytes(b"".join(lines)[:cut])
    found = list(read_lines(path))
    assert b"".join(line for line, _ in found) == path.read_bytes()
    whole = path.read_bytes().count(b"\n")
    assert [record and record["round"] for _, record in found] == rounds[:whole] + [None] * (len(found) - whole)


def test_a_line_without_a_round_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "workers.jsonl"
    assert list(read_lines(path)) == []
    path.write_bytes(b'[2]\n{"loss": 1}\n\xff\n{"round": 3}\n')
    assert [record for _, record in read_lines(path)] == [None, None, None, {"round": 3}]
