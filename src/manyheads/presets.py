"""Presets: what each algorithm's own paper trains with, and what the DePRL authors' release does, as plain options.

A preset sets rates, momentum, weight decay, clip, batch size, passes and the algorithm's own options. Data, net,
workers, graph and rounds stay as they are: a comparison shares them. What a source does not state is left to the data
set's recipe.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from manyheads.errors import UserError, unknown
from manyheads.experiment import Experiment


@dataclass(frozen=True)
class Preset:
    """The values of one algorithm."""

    experiment: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the Experiment."""
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    """The algorithm's own options."""


_PLAIN: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0, "clip": 0.0, "decay": 1.0}
"""SGD with nothing around it."""

_RELEASE: dict[str, Any] = {
    "lr": 0.01, "head_lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5, "clip": 10.0, "decay": 0.96
}  # fmt: skip
"""The release's single optimiser."""

ORIGINAL: dict[str, Preset] = {
    # The paper states the rates, their decay and the weight decay; momentum and clip are the release's.
    "deprl": Preset({**_RELEASE, "head_lr": 0.005}, {"head_epochs": 2, "body_epochs": 1}),
    # One mini-batch step a round; its output is the mean of all models.
    "d-psgd": Preset(_PLAIN, {"steps": 1, "evaluate": "mean-model"}),
    # The published scripts regrow at random, the paper by gradients.
    "dispfl": Preset(
        {"lr": 0.1, "momentum": 0.0, "weight_decay": 5e-4, "clip": 10.0, "decay": 0.998, "batch_size": 128},
        {"density": 0.5, "sparsity": "erk", "regrow": "gradient", "anneal": 0.5, "epochs": 5, "order": "mix-train"},
    ),
    # E = 5, B = 10, C = 0.1; the rate is tuned for each net.
    "fedavg": Preset({**_PLAIN, "batch_size": 10}, {"epochs": 5, "participation": 0.1, "weighting": "samples"}),
    # The CIFAR-10 script: 100 workers, two classes each.
    "fedrep": Preset(
        {**_PLAIN, "lr": 0.01, "head_lr": 0.01, "momentum": 0.5, "weight_decay": 1e-4, "batch_size": 10},
        {"head_epochs": 10, "body_epochs": 1, "participation": 0.1, "weighting": "uniform"},
    ),
    # Two steps a round by ten workers, however many there are: take their part with --participation.
    "ditto": Preset({**_PLAIN, "lr": 0.05, "batch_size": 16}, {"steps": 2, "lam": 1.0, "weighting": "uniform"}),
    "fedrod": Preset({"lr": 0.01, "momentum": 0.9, "clip": 0.0, "decay": 0.99, "batch_size": 20}, {"epochs": 5}),
    "local": Preset(),
}
"""Each paper's own values."""

AUTHORS: dict[str, Preset] = {
    "deprl": Preset(_RELEASE, {"head_epochs": 3, "body_epochs": 1, "order": "mix-train"}),
    "d-psgd": Preset(_RELEASE, {"epochs": 3, "order": "mix-train"}),
    "dispfl": Preset(
        _RELEASE, {"density": 0.8, "sparsity": "uniform", "regrow": "gradient", "epochs": 3, "order": "mix-train"}
    ),
    "fedavg": Preset(_RELEASE, {"epochs": 3, "weighting": "samples"}),
    "fedrep": Preset(_RELEASE, {"head_epochs": 3, "body_epochs": 1, "weighting": "samples"}),
    "ditto": Preset(_RELEASE, {"epochs": 3, "lam": 1.0}),
    "fedrod": Preset(_RELEASE, {"epochs": 3}),
    "local": Preset(_RELEASE, {"epochs": 3}),
}
"""The values of the DePRL authors' release. Where its code computes something else, its algorithm is not copied."""

PRESETS: dict[str, Mapping[str, Preset]] = {"recipe": {}, "original": ORIGINAL, "authors": AUTHORS}
"""Preset by name and algorithm; ``recipe`` changes nothing."""


def apply(name: str, experiment: Experiment) -> Experiment:
    """The experiment with a preset's values for its algorithm in place."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    given, who = PRESETS[name], experiment.algorithm.name
    if given and who not in given:
        # The recipe's values would pass for the source's, next to algorithms that do have them.
        raise UserError(
            f"{who} has no values in --preset {name}: leave it out,"
            f" or put a Preset into manyheads.presets.{name.upper()}['{who}']."
        )
    preset = given.get(who, Preset())
    algorithm = replace(experiment.algorithm, **preset.algorithm)
    return replace(experiment, algorithm=algorithm, **preset.experiment)
