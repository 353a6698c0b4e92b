"""Lines of figures: what they are drawn through."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from manyheads.studies import get_study
from manyheads.studies.lines import across
from manyheads.studies.records import Records
from manyheads.studies.results import Results
from manyheads.studies.trial import PAPER


def test_a_line_goes_through_seeds_that_all_its_points_have(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    trials = [
        t for t in get_study("tau").grid(PAPER) if t.place["data"] == "mobiact" and t.place["algorithm"] == "deprl"
    ]
    records = Records(tmp_path)
    for trial in trials:
        tau, seed = trial.place["tau"], trial.place["seed"]
        if seed == 1 or (seed == 12 and tau == 2):
            records_lab.write(records, trial, 0.5 + 0.01 * tau + (0.2 if seed == 12 else 0.0))
    results = Results(trials, records)
    (line,) = across("DePRL", 0, results, "tau", "accuracy_mean")
    assert line.x.tolist() == [1, 2, 3, 4, 5]
    assert line.y.tolist() == pytest.approx([0.51, 0.52, 0.53, 0.54, 0.55])
    assert line.deviation is not None and not line.deviation.any()
    assert across("DePRL", 0, results, "tau", "accuracy_mean", algorithm="local") == []
