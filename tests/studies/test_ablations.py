"""The ablations: what is drawn, and what stands in the table alone."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from manyheads.drawing import COLOURS
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
    assert "On a ring, FedRep with a server; Dirichlet 0.3." in text
    assert [path.name for path in tmp_path.glob("*.svg")] == ["tau-mobiact.svg"]


def test_an_algorithm_has_its_colour_whoever_is_beside_it(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    size = replace(PAPER, seeds=(1,))
    for name in ("tau", "curves", "table5"):
        records = Records(tmp_path / name)
        for trial in get_study(name).grid(size):
            if trial.place["algorithm"] in ("deprl", "dispfl"):
                records_lab.write(records, trial)
        get_study(name).write(size, records, tmp_path / name)
        for picture in (tmp_path / name).glob("*.svg"):
            text = picture.read_text().upper()
            assert {place for place, colour in enumerate(COLOURS) if f"STROKE: {colour}" in text} == {0, 2}, picture
