"""Presets: valid for every algorithm, what the papers and the release say, and plain values in the end."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from manyheads.algorithms import REGISTRY
from manyheads.algorithms.d_psgd import DPSGD
from manyheads.cli.options import add_options, experiments
from manyheads.cli.parser import Parser
from manyheads.errors import UserError
from manyheads.experiment import Experiment
from manyheads.presets import AUTHORS, PRESETS, Preset, apply


def _parse(*words: str) -> Experiment:
    parser = Parser(prog="test")
    add_options(parser)
    (experiment,) = experiments(parser.parse(words))
    return experiment


def test_an_algorithm_has_both_or_none() -> None:
    assert list(PRESETS) == ["recipe", "original", "authors"]
    assert PRESETS["original"].keys() == PRESETS["authors"].keys() <= REGISTRY.keys()


@pytest.mark.parametrize(
    ("preset", "name"), [(preset, name) for preset in PRESETS for name in PRESETS[preset] or REGISTRY]
)
def test_a_preset_becomes_plain_values(preset: str, name: str) -> None:
    before = Experiment(algorithm=REGISTRY[name](), workers=5, split="iid", graph="full", rounds=7, seed=3)
    after = apply(preset, before)
    assert Experiment.from_json(after.to_json()) == after
    shared = ("data", "model", "head", "workers", "split", "graph", "rounds", "seed", "relabel", "validation")
    assert [getattr(after, field) for field in shared] == [getattr(before, field) for field in shared]
    if preset == "recipe":
        assert after == before
    assert _parse(name, "--preset", preset) == apply(preset, Experiment(algorithm=REGISTRY[name]()))


@pytest.mark.parametrize(
    ("preset", "name", "values"),
    [
        ("original", "deprl", {"lr": 0.01, "head_lr": 0.005, "decay": 0.96, "head_epochs": 2, "body_epochs": 1}),
        ("original", "d-psgd", {"steps": 1, "momentum": 0.0}),
        ("original", "dispfl", {"lr": 0.1, "decay": 0.998, "epochs": 5, "density": 0.5, "batch_size": 128}),
        ("original", "fedrep", {"head_epochs": 10, "momentum": 0.5, "participation": 0.1, "weighting": "uniform"}),
        ("original", "ditto", {"lr": 0.05, "steps": 2, "lam": 1.0}),
        ("authors", "deprl", {"lr": 0.01, "head_lr": 0.01, "head_epochs": 3, "order": "mix-train"}),
        ("authors", "dispfl", {"density": 0.8, "sparsity": "uniform", "momentum": 0.9}),
    ],
)
def test_values(preset: str, name: str, values: dict[str, Any]) -> None:
    experiment = _parse(name, "--preset", preset)
    found = {**experiment.describe(), **experiment.describe()["algorithm"]}
    assert {field: found[field] for field in values} == values


def test_an_algorithm_of_ones_own_needs_values_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mine(DPSGD):
        name: ClassVar[str] = "mine"
        title: ClassVar[str] = "Mine"

    monkeypatch.setitem(REGISTRY, "mine", Mine)
    assert _parse("mine", "--preset", "recipe") == _parse("mine")
    with pytest.raises(UserError, match=r"^mine has no values in --preset authors: leave it out, or put a Preset into"):
        _parse("mine", "--preset", "authors")
    monkeypatch.setitem(AUTHORS, "mine", Preset({"lr": 0.3}, {"epochs": 2}))
    assert _parse("mine", "--preset", "authors") == _parse("mine", "--lr", "0.3", "--epochs", "2")


def test_what_the_user_gives_goes_first() -> None:
    changed = _parse("fedrep", "--preset", "original", "--lr", "0.5", "--head-epochs", "4", "--participation", "1")
    assert (changed.lr, changed.momentum, changed.batch_size) == (0.5, 0.5, 10)
    assert changed.algorithm == REGISTRY["fedrep"](head_epochs=4, weighting="uniform")  # pyright: ignore[reportCallIssue]


def test_passes_and_steps_take_each_others_place() -> None:
    assert _parse("ditto", "--preset", "original", "--epochs", "1").describe()["algorithm"]["steps"] is None
    steps = _parse("fedrep", "--preset", "original", "--head-steps", "5").describe()["algorithm"]
    assert (steps["head_steps"], steps["body_epochs"]) == (5, 1)
    with pytest.raises(UserError, match="--epochs and --steps exclude each other"):
        _parse("ditto", "--preset", "original", "--epochs", "1", "--steps", "4")


def test_an_unknown_preset() -> None:
    with pytest.raises(UserError, match="unknown preset 'orignal'"):
        _parse("deprl", "--preset", "orignal")
