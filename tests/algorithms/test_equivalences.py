"""Where two algorithms must coincide, they do: double precision, parameters to 1e-10, and the scores with them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from manyheads.algorithms import DPSGD, DePRL, DisPFL, Ditto, FedAvg, FedRep, FedRoD, Local
from manyheads.data import Dataset
from manyheads.network.in_process import InProcess
from manyheads.rounds import train
from manyheads.tree import select

ROUNDS = 3


def batchnorm(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(input_shape[0], 7),
        nn.BatchNorm1d(7),
        nn.ReLU(),
        nn.Linear(7, 5),
        nn.ReLU(),
        nn.Linear(5, num_outputs),
    )


def dropout(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(input_shape[0], 7), nn.ReLU(), nn.Dropout(0.3), nn.Linear(7, num_outputs))


MODELS = {"mlp": "mlp:7,5", "batchnorm": batchnorm, "dropout": dropout}
with_models = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys() and a
    for name, leaf in a.items():
        torch.testing.assert_close(leaf, b[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def assert_moved(start: dict[str, Tensor], end: dict[str, Tensor]) -> None:
    """So that two runs that do nothing never count as equal."""
    assert any(not torch.allclose(leaf, start[name], rtol=1e-2, atol=1e-2) for name, leaf in end.items())


def assert_equivalent(lab, one, other, **context) -> None:
    """Two experiments with the same parameters and statistics after every round; ``context`` is the second's."""
    first, second = lab.opened(one), lab.opened(other, **context)
    a, b = lab.states(first), lab.states(second)
    for k, (left, right) in enumerate(zip(a, b, strict=True)):
        models = [s.experiment.algorithm.models(x, s.ctx) for s, x in ((first, left), (second, right))]
        assert_equal(models[0].params, models[1].params)
        if models[0].buffers:
            assert_equal(models[0].buffers, models[1].buffers)
        scores = [
            s.ctx.engine.evaluate(m.params, m.buffers, s.federation.test).metric
            for s, m in zip((first, second), models, strict=True)
        ]
        assert torch.equal(*scores), k
    assert_moved(a[0].params, a[-1].params)


def assert_same_records(lab, one, other) -> None:
    """The same scores through the front door; bytes and names may differ."""
    for a, b in zip(train(one, lab.cpu), train(other, lab.cpu), strict=True):
        assert a.accuracy_mean == pytest.approx(b.accuracy_mean, abs=1e-12)
        assert a.train_loss == pytest.approx(b.train_loss, rel=1e-10)
        assert a.loss == pytest.approx(b.loss, rel=1e-10)


def by_samples(lab, session) -> InProcess:
    """A graph on which everybody hears everybody with weight n_j / n."""
    share = session.ctx.sizes / session.ctx.sizes.sum()
    assert len(set(share.tolist())) > 1
    matrix = np.tile(share, (len(share), 1))
    return InProcess(lab.mixing_of(matrix), session.experiment.algorithm.private)


@with_models
def test_d_psgd_on_the_full_graph_is_fedavg_with_equal_weights(lab, model):
    one = lab.tiny(DPSGD(epochs=2), graph="full", model=model, rounds=ROUNDS)
    other = replace(one, algorithm=FedAvg(epochs=2, weighting="uniform"))
    assert_equivalent(lab, one, other)
    assert_same_records(lab, one, other)


@with_models
def test_fedavg_by_samples_is_d_psgd_with_these_weights(lab, model):
    one = lab.tiny(FedAvg(epochs=2, weighting="samples"), model=model, rounds=ROUNDS)
    other = replace(one, algorithm=DPSGD(epochs=2))
    assert_equivalent(lab, one, other, network=by_samples(lab, lab.opened(other)))


@pytest.mark.parametrize(
    ("model", "heads"),
    [("mlp:7,5", "same"), (batchnorm, "random"), (dropout, "random")],
    ids=["mlp", "batchnorm", "dropout"],
)
def test_deprl_on_the_full_graph_is_fedrep_with_equal_weights(lab, model, heads):
    one = lab.tiny(DePRL(heads=heads), graph="full", model=model, rounds=ROUNDS)
    other = replace(one, algorithm=FedRep(weighting="uniform", heads=heads))
    assert_equivalent(lab, one, other)
    assert_same_records(lab, one, other)


@with_models
def test_fedrep_by_samples_is_deprl_with_these_weights(lab, model):
    one = lab.tiny(FedRep(weighting="samples"), model=model, rounds=ROUNDS)
    other = replace(one, algorithm=DePRL())
    assert_equivalent(lab, one, other, network=by_samples(lab, lab.opened(other)))


@pytest.mark.parametrize("model", ["mlp:7,5", batchnorm], ids=["mlp", "batchnorm"])
def test_deprl_with_everything_in_the_head_is_local(lab, model):
    """In full batches, which need no order: the head's stream is not the stream of local training."""
    norm = "local" if model is batchnorm else "shared"
    one = lab.tiny(DePRL(head_epochs=3), model=model, head="all", norm=norm, batch_size=64, head_lr=0.07, rounds=ROUNDS)
    other = replace(one, algorithm=Local(epochs=3), head=None, lr=0.07)
    first, second = lab.opened(one), lab.opened(other)
    a, b = lab.states(first)[-1], lab.states(second)[-1]
    assert {name.split(".")[0] for name in a.params} == {"head"}
    for left, right in ((a.params, b.params), (a.buffers, b.buffers)):
        for mine, theirs in zip(left.values(), right.values(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    assert_same_records(lab, one, other)


@with_models
def test_deprl_without_a_head_is_d_psgd(lab, model):
    one = lab.tiny(DePRL(body_epochs=2), model=model, head="none", rounds=ROUNDS)
    other = replace(one, algorithm=DPSGD(epochs=2))
    assert_equivalent(lab, one, other)
    # The same net cut in two gives the same numbers under other names.
    cut = lab.states(lab.opened(replace(other, head=None)))[-1]
    for mine, theirs in zip(lab.states(lab.opened(one))[-1].params.values(), cut.params.values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("model", "graph", "regrow"),
    [
        ("mlp:7,5", "ring", "gradient"),
        ("mlp:7,5", "star", "random"),
        ("mlp:7,5", "random:0.6", "gradient"),
        (dropout, "in-neighbours:2", "random"),
        (batchnorm, "star", "gradient"),
    ],
)
def test_dense_dispfl_is_d_psgd_with_uniform_weights(lab, model, graph, regrow):
    redraw = graph == "in-neighbours:2"
    one = lab.tiny(DisPFL(density=1.0, epochs=2, regrow=regrow), model=model, graph=graph, redraw=redraw, rounds=2)
    other = replace(one, algorithm=DPSGD(epochs=2), weights="uniform")
    assert_equivalent_models(lab, one, other)


def assert_equivalent_models(lab, one, other) -> None:
    """Equal models where the states have different leaves."""
    first, second = lab.opened(one), lab.opened(other)
    history = lab.states(first)
    for left, right in zip(history, lab.states(second), strict=True):
        a, b = (s.experiment.algorithm.models(x, s.ctx) for s, x in ((first, left), (second, right)))
        assert_equal(a.params, b.params)
        if a.buffers:
            assert_equal(a.buffers, b.buffers)
    assert_moved(history[0].params, a.params)


@with_models
def test_ditto_without_pull_is_local(lab, model):
    """Its personal phase has neither momentum nor clip, so local training goes without."""
    one = lab.tiny(Ditto(lam=0.0, epochs=2), model=model, momentum=0.0, clip=0.0, rounds=ROUNDS)
    other = replace(one, algorithm=Local(epochs=2))
    assert_equivalent_models(lab, one, other)
    assert_same_records(lab, one, other)


@pytest.mark.parametrize("model", ["mlp:7,5", batchnorm], ids=["mlp", "batchnorm"])
@pytest.mark.parametrize(("weighting", "lam"), [("samples", 0.0), ("uniform", 0.7)])
def test_dittos_server_is_fedavg(lab, model, weighting, lam):
    one = lab.tiny(Ditto(lam=lam, epochs=2, weighting=weighting), model=model, rounds=ROUNDS)
    other = replace(one, algorithm=FedAvg(epochs=2, weighting=weighting))
    a, b = (lab.states(lab.opened(e)) for e in (one, other))
    groups = {"representation", "head"}
    for left, right in zip(a, b, strict=True):
        assert_equal(select(left.params, groups), right.params)
        assert_equal(
            {"none": torch.zeros(1), **select(left.buffers, groups)}, {"none": torch.zeros(1), **right.buffers}
        )
    assert_moved(b[0].params, b[-1].params)


def test_dittos_server_is_fedavg_with_few_participants(lab):
    one = lab.tiny(Ditto(epochs=2, participation=0.5), rounds=ROUNDS)
    other = replace(one, algorithm=FedAvg(epochs=2, participation=0.5))
    a, b = (lab.states(lab.opened(e))[-1] for e in (one, other))
    assert_equal(select(a.params, {"representation", "head"}), b.params)


def balanced() -> Dataset:
    """Every worker has the same number of samples of each of three classes, but not the others' number."""
    generator = torch.Generator().manual_seed(3)
    user = torch.arange(4).repeat_interleave(torch.tensor([6, 9, 12, 15]))
    y = torch.arange(3).repeat(14)
    test_user, test_y = torch.arange(4).repeat_interleave(6), torch.arange(3).repeat(8)
    centres = 2 * torch.randn(3, 6, generator=generator)

    def x(labels: Tensor) -> Tensor:
        return centres[labels] + torch.randn(len(labels), 6, generator=generator)

    return Dataset("balanced", x(y), y, x(test_y), test_y, 3, user, test_user)


@pytest.mark.parametrize(
    ("model", "weighting"),
    [("mlp:7,5", "samples"), (batchnorm, "samples"), (dropout, "uniform")],
    ids=["mlp", "batchnorm", "dropout"],
)
def test_fedrods_shared_part_is_fedavg_on_balanced_classes(lab, model, weighting):
    """Without the clip, which takes the personal head's gradient into its norm."""
    algorithm = FedRoD(epochs=2, weighting=weighting)
    one = lab.tiny(algorithm, data=balanced(), model=model, clip=0.0, rounds=ROUNDS)
    other = replace(one, algorithm=FedAvg(epochs=2, weighting=weighting))
    first = lab.opened(one)
    assert (first.ctx.class_counts.amax(1) == first.ctx.class_counts.amin(1)).all()
    for left, right in zip(lab.states(first), lab.states(lab.opened(other)), strict=True):
        renamed = {n.replace("generic.", "head.", 1): v for n, v in left.params.items() if not n.startswith("head.")}
        assert_equal(renamed, right.params)
        if right.buffers:
            assert_equal(left.buffers, right.buffers)


def test_fedrods_shared_part_is_not_fedavg_on_other_classes(lab):
    one = lab.tiny(FedRoD(epochs=2), clip=0.0)
    other = replace(one, algorithm=FedAvg(epochs=2))
    a, b = (lab.states(lab.opened(e))[-1] for e in (one, other))
    assert not torch.allclose(a.params["generic.fc2.bias"], b.params["head.fc2.bias"], rtol=1e-3)


@pytest.mark.parametrize("algorithm", [DePRL(), DPSGD(epochs=2)], ids=["deprl", "d-psgd"])
def test_mixing_first_only_moves_the_cut_between_rounds(lab, algorithm):
    """When all start equal, a round of mix-train ends where one of train-mix is about to mix."""
    one = lab.tiny(algorithm, rounds=ROUNDS)
    other = replace(one, algorithm=replace(algorithm, order="mix-train"))
    session = lab.opened(one)
    states = lab.states(session)
    for round, end in enumerate(lab.states(lab.opened(other))[1:]):
        trained, _ = algorithm.local(states[round], round, session.ctx)
        assert_equal(trained.params, end.params)


def weighted_mean(params: dict[str, Tensor], weights: np.ndarray) -> dict[str, Tensor]:
    share = torch.from_numpy(weights / weights.sum())
    return {name: torch.tensordot(share, leaf, 1) for name, leaf in select(params, {"representation"}).items()}


@pytest.mark.parametrize(
    ("graph", "weights", "degrees"),
    [
        ("ring", "metropolis", None),
        ("random:0.6", "metropolis", None),
        ("star", "metropolis", None),
        ("star", "max-degree", None),
        ("star", "lazy", None),
        ("full", "uniform", None),
        ("ring", "uniform", None),
        ("star", "uniform", [4, 2, 2, 2]),
    ],
)
def test_the_mean_representation_is_preserved(lab, graph, weights, degrees):
    """By Metropolis weights on any graph; by uniform ones on regular graphs, else the (degree + 1)-weighted mean."""
    session = lab.opened(lab.tiny(DePRL(), graph=graph, weights=weights))
    kind, ctx = session.experiment.algorithm, session.ctx
    state, _ = kind.local(kind.init(ctx), 0, ctx)
    kept = np.array(degrees if degrees else [1, 1, 1, 1], dtype=np.float64)
    mixed = kind.mix(state, 0, ctx)
    assert_equal(weighted_mean(mixed.params, kept), weighted_mean(state.params, kept))
    if degrees:
        plain = np.ones(4)
        after, before = (weighted_mean(s.params, plain)["representation.fc1.weight"] for s in (mixed, state))
        assert not torch.allclose(after, before, rtol=1e-6)
