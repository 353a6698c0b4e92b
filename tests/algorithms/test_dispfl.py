"""DisPFL by hand: how many weights are kept, which, and what neighbours make of each other's."""

from dataclasses import replace
from math import ceil, cos, pi

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from manyheads.algorithms import DisPFL, ranking
from manyheads.algorithms.dispfl import densities
from manyheads.engine.phase import Phase, Steps
from manyheads.errors import UserError
from manyheads.tree import select, strip_prefix

WHOLE = frozenset({"representation", "head"})


SHAPES = st.lists(
    st.one_of(
        st.just(()),
        st.tuples(st.integers(1, 40)),
        st.tuples(st.integers(1, 40), st.integers(1, 40)),
        st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 3), st.integers(1, 3)),
    ),
    min_size=1,
    max_size=6,
).map(lambda shapes: {str(k): torch.Size(shape) for k, shape in enumerate(shapes)})


@hypothesis.given(SHAPES, st.floats(0.01, 0.99))
def test_erk_is_in_proportion_to_sum_over_product_of_dims_up_to_all_of_a_layer(shapes, target):
    found = densities(shapes, target, "erk")
    raw = {name: max(1, sum(shape)) / shape.numel() for name, shape in shapes.items()}
    scale = max(found[name] / raw[name] for name in shapes)
    assert found == pytest.approx({name: min(1.0, scale * raw[name]) for name in shapes})
    total = sum(shape.numel() for shape in shapes.values())
    assert sum(found[name] * shape.numel() for name, shape in shapes.items()) == pytest.approx(target * total)
    assert all(0 < density <= 1 for density in found.values())


def test_erk_keeps_more_of_small_layers():
    found = densities({"w": torch.Size((100, 50)), "v": torch.Size((10, 10)), "b": torch.Size((10,))}, 0.2, "erk")
    assert found["b"] == 1.0 and found["w"] < 0.2 < found["v"]


def test_uniform_sparsity_is_the_same_in_each_layer():
    assert densities({"w": torch.Size((9, 9)), "b": torch.Size((9,))}, 0.3, "uniform") == {"w": 0.3, "b": 0.3}


@pytest.mark.parametrize("sparsity", ["erk", "uniform"])
def test_a_density_of_one_keeps_everything(lab, sparsity):
    state = DisPFL(density=1.0, sparsity=sparsity).init(lab.opened(lab.tiny(DisPFL())).ctx)
    assert all(leaf.all() for name, leaf in state.params.items() if "mask" in name)


@pytest.mark.parametrize("density", [0.0, -0.5, 1.01])
def test_a_density_outside_its_range_is_refused(density):
    with pytest.raises(UserError, match=r"\(0, 1\]"):
        DisPFL(density=density)


@pytest.mark.parametrize("anneal", [-0.1, 1.5])
def test_shares_outside_their_range_are_refused(lab, anneal):
    with pytest.raises(UserError, match="anneal"):
        lab.tiny(DisPFL(anneal=anneal))


def test_without_anneal_masks_stay(lab):
    start, *_, end = lab.states(lab.opened(lab.tiny(DisPFL(anneal=0.0, epochs=1))))
    assert all(torch.equal(leaf, end.params[name]) for name, leaf in start.params.items() if "mask" in name)


def masks(state, group: str) -> dict[str, torch.Tensor]:
    return strip_prefix(state.params, group)


@pytest.mark.parametrize("regrow", ["gradient", "random"])
@pytest.mark.parametrize("sparsity", ["erk", "uniform"])
def test_every_worker_keeps_as_many_weights_of_each_layer_in_every_round(lab, sparsity, regrow):
    kind = DisPFL(density=0.4, sparsity=sparsity, regrow=regrow, epochs=1)
    session = lab.opened(lab.tiny(kind, rounds=3, model="mlp:9"))
    history = lab.states(session)
    shapes = {name: leaf.shape[1:] for name, leaf in select(history[0].params, WHOLE).items()}
    expected = densities(shapes, 0.4, sparsity)
    for state in history:
        for which in ("mask", "shared_mask"):
            for name, mask in masks(state, which).items():
                count = round(expected[name] * shapes[name].numel())
                assert mask.flatten(1).sum(1).tolist() == [count] * 4, name
                assert set(mask.unique().tolist()) <= {0, 1}
    # They do evolve, each worker's in its own way.
    first, last = (masks(state, "mask")["representation.fc1.weight"] for state in (history[0], history[-1]))
    assert not torch.equal(first, last)
    assert len({tuple(row.flatten().tolist()) for row in first}) == 4


def test_weights_obey_their_masks(lab):
    kind = DisPFL(density=0.4, epochs=2)
    session = lab.opened(lab.tiny(kind, rounds=2, model="mlp:9"))
    state = kind.init(session.ctx)
    for round in range(2):
        for name, leaf in select(state.params, WHOLE).items():
            assert not leaf[masks(state, "shared_mask")[name] == 0].any(), name
        before = masks(state, "shared_mask")
        state, _ = kind.local(state, round, session.ctx)
        # Training happens under the mask that the shared weights obey; what is regrown is 0 until the next mixing.
        for name, leaf in select(state.params, WHOLE).items():
            assert torch.equal(masks(state, "shared_mask")[name], before[name])
            assert not leaf[before[name] == 0].any(), name
        state = kind.mix(state, round, session.ctx)


@pytest.mark.parametrize("round", [0, 2, 4])
def test_the_mask_evolves_along_the_cosine(lab, round):
    """The smallest weights go, as many come back where the gradient of one mini-batch is largest."""
    kind = DisPFL(density=0.4, anneal=0.6, epochs=1)
    session = lab.opened(lab.tiny(kind, rounds=5, model="mlp:9"))
    ctx = session.ctx
    start = kind.init(ctx)
    trained, _ = kind.local(start, round, ctx)
    weights, old = select(trained.params, WHOLE), masks(start, "shared_mask")
    one_batch = Phase("regrow", WHOLE, Steps(1), ctx.rates.sgd(round), ctx.objective)
    gradient = ctx.engine.gradient(weights, trained.buffers, one_batch, round, batches=Steps(1))
    share = 0.6 / 2 * (1 + cos(pi * round / 5))
    for name, mask in masks(trained, "mask").items():
        for worker in range(4):
            size, slope = (
                weights[name][worker].flatten().abs().tolist(),
                gradient[name][worker].flatten().abs().tolist(),
            )
            kept = [k for k, keep in enumerate(old[name][worker].flatten().tolist()) if keep]
            if len(kept) == len(size):
                assert mask[worker].all()
                continue
            dropped = ceil(share * len(kept))
            stay = set(sorted(kept, key=lambda k: -size[k])[: len(kept) - dropped])
            free = [k for k in range(len(size)) if k not in stay]
            grown = set(sorted(free, key=lambda k: -slope[k])[:dropped])
            found = set(mask[worker].flatten().nonzero().flatten().tolist())
            # Ties (gradients of dead units are all 0) leave the choice open.
            assert stay <= found and len(found) == len(kept), name
            assert sorted(slope[k] for k in found - stay) == pytest.approx(sorted(slope[k] for k in grown)), name


def test_random_regrowth_keeps_the_largest_and_is_drawn_anew(lab):
    kind = DisPFL(density=0.3, regrow="random", epochs=1)
    session = lab.opened(lab.tiny(kind, rounds=4, model="mlp:30"))
    start = kind.init(session.ctx)
    grown = []
    for round in (0, 1):
        trained, _ = kind.local(start, round, session.ctx)
        name = "representation.fc1.weight"
        size, mask = trained.params[name].flatten(1).abs(), masks(trained, "mask")[name].flatten(1)
        before = masks(start, "shared_mask")[name].flatten(1)
        kept = int(before[0].sum())
        stay = kept - ceil(0.5 / 2 * (1 + cos(pi * round / 4)) * kept)
        for worker in range(4):
            assert mask[worker][size[worker].topk(stay).indices].all()
            assert int(mask[worker].sum()) == kept
            assert not torch.equal(mask[worker], before[worker]), "what was drawn first does not grow back"
        grown += [tuple(mask[worker].tolist()) for worker in range(4)]
    assert len(set(grown)) == 8


@pytest.mark.parametrize("graph", ["ring", "star"])
def test_mixing_is_the_mean_over_those_who_have_a_weight(lab, graph):
    kind = DisPFL(density=0.3, epochs=1)
    session = lab.opened(lab.tiny(kind, graph=graph, model="mlp:9"))
    state, _ = kind.local(kind.init(session.ctx), 0, session.ctx)
    mixed = kind.mix(state, 0, session.ctx)
    heard = session.mixing.rows(0).dense() > 0
    inherited = 0
    for name, leaf in select(state.params, WHOLE).items():
        shared, evolved = masks(state, "shared_mask")[name], masks(state, "mask")[name]
        for worker in range(4):
            near = np.flatnonzero(heard[worker])
            total, have = sum(leaf[j] for j in near), sum(shared[j].double() for j in near)
            expected = torch.where(have > 0, total / have.clamp(min=1), 0.0) * evolved[worker]
            torch.testing.assert_close(mixed.params[name][worker], expected, rtol=1e-12, atol=1e-12)
            inherited += int(((shared[worker] == 0) & (mixed.params[name][worker] != 0)).sum())
        assert torch.equal(masks(mixed, "shared_mask")[name], evolved)
    assert inherited


def test_neighbours_count_alike_whatever_the_mixing_weights(lab):
    states = [
        lab.states(lab.opened(lab.tiny(DisPFL(epochs=1), graph="star", weights=weights)))[-1]
        for weights in ("uniform", "metropolis")
    ]
    for name, leaf in states[0].params.items():
        assert torch.equal(leaf, states[1].params[name]), name


def test_bytes_are_the_kept_values_and_a_bit_for_every_weight(lab):
    kind = DisPFL(density=0.3, epochs=1)
    session = lab.opened(lab.tiny(kind, graph="star", model="mlp:9"))
    state, _ = kind.local(kind.init(session.ctx), 0, session.ctx)
    kind.mix(state, 0, session.ctx)
    message = sum(int(mask[0].sum()) * 8 + ceil(mask[0].numel() / 8) for mask in masks(state, "shared_mask").values())
    assert session.ctx.network.traffic.sent.tolist() == [3 * message, message, message, message]
    assert session.ctx.network.traffic.received.tolist() == [3 * message, message, message, message]


def test_masks_are_a_function_of_seed_and_worker(lab):
    first, again, other = (DisPFL().init(lab.opened(lab.tiny(DisPFL(), seed=seed)).ctx) for seed in (1, 1, 2))
    name = "mask.representation.fc1.weight"
    assert torch.equal(first.params[name], again.params[name])
    assert not torch.equal(first.params[name], other.params[name])


@pytest.mark.parametrize("regrow", ["gradient", "random"])
def test_masks_do_not_depend_on_how_many_workers_are_ranked_together(lab, monkeypatch, regrow):
    kind = DisPFL(density=0.4, regrow=regrow, epochs=1)
    session = lab.opened(lab.tiny(kind, rounds=2, model="mlp:9"))
    together = lab.states(session)[-1]
    monkeypatch.setitem(ranking._AT_ONCE, "cpu", 1)
    for name, leaf in lab.states(session)[-1].params.items():
        assert torch.equal(leaf, together.params[name]), name


def test_statistics_are_averaged_without_a_mask(lab):
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()
    session = lab.opened(lab.tiny(DisPFL(), model=net, head="3"))
    kind, mean = session.experiment.algorithm, "representation.1.running_mean"
    state = kind.init(session.ctx)
    own = torch.arange(20.0, dtype=torch.float64).view(4, 5)
    mixed = kind.mix(replace(state, buffers={**state.buffers, mean: own}), 0, session.ctx).buffers[mean]
    torch.testing.assert_close(mixed, torch.from_numpy(session.mixing.rows(0).dense()) @ own)
