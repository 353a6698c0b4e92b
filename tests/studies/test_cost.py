"""Estimates: more work takes longer, records are believed first, and the tables they are made of are right."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from manyheads.algorithms import DPSGD, DePRL
from manyheads.data import Dataset, load
from manyheads.models import build
from manyheads.new_workers import NewWorkers
from manyheads.studies import get_study
from manyheads.studies.cost import PARAMETERS, POOLS, Costs, total
from manyheads.studies.records import Records
from manyheads.studies.tables import STUDIES
from manyheads.studies.trial import PAPER, joined

SHAPES = {
    "mlp:64": ((1, 8, 8), 10),
    "dnn": ((900,), 6),
    "vgg11": ((3, 32, 32), 10),
    "resnet18": ((3, 32, 32), 100),
    "alexnet": ((1, 32, 32), 10),
}


@pytest.mark.parametrize("net", PARAMETERS)
def test_sizes_of_nets(net: str) -> None:
    shape, outputs = SHAPES[net]
    assert sum(p.numel() for p in build(net, shape, outputs).parameters()) == PARAMETERS[net]


def test_sizes_of_data() -> None:
    digits = load("digits")
    assert POOLS["digits"] == (len(digits.x_train), len(digits.x_test), digits.x_train[0].numel())


def test_data_in_memory_count_as_they_are(tmp_path: Path) -> None:
    """Those of the theory's problem are small: they were counted as if they were images."""
    trial = get_study("theory").grid(PAPER)[0]
    data = trial.experiment.data
    assert isinstance(data, Dataset)
    held = sum(x.nbytes for x in (data.x_train, data.x_test))
    assert Costs(tmp_path, "cpu")(trial).bytes == 5e8 + held


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_more_work_takes_longer(tmp_path: Path, device: str) -> None:
    costs = Costs(tmp_path, device)

    def seconds(algorithm: str | DePRL = "deprl", **changes: object) -> float:
        trial = PAPER.trial(algorithm, "cifar10", 0.1, seed=1, **changes)  # pyright: ignore[reportArgumentType]
        return costs(trial).seconds

    assert seconds() < seconds("d-psgd") < seconds("ditto")
    assert seconds() < seconds(DePRL(head_epochs=5))
    assert seconds(every=10) < seconds(every=1) < seconds(every=1, theory=True)
    assert seconds(DePRL(head_steps=2, body_steps=1)) < seconds()
    begins = 20 if device == "cuda" else 0
    assert seconds(rounds=50) - begins == pytest.approx((seconds() - begins) / 2)


def test_records_are_believed(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    records = Records(tmp_path)
    made, other = (PAPER.trial("deprl", "cifar10", 0.1, seed=seed) for seed in (1, 12))
    records_lab.write(records, made, seconds=300.0)
    on_cpu, on_gpu = Costs(records.folder, "cpu")(other), Costs(records.folder, "cuda")(other)
    assert (on_cpu.seconds, on_cpu.measured) == (pytest.approx(300.0), True)
    assert not on_gpu.measured
    both = total([on_cpu, on_gpu])
    assert both.seconds == on_cpu.seconds + on_gpu.seconds
    assert not both.measured


def test_records_that_do_not_say_how_often_they_were_evaluated_are_passed_over(
    tmp_path: Path, records_lab: SimpleNamespace
) -> None:
    records, trial = Records(tmp_path), PAPER.trial("deprl", "cifar10", 0.1, seed=1)
    records_lab.write(records, trial, seconds=300.0)
    path = records.path(trial) / "summary.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in said.items() if k != "evaluated_rounds"}))
    assert not Costs(records.folder, "cpu")(trial).measured
    path.write_text(json.dumps({**said, "evaluated_rounds": 10**6}))
    assert Costs(records.folder, "cpu")(trial).measured, "more of them than there are rounds count as all"


def test_a_measured_time_grows_with_the_work(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    """Of what is not training alone it does not: what is scored takes as long whatever is trained."""
    records = Records(tmp_path)
    records_lab.write(records, PAPER.trial(DPSGD(epochs=3), "mobiact", 0.3, seed=1), seconds=300.0)
    costs = Costs(records.folder, "cpu")
    found = [costs(PAPER.trial(DPSGD(epochs=epochs), "mobiact", 0.3, seed=1)) for epochs in (1, 2, 3, 4, 6)]
    assert all(one.measured for one in found)
    seconds = [one.seconds for one in found]
    assert seconds[2] == pytest.approx(300.0) and seconds == sorted(seconds)
    assert 1.9 * seconds[2] < seconds[4] < 2 * seconds[2]
    steps = costs(PAPER.trial(DPSGD(steps=2), "mobiact", 0.3, seed=1))
    seldom, often, theory = (
        costs(PAPER.trial(DPSGD(), "mobiact", 0.3, seed=1, every=every, theory=theory)).seconds
        for every, theory in ((20, False), (1, False), (1, True))
    )
    assert steps.seconds < seconds[2] and seldom < seconds[2] < often < theory


def test_a_run_that_new_workers_build_on_counts_once(tmp_path: Path) -> None:
    costs, source = Costs(tmp_path, "cpu"), PAPER.trial("deprl", "cifar10", 0.3, seed=1)
    new = [joined(source, NewWorkers(split=f"dirichlet:{a}")) for a in (0.1, 0.5)]
    run, first, second = (one.seconds for one in costs.of_all([source, *new]))
    assert run == costs(source).seconds
    assert 0 < first == second < run / 5
    assert [one.seconds for one in costs.of_all(new)] == [run + first, second]
    assert [one.seconds for one in costs.of_all([source, source])] == [run, run], "all else is made as often as asked"


def test_every_trial_of_the_tables_has_an_estimate(tmp_path: Path) -> None:
    costs, size = Costs(tmp_path, "cuda"), replace(PAPER, seeds=(1,))
    for study in STUDIES:
        assert all(costs(trial).seconds > 0 and costs(trial).bytes > 1e8 for trial in study.grid(size))
