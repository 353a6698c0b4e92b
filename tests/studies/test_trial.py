"""Trials: complete without data, called by what they are, told apart from records of other runs."""

import json
from dataclasses import replace

import pytest

from manyheads.algorithms import DePRL
from manyheads.data import load
from manyheads.errors import UserError
from manyheads.experiment import Runtime
from manyheads.new_workers import NewWorkers
from manyheads.session import open_session
from manyheads.studies import get_study
from manyheads.studies.trial import PAPER, QUICK, joined, only, without_repeats

TRIAL = PAPER.trial("deprl", "cifar10", 0.1, seed=1)


def test_the_papers_settings() -> None:
    experiment = TRIAL.experiment
    assert (experiment.workers, experiment.rounds, experiment.validation) == (128, 100, 0.0)
    assert (experiment.model, experiment.batch_size) == ("vgg11", 16)
    assert (experiment.lr, experiment.head_lr, experiment.decay, experiment.weight_decay) == (0.01, 0.005, 0.96, 1e-5)
    assert experiment.algorithm == DePRL(head_epochs=2, body_epochs=1)
    assert PAPER.trial("deprl", "cifar100", 0.1, seed=1).experiment.batch_size == 128
    small = PAPER.trial("deprl", "cifar10", 0.1, seed=1, workers=4, rounds=7)
    assert (small.experiment.workers, small.rounds, small.every) == (4, 7, 7)
    assert PAPER.trial("fedavg", "cifar10", 0.1, graph="ring", seed=1).experiment.graph == "server"
    assert PAPER.trial("deprl", "cifar10", 0.1, graph="random", seed=1).experiment.graph == "random:0.25"


def test_an_experiment_is_completed_as_a_session_would() -> None:
    trial = QUICK.trial("dispfl", "digits", 0.3, seed=1)
    session = open_session(trial.experiment, Runtime(device="cpu", threads=1))
    assert session.experiment == trial.experiment
    assert load("digits").x_train.shape[0] == 1438


def test_names_say_what_runs() -> None:
    assert TRIAL.name == "cifar10-deprl-dirichlet0.1-ring-128-seed1"
    other = PAPER.trial(DePRL(order="mix-train"), "cifar10", "0.1:uncapped", seed=12, head="fc9", decay=1.0)
    name = "cifar10-deprl-dirichlet0.1uncapped-ring-128-decay1.0-headfc9-ordermix-train-seed12"
    assert other.name == name
    new = joined(TRIAL, NewWorkers(workers=64, split="dirichlet:0.5"), dirichlet=0.5)
    assert new.name == f"{TRIAL.name}-new64-dirichlet0.5"
    assert new.source.name == TRIAL.name
    assert (new.rounds, new.source.rounds) == (110, 100)
    assert replace(TRIAL, every=1).name == TRIAL.name


def test_a_record_fits_if_it_is_of_the_same_run() -> None:
    stored = json.loads(TRIAL.experiment.to_json())
    assert TRIAL.fits(stored)
    assert TRIAL.fits({**stored, "precision": "bf16", "step_seconds": 9.0})
    # As a record would look that is older than an option.
    assert TRIAL.fits({name: value for name, value in stored.items() if name != "link_latency"})
    for change in ({"seed": 2}, {"split": "dirichlet:0.3"}, {"rounds": 50}, {"lr": 0.1}):
        assert not TRIAL.fits({**stored, **change})
    assert not TRIAL.fits({**stored, "algorithm": {**stored["algorithm"], "head_epochs": 3}})
    assert not TRIAL.fits({**stored, "algorithm": {"name": "d-psgd"}})
    # Arrays that another machine has rounded in its way.
    on_arrays = get_study("theory").grid(QUICK)[0]
    stored = json.loads(on_arrays.experiment.to_json())
    assert on_arrays.fits({**stored, "data": {**stored["data"], "sha256": "0" * 64}})


def test_a_record_of_new_workers_fits_by_what_they_hold() -> None:
    new = joined(TRIAL, NewWorkers(workers=64, split="dirichlet:0.5"))
    stored = json.loads(TRIAL.experiment.to_json())
    theirs = {"algorithm": {"name": "join"}, "workers": 64, "split": "dirichlet:0.5", "rounds": 10, "seed": 77}
    assert new.fits({**stored, **theirs, "graph": "none", "decay": 1.0})
    assert not new.fits({**stored, **theirs, "workers": 32})
    assert not new.fits({**stored, **theirs, "model": "cnn"})


def test_only_what_was_asked_for() -> None:
    trials = [PAPER.trial(name, "cifar10", 0.1, seed=seed) for name in ("deprl", "d-psgd", "local") for seed in (1, 12)]
    kept = only(trials, ["algorithm=deprl,local", "seed=12"])
    assert [(trial.place["algorithm"], trial.place["seed"]) for trial in kept] == [("deprl", 12), ("local", 12)]
    assert only(trials, ["seed=1", "algorithm=deprl", "seed=12"]) == trials[:2], "a key twice is either"
    for wrong in ("colour=red", "seed", "seed=2", "seed="):
        with pytest.raises(UserError, match=wrong):
            only(trials, [wrong])


def test_a_run_that_several_want_is_made_once_and_shows_all() -> None:
    (one,) = without_repeats([TRIAL, replace(TRIAL, every=2), replace(TRIAL, similarity=True)])
    assert (one.every, one.similarity, one.theory) == (2, True, False)


def test_new_workers_build_on_the_run_that_others_look_at_more_closely() -> None:
    new = replace(TRIAL, new=NewWorkers(workers=4))
    closely = replace(TRIAL, every=2, theory=True, similarity=True)
    one, theirs = without_repeats([new, closely])
    assert theirs.new is None and one.new is not None and not one.similarity, "similarities are of the run's workers"
    assert (one.source.every, one.source.theory) == (theirs.every, theirs.theory) == (2, True)
