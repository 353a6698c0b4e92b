"""Defaults that work: net, batch size, rates and rounds for each data set."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from manyheads.data.dataset import RAW
from manyheads.models.registry import Model


@dataclass(frozen=True)
class Recipe:
    """What a run is trained with: as its data set wants it, unless the user says otherwise."""

    model: Model
    batch_size: int
    lr: float
    head_lr: float
    momentum: float
    weight_decay: float
    clip: float
    decay: float
    rounds: int


def _paper(model: str, batch_size: int) -> Recipe:
    """The paper's values: rates .005 for heads and .01 otherwise, both times .96 a round."""
    return Recipe(model, batch_size, 0.01, 0.005, 0.9, 1e-5, 10.0, 0.96, 100)


RECIPES: dict[str, Recipe] = {
    "digits": Recipe("mlp:64", 16, 0.2, 0.2, 0.9, 1e-5, 10.0, 0.98, 50),
    "cifar10": _paper("vgg11", 16),
    "cifar100": _paper("resnet18", 128),
    "fashion-mnist": _paper("alexnet", 16),
    "harbox": _paper("dnn", 16),
    "mobiact": _paper("dnn", 16),
}

OWN_IMAGES = Recipe("cnn", 16, 0.01, 0.01, 0.9, 1e-5, 10.0, 0.98, 50)
OWN_VECTORS = Recipe("mlp", 16, 0.01, 0.01, 0.9, 1e-5, 10.0, 0.98, 50)


_SECONDS_PER_SAMPLE = {
    "mlp": 6e-5,
    "cnn": 8e-4,
    "dnn": 4e-4,
    "dnn-code": 6e-4,
    "alexnet": 0.013,
    "alexnet-code": 0.003,
    "vgg11": 0.02,
    "vgg11-code": 0.02,
    "resnet18": 0.06,
}
"""A net's training time per sample, measured once on one core of a server with the recipes' batch sizes."""

_GUESSED_SECONDS_PER_SAMPLE = 1e-3


def step_seconds(model: object, batch_size: int) -> float:
    """What the simulated clock counts for a mini-batch of a net, which may be a name, a module or a factory."""
    return _SECONDS_PER_SAMPLE.get(_family(model), _GUESSED_SECONDS_PER_SAMPLE) * batch_size


def is_guess(seconds: float | None, model: object, batch_size: int) -> bool:
    """Whether nobody has measured or given the ``seconds`` that are counted for a mini-batch of a net."""
    return _family(model) not in _SECONDS_PER_SAMPLE and seconds == step_seconds(model, batch_size)


def _family(model: object) -> str:
    return model.partition(":")[0] if isinstance(model, str) else ""


def recipe_for(data: str, input_shape: tuple[int, ...]) -> Recipe:
    """The data set's recipe; a user's own arrays get one by their shape."""
    return RECIPES.get(data.removesuffix(RAW)) or (OWN_IMAGES if len(input_shape) == 3 else OWN_VECTORS)


def shape_for(model: object) -> tuple[int, ...]:
    """A sample's shape that leads to the recipe with this net, if there is one: for runs whose data are not at hand."""
    return (1, 1, 1) if model == OWN_IMAGES.model else ()


Tables = Sequence[Mapping[str, Any]]
"""Options by name, of one run each."""


def follow_from_data(tables: Tables) -> set[str]:
    """The options of a recipe that have only one value on each data set, so that they follow from it."""
    recipe = ("step_seconds", *(spec.name for spec in fields(Recipe)))
    return {name for name in recipe if _follows(name, ("data",), tables)}


def follow_from_others(tables: Tables) -> set[str]:
    """The same, and a step's time if it has only one value for each data set, net and batch size."""
    time = "step_seconds"
    timed = _follows(time, ("data", "model", "batch_size"), tables)
    return follow_from_data(tables) | ({time} if timed else set())


def _follows(name: str, others: Sequence[str], tables: Tables) -> bool:
    """Whether an option has one value for each combination of the others' values."""
    alone, together = (
        {json.dumps([table.get(each) for each in names]) for table in tables} for names in (others, (*others, name))
    )
    return len(alone) == len(together)
