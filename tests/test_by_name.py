"""A user's functions by name: the same run as with the functions themselves, and wrong names in one line."""

import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from manyheads.algorithms import DePRL
from manyheads.by_name import find_function
from manyheads.data.arrays import from_arrays
from manyheads.errors import UserError
from manyheads.experiment import FUNCTIONS, Experiment, Runtime
from manyheads.rounds import train
from manyheads.store import Run

FUNCTIONS_OF_A_USER = """
import torch
from torch import nn

def squared(output, target):
    return (output - target).square().sum(1)

def closeness(output, target):
    return -(output - target).abs().sum(1)

def noisy(inputs, generator):
    return inputs + 0.1 * torch.from_numpy(generator.normal(size=tuple(inputs.shape))).to(inputs)

class Squared:
    def __call__(self, output, target):
        return squared(output, target)

made, number = Squared(), 3
"""
NAMES = {"loss": "user_scores:squared", "metric": "user_scores:closeness", "transform": "user_scores:noisy"}


@pytest.fixture(autouse=True)
def scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "user_scores.py"
    file.write_text(FUNCTIONS_OF_A_USER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "user_scores", raising=False)
    return file


def regression(**own: object) -> Experiment:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4))
    data = from_arrays(x, x @ rng.normal(size=(4, 1)))
    return Experiment(algorithm=DePRL(), data=data, split="iid", workers=3, rounds=2, **own)  # pyright: ignore


def test_a_run_is_the_same_as_with_the_functions_themselves() -> None:
    given = {name: find_function("--" + name, spec) for name, spec in NAMES.items()}
    by_name, by_hand = (list(train(regression(**own))) for own in (NAMES, given))
    for one, other in zip(by_name, by_hand, strict=True):
        assert one.per_worker == other.per_worker and one.loss == other.loss
    assert by_name[-1].accuracy_mean < 0, "the metric of one's own, not an accuracy"
    assert by_name[-1].loss != list(train(regression(**NAMES | {"transform": None})))[-1].loss


def test_names_are_all_that_a_file_needs() -> None:
    experiment = regression(**NAMES)
    read = Experiment.from_json(experiment.to_json(), data=experiment.data)
    assert read.run_id == experiment.run_id and read.own("loss") is find_function("--loss", NAMES["loss"])
    assert regression(loss="user_scores:made").own("loss") is not None
    assert all(regression().own(name) is None for name in FUNCTIONS)


def test_nothing_is_imported_to_read_a_run(tmp_path: Path, scores: Path) -> None:
    experiment = regression(**NAMES)
    list(train(experiment, Runtime(out=tmp_path / "run")))
    scores.unlink()
    del sys.modules["user_scores"]
    run = Run.open(tmp_path / "run")
    assert run.description["loss"] == NAMES["loss"] and run.summary() is not None
    run.model(0)
    assert "user_scores" not in sys.modules


def test_other_code_under_the_same_name_does_not_go_on(tmp_path: Path, scores: Path) -> None:
    experiment, runtime = regression(**NAMES), Runtime(out=tmp_path / "run")
    list(train(experiment, runtime))
    scores.write_text(FUNCTIONS_OF_A_USER.replace("square()", "abs()"))
    del sys.modules["user_scores"]
    with pytest.raises(UserError, match="begun with different code in its loss"):
        list(train(replace(experiment, rounds=3), runtime))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("user_scores:squard", "--loss 'user_scores:squard': user_scores has no 'squard'. Did you mean 'squared'?"),
        ("user_scores:zzz", "user_scores has no 'zzz': name a function, or an object that can be called like one."),
        ("user_scores:Squared", "is a class: name a function"),
        ("user_scores:number", "is of type int: name a function"),
        ("not_there:squared", "or add that folder to PYTHONPATH."),
        (".user_scores:squared", "write the whole name of the module, as package.module:squared."),
        (":squared", "write the whole name of the module, as package.module:squared."),
        ("user_scores.py:squared", "write user_scores:squared, and start in the folder of that file."),
    ],
)
def test_a_wrong_name_is_refused_in_one_line_before_training(tmp_path: Path, spec: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        list(train(regression(loss=spec), Runtime(out=tmp_path / "run")))
    assert said in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_the_file_that_was_started_is_not_run_again(scores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second class of an algorithm that it registers would be refused, as one with the name of another."""
    started = ModuleType("__main__")
    started.__file__ = str(scores)
    exec(scores.read_text(), vars(started))
    monkeypatch.setitem(sys.modules, "__main__", started)
    assert find_function("--loss", NAMES["loss"]) is vars(started)["squared"]
    assert "user_scores" not in sys.modules
    other = find_function("--loss", "torch.nn.functional:mse_loss")
    assert other is torch.nn.functional.mse_loss


def test_what_is_no_name_is_refused_at_once() -> None:
    with pytest.raises(UserError, match=r"^--metric 'f1' is not package\.module:function: name one of yours"):
        regression(metric="f1")


def test_a_function_whose_shapes_broadcast_is_refused_in_one_line(recwarn: pytest.WarningsRecorder) -> None:
    """torch warns of it as well, in two lines more."""
    rng = np.random.default_rng(0)
    data = from_arrays(rng.normal(size=(30, 4)), rng.integers(3, size=30))
    with warnings.catch_warnings(), pytest.raises(UserError, match="the loss gives"):
        warnings.simplefilter("always")
        list(train(Experiment(data=data, split="iid", workers=3, rounds=1, loss="torch.nn.functional:mse_loss")))
    assert not recwarn.list
