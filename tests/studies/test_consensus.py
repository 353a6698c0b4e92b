"""The consensus study: its controls beside the runs as the paper is read."""

from pathlib import Path
from types import SimpleNamespace

from manyheads.studies import get_study
from manyheads.studies.records import Records
from manyheads.studies.trial import PAPER


def test_a_picture_for_each_control_that_was_run(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    records = Records(tmp_path)
    as_read = {("cifar10", "as read", 1), ("mobiact", "as read", 1), ("mobiact", "as read", 12)}
    made = {*as_read, ("mobiact", "random heads", 1)}
    for trial in get_study("consensus").grid(PAPER):
        if (trial.data, trial.place["variant"], trial.place["seed"]) in made and trial.place["dirichlet"] == 0.1:
            records_lab.write(records, trial)
    page = get_study("consensus").write(PAPER, records, tmp_path).read_text()
    assert "(consensus-cifar10.svg)" in page and "(consensus-mobiact-random-heads.svg)" in page
    assert "constant-rate.svg" not in page and "DePRL on a ring" in page
    rows = [line.split(" | ")[1:4] for line in page.splitlines() if line.startswith("| MobiAct")]
    assert rows == [["0.1", "as read", "2"], ["0.1", "random heads", "1"]]
