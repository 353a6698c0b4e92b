"""What tells one object of the user's from another: the id of the experiment it is part of."""

import copy
from collections import OrderedDict
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from manyheads.algorithms import Local
from manyheads.errors import UserError
from manyheads.experiment import Experiment


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_objects_are_known_by_their_content(lab, dtype):
    net = nn.Linear(6, 3, dtype=dtype)
    experiment = lab.tiny(Local(), model=net)
    same = replace(experiment, data=lab.blobs(), model=nn.Linear(6, 3, dtype=dtype))
    assert same.run_id != experiment.run_id
    same.model.load_state_dict(net.state_dict())
    assert replace(same).run_id == experiment.run_id
    assert replace(experiment, data=lab.blobs(seed=1)).run_id != experiment.run_id
    with pytest.raises(UserError, match=r"(data|model) is .*give it in Python"):
        Experiment.from_json(experiment.to_json())
    again = Experiment.from_json(experiment.to_json(), data=experiment.data, model=net)
    assert again.run_id == experiment.run_id
    held = copy.deepcopy(net)
    held.bias.requires_grad_(False)
    assert replace(experiment, model=held).run_id != experiment.run_id


class Smoothed:
    def __call__(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, y, reduction="none")


def test_functions_are_known_by_their_names_in_every_process():
    def loss(**options: Any) -> dict[str, str]:
        return Experiment(loss=partial(F.cross_entropy, reduction="none", **options)).describe()["loss"]

    assert loss() == {"kind": 'function torch.nn.functional.cross_entropy(reduction="none")'}
    assert loss(label_smoothing=0.1) != loss(label_smoothing=0.2)
    assert loss(weight=torch.ones(3)) == loss(weight=torch.ones(3)) != loss(weight=torch.ones(3) / 3)
    assert Experiment(loss=Smoothed()).run_id == Experiment(loss=Smoothed()).run_id


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_sparse_tensor_is_known_by_its_numbers_and_their_places():
    eye = torch.eye(4)

    def held(weight: torch.Tensor) -> str:
        return Experiment(loss=partial(F.cross_entropy, weight=weight)).run_id

    for sparse in (torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr):
        assert held(sparse(eye)) == held(sparse(eye.clone()))
        assert len({held(sparse(each)) for each in (eye, 2 * eye, eye.roll(1))}) == 3


def test_a_tensor_is_known_by_its_values_not_by_how_it_prints():
    def loss(weight: torch.Tensor) -> dict[str, str]:
        return Experiment(loss=partial(F.cross_entropy, weight=weight)).describe()["loss"]

    weight = torch.tensor([1.0, 2.0, 1 / 3])
    known = loss(weight)
    torch.set_printoptions(precision=2)
    try:
        assert loss(weight) == loss(weight.clone().requires_grad_()) == known
    finally:
        torch.set_printoptions(profile="default")
    assert loss(weight.double()) != known != loss(weight[None])
    assert loss(torch.zeros(2)) != loss(torch.zeros(2, dtype=torch.int32)), "the same bytes"
    assert loss(torch.ones(()).expand(1)) == loss(torch.ones(1))


class Scaled(nn.Module):
    """A net whose numbers follow from its attributes, too."""

    def __init__(self, factor: float | tuple[float, ...] | list[float] = 1.0, act: Any = torch.tanh) -> None:
        super().__init__()
        self.inner, self.factor, self.act = nn.Sequential(nn.Linear(6, 3)), factor, act
        nn.init.zeros_(self.inner[0].weight)
        nn.init.zeros_(self.inner[0].bias)


class Masked(nn.Module):
    """With a tensor that belongs to it and is not saved."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((3,), value), persistent=False)


class Focal:
    def __init__(self, gamma: Any, calls: int = 0) -> None:
        self.gamma, self._calls = gamma, calls

    def __call__(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return output

    def other(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return output

    @classmethod
    def net(cls) -> nn.Module:
        return Scaled()


class Sharp(Focal):
    pass


def around(net: nn.Module) -> nn.Module:
    return nn.Sequential(nn.ReLU(), net)


class Colour(Enum):
    RED, BLUE = 1, 2


ARGUMENTS = [
    ({"a": 1.0}, {"a": 9.0}),
    ({"a": {"b": 1}}, {"a": {"b": 2}}),
    ({1: 2}, {"1": 2}),
    ({("a", 1): 2, 3: 4}, {("a", 1): 3, 3: 4}),
    (OrderedDict(a=1), OrderedDict(a=2)),
    ({1, "b"}, {2, "b"}),
    (frozenset([1]), frozenset([2])),
    (b"one", b"two"),
    (bytearray(b"one"), bytearray(b"two")),
    (1 + 2j, 1 + 3j),
    (np.complex64(1), np.complex64(2)),
    (slice(1, 2), slice(1, 3)),
    (range(3), range(4)),
    (Path("a"), Path("b")),
    (torch.float32, torch.float64),
    (torch.device("cpu"), torch.device("cuda:1")),
    (np.array([1, None]), np.array([2, None])),
    (Colour.RED, Colour.BLUE),
]


@pytest.mark.parametrize(
    ("make", "one", "other"),
    [
        (lambda value: nn.CrossEntropyLoss(reduction="none", label_smoothing=value), 0.0, 0.9),
        (lambda value: nn.HuberLoss(reduction="none", delta=value), 1.0, 9.0),
        (lambda value: nn.SmoothL1Loss(reduction="none", beta=value), 1.0, 9.0),
        (Scaled, 1.0, 5.0),
        (Scaled, (1, 2), (1, 3)),
        (Scaled, [1, 2], [1, 3]),
        (lambda value: around(Scaled(value)), 1.0, 5.0),
        (lambda value: Scaled(act=value), torch.tanh, torch.relu),
        (lambda value: Scaled(act=value), F.relu, F.gelu),
        (Masked, 0.0, 1.0),
        (Focal, 2, 5),
        (Focal, np.float32(2), np.float32(5)),
        (Focal, (1, 2), (1, 3)),
        (Focal, F.relu, F.gelu),
        (Focal, torch.ones(2), torch.zeros(2)),
        (Focal, np.ones(2), np.zeros(2)),
        (Focal, np.ones((2, 3)), np.ones((3, 2))),
        (Focal, np.zeros(2, np.int32), np.zeros(2, np.float32)),
        (Focal, partial(F.gelu, approximate="none"), partial(F.gelu, approximate="tanh")),
        *((make, nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss()) for make in (Focal, Scaled)),
        (Scaled, torch.ones(2), torch.zeros(2)),
        (lambda value: Focal(value).other, 2, 5),
        (lambda kind: kind.net, Focal, Sharp),
        (lambda value: partial(F.cross_entropy, weight=value), (1, 2), (1, 3)),
        (lambda value: partial(Focal(value), y=None), 2, 5),
        *((lambda value: partial(F.cross_entropy, weight=value), *values) for values in ARGUMENTS),
        (lambda value: partial(around, Scaled(value)), 1.0, 5.0),
    ],
)
def test_objects_are_known_by_their_settings(make, one, other):
    def text(value: Any) -> str:
        return Experiment(loss=make(value)).to_json()

    assert text(one) == text(copy.deepcopy(one))
    assert text(one) != text(other)


def test_equal_arguments_are_told_in_one_way_whatever_their_order():
    def kind(**options: Any) -> str:
        return Experiment(loss=partial(F.cross_entropy, **options)).describe()["loss"]["kind"]

    assert kind(w={"a": 1, "b": {"d", "c"}}) == kind(w={"b": {"c", "d"}, "a": 1})
    assert kind(w={"a": 1.0}) == 'function torch.nn.functional.cross_entropy(w={"a": 1.0})'
    assert kind(w={1: 2, "a": 3}) == kind(w={"a": 3, 1: 2})
    assert kind(w={0, 8}) == kind(w={8, 0}), "one place in a set of eight"
    assert kind(w=np.array([None, 1.5])) == kind(w=np.array([None, float("1.5")])), "not by its place in memory"


def test_what_does_not_show_its_content_is_refused():
    for value in (object(), torch.Generator(), {"a": [object()]}):
        with pytest.raises(
            UserError, match=r"^loss: runs cannot be told apart by an object of type (object|Generator): give numbers"
        ):
            _ = Experiment(loss=partial(F.cross_entropy, weight=value)).run_id


def test_a_module_without_shapes_is_refused_and_left_as_it_is(lab):
    net = nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.Linear(5, 3))
    experiment, why = lab.tiny(Local(), model=net), r"0\.weight of the Sequential has no shape yet.*give a function"
    with pytest.raises(UserError, match=why):
        _ = experiment.run_id
    with pytest.raises(UserError, match=why):
        experiment.build_net((6,), 3, seed=1)
    assert nn.parameter.is_lazy(net[0].weight)


def test_a_factory_may_make_lazy_layers(lab):
    def net() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(3))

    one, other = (lab.opened(lab.tiny(Local(), model=net)).ctx.initial.params for _ in range(2))
    assert all(torch.equal(leaf, other[name]) for name, leaf in one.items())


def test_the_state_of_an_object_is_none_of_its_settings():
    assert Experiment(loss=Focal(2)).run_id == Experiment(loss=Focal(2, calls=7)).run_id
    assert Experiment(model=Scaled().train()).run_id == Experiment(model=Scaled().eval()).run_id
    one, other = Smoothed(), Smoothed()
    one.__dict__, other.__dict__ = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert Experiment(loss=one).run_id == Experiment(loss=other).run_id, "in whatever order they were set"
    assert Experiment(loss=Focal(np.complex64(2))).run_id
