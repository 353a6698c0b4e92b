"""Lines of figures: what they are drawn through."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from manyheads.studies import get_study
from manyheads.studies.lines import ACCURACY, across, along
from manyheads.studies.records import Records
from manyheads.studies.results import Results
from manyheads.studies.trial import PAPER


@pytest.fixture
def results(tmp_path: Path, records_lab: SimpleNamespace) -> Results:
    """Of tau 1 to 4, with two seeds; of tau 2 with a third."""
    trials = [
        t for t in get_study("tau").grid(PAPER) if t.place["data"] == "mobiact" and t.place["algorithm"] == "deprl"
    ]
    records = Records(tmp_path)
    for trial in trials:
        tau, seed = trial.place["tau"], trial.place["seed"]
        if (tau < 5 and seed in (1, 12)) or (tau, seed) == (2, 123):
            records_lab.write(records, trial, 0.5 + 0.01 * tau + {1: 0.0, 12: 0.2, 123: 0.4}[seed])
    return Results(trials, records)


def test_a_line_goes_through_seeds_that_all_its_points_have(results: Results) -> None:
    (line,) = across("DePRL", 0, results, "tau", "accuracy_mean")
    assert line.x.tolist() == [1, 2, 3, 4]
    assert line.y.tolist() == pytest.approx([0.61, 0.62, 0.63, 0.64])
    assert line.deviation.tolist() == pytest.approx([0.2 / 2**0.5] * 4)
    (single,) = across("DePRL", 0, results, "tau", "accuracy_mean", seed=1)
    assert single.deviation.tolist() == [0] * 4
    assert across("DePRL", 0, results, "tau", "accuracy_mean", algorithm="local") == []
    assert across("DePRL", 0, results, "tau", "no_such_metric") == []


def test_a_line_along_the_rounds(results: Results) -> None:
    (line,) = along("DePRL", 0, results.runs(tau=1), "round", "accuracy_mean")
    assert line.x.tolist() == list(range(10, 101, 10))
    assert line.y[-1] == pytest.approx(0.61) and line.deviation[-1] == pytest.approx(0.2 / 2**0.5)
    assert (ACCURACY.show(line.y[-1]), ACCURACY.factor * line.y[-1]) == ("61.0 %", pytest.approx(61))
    assert along("DePRL", 0, [], "round", "accuracy_mean") == []
    assert along("DePRL", 0, results.runs(tau=1), "round", "no_such_metric") == []
