"""What a run came to, as text."""

import re

import pytest

from manyheads.cli import text

SUMMARY = {
    "rounds": 3, "algorithm": "deprl", "accuracy_mean": 0.912, "accuracy_std": 0.034, "accuracy_worst10": 0.8,
    "accuracy_before_mixing": 0.9, "majority_floor": 0.4, "workers_without_test": 0, "consensus_error": 0.0123,
    "bytes_sent_per_worker": 1234567.0, "seconds": 83.0,
}  # fmt: skip


def test_facts_and_table_align() -> None:
    assert text.facts([("a", "1"), ("long", "2")]) == "a     1\nlong  2"
    lines = text.table([("x", "")], [("row", "1"), ("r", "1000")]).splitlines()
    assert lines == ["x", "───  ────", "row     1", "r    1000"]


def test_columns_of_words_are_read_from_the_left() -> None:
    body = [["DePRL", "ring", "1"], ["", "", ""], ["D-PSGD", "full", "10"]]
    assert text.table([["", "graph", "points"]], body, 2).splitlines() == [
        "        graph  points",
        "──────  ─────  ──────",
        "DePRL   ring        1",
        "",
        "D-PSGD  full       10",
    ]


def test_summary_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    table = text.summary_table(SUMMARY)
    cells = ["deprl", "91.2 % ± 3.4", "80.0 %", "90.0 %", "40.0 %", "0.0123", "1.2 MB", "1:23 min"]
    assert re.split(r"\s{2,}", table.splitlines()[-1]) == cells
    assert "–" in text.summary_table({**SUMMARY, "consensus_error": None})
    assert max(map(len, table.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "60")
    narrow = [re.split(r"\s{2,}", line) for line in text.summary_table(SUMMARY).splitlines()]
    assert [value for _, value in narrow] == cells
    assert narrow[2][0] == "worst tenth"


def test_where_nobody_sends_anything_no_mixing_is_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {**SUMMARY, "algorithm": "local", "bytes_sent_per_worker": 0.0}
    for width in ("80", "40"):
        monkeypatch.setenv("COLUMNS", width)
        table = text.summary_table(values)
        assert "mixing" not in table and "consensus" not in table
        assert "91.2 % ± 3.4" in table and "0 B" in table


@pytest.mark.parametrize(("count", "said"), [(1, "1 worker left out"), (2, "2 workers left out")])
def test_means_over_fewer_workers_say_so(monkeypatch: pytest.MonkeyPatch, count: int, said: str) -> None:
    values = {**SUMMARY, "workers_without_test": count}
    for width in ("80", "60"):
        monkeypatch.setenv("COLUMNS", width)
        assert text.summary_table(values).endswith(f"\n\n{said} of these means: no test samples, or away.")
    assert text.summary_line(values).startswith(f"deprl: accuracy 91.2 % ({said}), worst tenth")
    assert "left out" not in text.summary_table(SUMMARY) + text.summary_line(SUMMARY)


def test_a_regression_has_no_percentages() -> None:
    values = {**SUMMARY, "majority_floor": None, "accuracy_mean": -0.1234567, "accuracy_std": 0.000437}
    table = text.summary_table(values)
    assert "-0.1235 ± 0.0004" in table and "0.0004" in table.split()
    assert "%" not in table and "accuracy" not in table and "score" in table
    assert text.summary_line(values).startswith("deprl: score -0.1235, ")


@pytest.mark.parametrize("nothing", [None, float("nan")], ids=str)
def test_where_nobody_has_test_samples_there_is_no_score(
    monkeypatch: pytest.MonkeyPatch, nothing: float | None
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    scores = dict.fromkeys(("accuracy_mean", "accuracy_std", "accuracy_worst10", "accuracy_before_mixing"), nothing)
    values = {**SUMMARY, **scores, "majority_floor": None, "workers_without_test": 3}
    row, _, said = text.summary_table(values).splitlines()[-3:]
    assert row.split()[:5] == ["deprl", "–", "–", "–", "–"]
    assert said == "No worker here has test samples, so there is no score."
    assert text.summary_line(values) == "deprl: no test samples, 3 rounds, 1:23 min"


def test_a_score_that_is_no_number_is_not_taken_for_missing_samples() -> None:
    values = {**SUMMARY, "majority_floor": None, "accuracy_mean": float("nan")}
    assert text.outcome(values) == "score –" and "Nobody" not in text.summary_table(values)
