"""First weights: equal for all, a function of the seed, and drawn without touching anybody's random numbers."""

import copy
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from manyheads import train
from manyheads.algorithms import REGISTRY, DePRL, FedRep, FedRoD
from manyheads.data import Dataset
from manyheads.engine.cuda_graphs import CudaGraphsEngine
from manyheads.engine.local import LocalEngine
from manyheads.engine.precision import Precision
from manyheads.errors import UserError
from manyheads.initial import few_of, random_heads
from manyheads.session import open_session
from manyheads.store import Run


def test_the_first_weights_are_equal_for_all_and_a_function_of_the_seed(lab):
    torch.manual_seed(1)
    one = lab.opened(lab.tiny(DePRL())).ctx.initial.params
    torch.manual_seed(2)
    two = lab.opened(lab.tiny(DePRL())).ctx.initial.params
    other = lab.opened(lab.tiny(DePRL(), seed=2)).ctx.initial.params
    for name, leaf in one.items():
        assert leaf.shape[0] == 4 and (leaf == leaf[0]).all()
        assert torch.equal(leaf, two[name])
        assert not torch.equal(leaf, other[name])


class Drawn(nn.Linear):
    """A layer that draws its weights from numpy's generator and from Python's."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.from_numpy(np.random.normal(size=self.weight.shape)))  # noqa: NPY002
            self.bias.fill_(random.random())


def test_a_factory_may_draw_from_numpy_and_python(lab):
    def net() -> nn.Module:
        return nn.Sequential(Drawn(6, 5), nn.ReLU(), Drawn(5, 3))

    def first(seed: int) -> dict[str, torch.Tensor]:
        algorithm = DePRL(heads="random")
        return algorithm.init(lab.opened(lab.tiny(algorithm, model=net, seed=seed)).ctx).params

    one, two, other = first(1), first(1), first(2)
    for name, leaf in one.items():
        assert torch.equal(leaf, two[name]) and not torch.equal(leaf, other[name])


def test_a_regression_has_an_output_for_every_number_of_a_target(lab):
    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (output - y.view_as(output)).square().sum(1)

    for outputs in ((), (2,)):
        x = torch.randn(8, 6)
        data = Dataset("plane", x, torch.randn(8, *outputs), x[:4], torch.randn(4, *outputs), None)
        model = lab.opened(lab.tiny(DePRL(), data=data, split="iid", workers=2, loss=loss)).ctx.model
        assert model(torch.zeros(1, 6, dtype=torch.float64)).shape == (1, *(outputs or (1,)))


@pytest.mark.parametrize("kind", [DePRL, FedRep])
def test_random_heads_are_each_workers_own_and_a_function_of_its_id(lab, kind):
    algorithm = kind(heads="random")
    ctx = lab.opened(lab.tiny(algorithm)).ctx
    one, two = (algorithm.init(ctx).params for _ in range(2))
    same = kind().init(ctx).params
    for name, leaf in one.items():
        assert torch.equal(leaf, two[name])
        if name.startswith("head."):
            assert len({tuple(row.flatten().tolist()) for row in leaf}) == 4
        else:
            assert torch.equal(leaf, same[name])
        assert torch.equal(same[name], ctx.initial.params[name])
    part = random_heads(ctx.model, ctx.seed, (2, 3))
    assert all(torch.equal(leaf, one[name][2:]) for name, leaf in part.items())


class Prototypes(nn.Module):
    """A head of the user's: distances to a point for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -torch.cdist(x, self.points)


class Redrawn(Prototypes):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.points)


def test_a_head_of_the_users_own_is_drawn_as_it_says(lab):
    algorithm = DePRL(heads="random")

    def first_heads(head: nn.Module) -> torch.Tensor:
        net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.BatchNorm1d(6), head)
        ctx = lab.opened(lab.tiny(algorithm, model=net, head="2")).ctx
        return algorithm.init(ctx).params["head.3.points"]

    assert len({tuple(row.flatten().tolist()) for row in first_heads(Redrawn())}) == 4


@pytest.mark.parametrize(
    ("algorithm", "changes", "why"),
    [
        (DePRL(heads="random"), {"head": "2"}, "--heads random: Prototypes in the head cannot be drawn anew"),
        (FedRep(heads="random"), {}, "--heads random: Prototypes in the head cannot be drawn anew"),
        (FedRoD(), {"head": "none"}, "fedrod adds a second head to the first"),
    ],
)
def test_a_net_that_an_algorithm_cannot_begin_with_is_refused_before_anything_is_written(
    lab, tmp_path, algorithm, changes, why
):
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.BatchNorm1d(6), Prototypes())
    with pytest.raises(UserError, match=why):
        next(iter(train(lab.tiny(algorithm, model=net, **changes), replace(lab.cpu, out=tmp_path / "run"))))
    assert not (tmp_path / "run").exists()


def test_what_is_not_trained_need_not_be_drawn_anew(lab):
    algorithm = DePRL(heads="random")
    net = nn.Sequential(nn.Linear(6, 6), Prototypes().requires_grad_(False), nn.Linear(3, 3))
    ctx = lab.opened(lab.tiny(algorithm, model=net, head="1")).ctx
    assert algorithm.init(ctx).params.keys() == ctx.initial.params.keys()


class Turned(nn.Module):
    """A net that turns its inputs in the complex plane, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.tensor([1j, -1, 1]), persistent=False)
        self.fc1, self.fc2 = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(x.unflatten(1, (3, 2))) * self.turn
        return self.fc2(self.fc1(torch.view_as_real(turned).flatten(1)).relu())


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_complex_numbers_stay_complex(lab, precision):
    net = Turned()
    opened = lab.opened(lab.tiny(DePRL(), model=net, precision=precision)).ctx.model.eval()
    x = torch.randn(4, 6)
    assert torch.allclose(opened(x.to(next(opened.parameters()).dtype)).float(), net(x), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16])
def test_what_no_checkpoint_could_hold_is_refused_before_the_first_round(lab, dtype):
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    net[0].register_buffer("table", torch.zeros(2, dtype=dtype))
    with pytest.raises(UserError, match=rf"table is {dtype}, which a checkpoint cannot hold: .* persistent=False"):
        lab.opened(lab.tiny(DePRL(), model=net))


def test_the_first_weights_lie_as_those_of_a_checkpoint_do(lab):
    """Another order in memory gives other last bits: a run that was continued would not end as one that was not."""
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    net[0].weight = nn.Parameter(torch.randn(6, 5).T)
    ctx = lab.opened(lab.tiny(DePRL(), model=net)).ctx
    assert all(leaf[0].is_contiguous() for leaf in ctx.initial.params.values())


def test_opening_leaves_torchs_generator_alone(lab):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    algorithm = DePRL(heads="random")
    algorithm.init(lab.opened(lab.tiny(algorithm)).ctx)
    assert torch.equal(torch.get_rng_state(), before)


def held() -> nn.Sequential:
    """A net whose first layer is not to be trained."""
    layers = [nn.Linear(6, 5).requires_grad_(False), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)]
    return nn.Sequential(*layers)


def test_a_layer_that_is_not_trained_costs_no_engine(lab):
    session = lab.opened(lab.tiny(DePRL(), model=held))
    assert session.ctx.engine.name == "batched"
    half = held()
    half[0].bias.requires_grad_(True)
    assert lab.opened(lab.tiny(DePRL(), model=half)).ctx.engine.name == "loop", "half a layer is nobody's rule"


@pytest.mark.parametrize("engine", ["loop", "batched", "cuda-graphs"])
@pytest.mark.parametrize("name", REGISTRY)
def test_a_layer_that_is_not_trained_is_as_if_the_data_had_gone_through_it_before(lab, name, engine):
    whole = held().double()
    first, rest = whole[:2], copy.deepcopy(whole[2:])
    data = lab.blobs()
    x_train, x_test = (first(x.double()).float().detach() for x in (data.x_train, data.x_test))
    through = replace(data, x_train=x_train, x_test=x_test, source=None)
    ends = []
    for model, own in ((whole, data), (rest, through)):
        session = open_session(lab.tiny(REGISTRY[name](), model=model, data=own), replace(lab.cpu, engine="loop"))
        if model is whole and engine != "loop":
            session = replace(session, ctx=replace(session.ctx, engine=other_engine(session, engine)))
        ends.append(lab.states(session)[-1].params)
    found, expected = ends
    assert found.keys() == {leaf.replace("representation.0.", "representation.2.") for leaf in expected}
    for leaf, value in expected.items():
        same = found[leaf.replace("representation.0.", "representation.2.")]
        torch.testing.assert_close(same, value, rtol=1e-4, atol=1e-6)


def other_engine(session, name):
    assert isinstance(session.ctx.engine, LocalEngine)
    work = session.ctx.engine.work
    if name == "cuda-graphs":
        return CudaGraphsEngine(work, precision=Precision("float64"), num_slots=2, num_stacked=3, compile=False)
    return open_session(session.experiment, replace(session.runtime, engine=name)).ctx.engine


def test_what_is_not_trained_is_drawn_from_the_seed_and_found_again(lab, tmp_path):
    experiment, runtime = lab.tiny(DePRL(), model=held), replace(lab.cpu, out=tmp_path)
    *_, last = train(experiment, runtime)
    first = open_session(experiment, lab.cpu).ctx.model.get_buffer("representation.0.weight")
    torch.manual_seed(7)
    models = [Run.open(tmp_path, model=held, data=experiment.data).model(worker) for worker in range(2)]
    assert all(torch.equal(model.state_dict()["representation.0.weight"], first) for model in models)
    assert all(torch.equal(leaf, models[0].state_dict()[name]) for name, leaf in Run.open(tmp_path).constants().items())
    sent = sum(leaf.numel() for name, leaf in models[0].named_parameters() if name.startswith("representation.2."))
    rounds, neighbours, size = 2, 2, 8
    assert last.bytes_sent_per_worker == rounds * neighbours * size * sent, "what is trained, and no more"


def test_something_must_be_left_to_train(lab):
    with pytest.raises(UserError, match="all parameters of the model have requires_grad=False"):
        lab.opened(lab.tiny(DePRL(), model=held().requires_grad_(False)))


def test_a_run_goes_on_with_what_it_was_begun_with(lab, tmp_path):
    """As weights of a file that was replaced."""
    changes = []

    def net() -> nn.Module:
        made = held()
        for change in changes:
            change(made)
        return made

    experiment, runtime = lab.tiny(DePRL(), model=net), replace(lab.cpu, out=tmp_path)
    next(iter(train(experiment, runtime)))
    for change in (lambda made: made[0].weight.add_(1), lambda made: made.requires_grad_(True)):
        changes[:] = [change]
        with pytest.raises(UserError, match=r"was begun with (different weights|another net)"):
            list(train(experiment, runtime))
    changes.clear()
    assert [record.round for record in train(experiment, runtime)] == [2]


def test_a_constant_may_hold_nan(lab, tmp_path):
    """As what a forward never reads, or replaces."""

    class Patched(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
            self[0].register_parameter("gap", nn.Parameter(torch.tensor([float("nan"), 1.0]), requires_grad=False))

    experiment, runtime = lab.tiny(DePRL(), model=Patched), replace(lab.cpu, out=tmp_path)
    next(iter(train(experiment, runtime)))
    assert Run.open(tmp_path).constants().keys() == {"representation.0.gap"}
    assert [record.round for record in train(experiment, runtime)] == [2]


def test_a_layer_that_was_trained_is_not_held_still_later(lab, tmp_path):
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    experiment, runtime = lab.tiny(DePRL(), model=module), replace(lab.cpu, out=tmp_path)
    next(iter(train(experiment, runtime)))
    module[0].requires_grad_(False)
    with pytest.raises(UserError, match=r"holds another experiment \(model module Sequential"):
        list(train(experiment, runtime))
    module[0].requires_grad_(True)
    assert [record.round for record in train(experiment, runtime)] == [2], "nothing was written meanwhile"


def test_samples_to_try_things_on_come_from_all_over_however_many_there_are() -> None:
    """Beyond 2**24, where float32 no longer counts by ones."""
    assert few_of(torch.arange(10)).tolist() == [0, 3, 6, 9]
    assert few_of(torch.arange(1)).tolist() == [0, 0, 0, 0]
    many = torch.zeros(1).expand(33_554_436)
    assert few_of(many).tolist() == [0, 0, 0, 0]
