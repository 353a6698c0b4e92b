"""Every data set has values that work; the paper's are the paper's."""

import pytest

from manyheads.algorithms import DPSGD, DePRL, Local
from manyheads.data import NAMES
from manyheads.experiment import Experiment, Runtime
from manyheads.models import build
from manyheads.recipes import OWN_IMAGES, OWN_VECTORS, RECIPES, recipe_for, step_seconds
from manyheads.rounds import train

SHAPES = {
    "digits": ((1, 8, 8), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "fashion-mnist": ((1, 32, 32), 10),
    "harbox": ((900,), 5),
    "mobiact": ((900,), 6),
}


def test_every_data_set_has_a_recipe():
    assert set(RECIPES) == set(NAMES) == set(SHAPES)
    for name in NAMES:
        assert recipe_for(name, SHAPES[name][0]) is RECIPES[name]


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "fashion-mnist", "harbox"])
def test_the_papers_values(name):
    recipe = RECIPES[name]
    assert (recipe.head_lr, recipe.lr, recipe.decay, recipe.weight_decay) == (0.005, 0.01, 0.96, 1e-5)
    assert (recipe.momentum, recipe.clip) == (0.9, 10.0)
    assert recipe.batch_size == (128 if name == "cifar100" else 16)
    assert (
        recipe.model == {"cifar10": "vgg11", "cifar100": "resnet18", "fashion-mnist": "alexnet", "harbox": "dnn"}[name]
    )


@pytest.mark.parametrize("name", ["digits", "harbox", "mobiact", "cifar10"])
def test_a_recipes_net_takes_its_data(name):
    shape, classes = SHAPES[name]
    assert "head" in build(RECIPES[name].model, shape, classes).groups


def test_personal_heads_win_where_they_must():
    """Where every worker names the digits in its own order, one model for all cannot, and alone one learns less."""
    shared = {"workers": 32, "split": "dirichlet:1", "relabel": True, "graph": "ring", "rounds": 25}
    runtime = Runtime(device="cpu", threads=1, eval_every=25)
    accuracy = {
        algorithm.name: record.accuracy_mean
        for algorithm in (DePRL(), DPSGD(), Local())
        for record in train(Experiment(algorithm=algorithm, **shared), runtime)
    }
    assert accuracy["deprl"] > accuracy["d-psgd"] + 0.15
    assert accuracy["deprl"] > accuracy["local"]


def test_own_arrays_get_one_by_their_shape():
    assert recipe_for("mine.npz", (3, 20, 20)) is OWN_IMAGES
    assert recipe_for("mine.npz", (7,)) is OWN_VECTORS
    build(OWN_IMAGES.model, (3, 20, 20), 4)
    build(OWN_VECTORS.model, (7,), 4)


def test_a_recipe_fills_what_is_left_open_and_nothing_else():
    full = Experiment(lr=0.3, clip=0.0, momentum=0.0).complete(RECIPES["digits"])
    assert (full.lr, full.clip, full.momentum) == (0.3, 0.0, 0.0)
    assert (full.head_lr, full.batch_size, full.rounds) == (0.2, 16, 50)
    assert None not in (full.model, full.decay, full.weight_decay, full.step_seconds)


def test_a_step_takes_as_long_as_its_samples():
    assert step_seconds("mlp:9,9", 32) == pytest.approx(2 * step_seconds("mlp", 16))
    assert step_seconds("resnet18", 16) > step_seconds("mlp", 16)
    assert step_seconds(lambda: None, 16) > 0
