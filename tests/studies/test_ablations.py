"""The ablations: what is drawn, and what stands in the table alone."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from manyheads.studies import get_study
from manyheads.studies.records import Records
from manyheads.studies.trial import PAPER


def test_a_single_number_of_head_epochs_makes_no_picture(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    size, records = replace(PAPER, seeds=(1,)), Records(tmp_path)
    for trial in get_study("tau").grid(size):
        if trial.place["tau"] == 2 or trial.data == "mobiact":
            records_lab.write(records, trial)
    text = get_study("tau").write(size, records, tmp_path).read_text()
    assert text.count("| 2 | 50.0 | 80.0 |") == 2
    assert [path.name for path in tmp_path.glob("*.svg")] == ["tau-mobiact.svg"]
