"""Mixing matrices of graphs: weights, policies, redraws, failures, and the theorems they must satisfy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.errors import UserError
from manyheads.topology import WEIGHTS, build_mixing, check, spectral
from manyheads.topology.mixing import without

patient = settings(deadline=None)
"""A busy machine is no failure."""

UNDIRECTED = ["ring", "full", "star", "exponential", "torus", "random", "regular"]


@st.composite
def graphs(draw: st.DrawFn, families: list[str]) -> tuple[str, int]:
    """A spec and a number of workers on which it is possible."""
    family = draw(st.sampled_from(families))
    if family == "torus":
        return family, draw(st.integers(2, 5)) * draw(st.integers(2, 5))
    if family == "regular":
        num_workers = draw(st.integers(3, 16))
        degree = draw(st.integers(2, num_workers - 1).filter(lambda d: d * num_workers % 2 == 0))
        return f"regular:{degree}", num_workers
    num_workers = draw(st.integers(2, 20))
    if family == "random":
        return f"random:{draw(st.sampled_from([0.4, 0.7, 1.0]))}", num_workers
    if family == "in-neighbours":
        return f"in-neighbours:{draw(st.integers(1, num_workers - 1))}", num_workers
    return family, num_workers


def pattern(matrix: np.ndarray) -> np.ndarray:
    """Adjacency without the diagonal, as numbers."""
    return ((matrix > 0) & ~np.eye(len(matrix), dtype=bool)).astype(float)


@pytest.mark.parametrize("graph", ["ring", "full", "star", "exponential", "one-peer-exponential", "random:0.5"])
def test_a_lone_worker_hears_itself_alone(graph):
    mixing = build_mixing(graph, 1)
    rows = mixing.rows(3)
    assert (rows.columns.tolist(), rows.weights.tolist()) == ([0], [1.0])
    assert spectral(mixing).rho == 0


@patient
@given(graphs(UNDIRECTED), st.sampled_from(["metropolis", "max-degree", "lazy"]), st.integers(0, 99))
def test_undirected_graphs_give_a_symmetric_doubly_stochastic_matrix(graph, weights, seed):
    mixing = build_mixing(*graph, weights=weights, seed=seed)
    matrix = mixing.rows(0).dense()
    assert mixing.doubly_stochastic
    assert mixing.notes == ()
    assert (matrix >= 0).all()
    assert np.array_equal(matrix, matrix.T)
    np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-12)
    check(mixing)


@patient
@given(
    graphs([*UNDIRECTED, "one-peer-exponential", "in-neighbours"]), st.sampled_from(sorted(WEIGHTS)), st.integers(0, 9)
)
def test_rows_are_well_formed(graph, weights, round):
    redraw = graph[0].startswith("in-neighbours")
    rows = build_mixing(*graph, weights=weights, redraw=redraw, allow_row_stochastic=True).rows(round)
    n = graph[1]
    assert rows.offsets[0] == 0
    assert rows.offsets[-1] == len(rows.columns) == len(rows.weights)
    assert (np.diff(rows.receivers * n + rows.columns) > 0).all()
    assert np.count_nonzero(rows.receivers == rows.columns) == n
    assert rows.present.all()
    np.testing.assert_allclose(rows.dense().sum(1), 1, atol=1e-12)


@patient
@given(graphs(UNDIRECTED), st.integers(0, 99))
def test_weights_follow_their_formulas(graph, seed):
    matrix = {name: build_mixing(*graph, weights=name, seed=seed).rows(0).dense() for name in WEIGHTS}
    n = graph[1]
    adjacency = pattern(matrix["metropolis"])
    degree = adjacency.sum(1)
    metropolis = adjacency / (1 + np.maximum.outer(degree, degree))
    metropolis += np.diag(1 - metropolis.sum(1))
    expected = {
        "metropolis": metropolis,
        "uniform": (adjacency + np.eye(n)) / (1 + degree[:, None]),
        "max-degree": np.eye(n) - (np.diag(degree) - adjacency) / (1 + degree.max()),
        "lazy": (np.eye(n) + metropolis) / 2,
    }
    for name in WEIGHTS:
        np.testing.assert_allclose(matrix[name], expected[name], atol=1e-12, err_msg=name)


@patient
@given(graphs([*UNDIRECTED, "one-peer-exponential"]), st.integers(0, 5), st.integers(0, 99))
def test_mixing_keeps_the_mean_and_contracts_at_the_second_singular_value(graph, round, seed):
    mixing = build_mixing(*graph, seed=seed)
    x = np.random.default_rng(seed).normal(size=(graph[1], 3))
    matrix = mixing.rows(round).dense()
    mixed = matrix @ x
    np.testing.assert_allclose(mixed.mean(0), x.mean(0), atol=1e-12)
    second = np.linalg.svd(matrix, compute_uv=False)[1]
    before, after = (np.linalg.norm(v - v.mean(0)) for v in (x, mixed))
    assert after <= second * before + 1e-12
    if mixing.period == 1:
        assert spectral(mixing).rho == pytest.approx(second, abs=1e-9)


@patient
@given(graphs(["random", "star"]), st.integers(0, 99))
def test_uniform_weights_keep_the_degree_weighted_mean(graph, seed):
    mixing = build_mixing(*graph, weights="uniform", seed=seed)
    rows = mixing.rows(0)
    size = np.diff(rows.offsets)  # degree + 1
    x = np.random.default_rng(seed).normal(size=graph[1])
    assert np.average(rows.dense() @ x, weights=size) == pytest.approx(np.average(x, weights=size))


def test_uniform_weights_lose_the_plain_mean_and_say_so():
    mixing = build_mixing("random:0.25", 32, weights="uniform")
    x = np.arange(32.0) ** 2
    assert abs((mixing.rows(0).dense() @ x).mean() - x.mean()) > 0.1
    assert not mixing.doubly_stochastic
    assert len(mixing.notes) == 1
    assert "random:0.25" in mixing.notes[0]
    assert "row-stochastic" in mixing.notes[0]


@pytest.mark.parametrize("graph", ["ring", "full", "torus", "exponential", "regular:4"])
def test_uniform_weights_on_regular_graphs_are_metropolis(graph):
    uniform, metropolis = (build_mixing(graph, 16, weights=weights) for weights in ("uniform", "metropolis"))
    assert uniform.notes == ()
    assert np.array_equal(uniform.rows(0).dense(), metropolis.rows(0).dense())


@pytest.mark.parametrize(("graph", "num_neighbours"), [("ring", 2), ("full", 99), ("torus", 4), ("regular:6", 6)])
def test_regular_graphs_have_one_weight_to_the_last_bit(graph, num_neighbours):
    assert set(build_mixing(graph, 100).rows(0).weights) == {1 / (num_neighbours + 1)}


@pytest.mark.parametrize("num_workers", [2, 4, 8, 16, 64])
def test_one_period_of_one_peer_exponential_averages_exactly(num_workers):
    mixing = build_mixing("one-peer-exponential", num_workers)
    product = np.eye(num_workers)
    for round in range(mixing.period or 0):
        matrix = mixing.rows(round).dense()
        assert set(matrix.ravel()) <= {0.0, 0.5}
        product = matrix @ product
    assert (product == 1 / num_workers).all()


def test_periods():
    assert build_mixing("ring", 8).period == 1
    assert build_mixing("random:0.5", 8).period == 1
    assert build_mixing("random:0.5", 8, redraw=True).period is None
    assert build_mixing("ring", 8, link_failure=0.1).period is None
    cycle = build_mixing("one-peer-exponential", 12)
    assert cycle.period == 4
    assert cycle.rows(1) is cycle.rows(5)
    assert not np.array_equal(cycle.rows(1).columns, cycle.rows(2).columns)


def test_static_graphs_are_built_once():
    mixing = build_mixing("random:0.5", 8)
    assert mixing.rows(0) is mixing.rows(17)


@pytest.mark.parametrize("graph", ["random:0.3", "regular:4", "in-neighbours:3"])
def test_redraw_gives_another_graph_each_round_and_the_same_one_twice(graph):
    first, again, other = (
        build_mixing(graph, 16, redraw=True, seed=seed, allow_row_stochastic=True) for seed in (1, 1, 2)
    )
    matrices = [first.rows(round).dense() for round in range(5)]
    assert all(not np.array_equal(a, b) for i, a in enumerate(matrices) for b in matrices[:i])
    for round in (4, 0, 2):
        assert np.array_equal(again.rows(round).dense(), matrices[round])
    assert not np.array_equal(other.rows(0).dense(), matrices[0])
    static = build_mixing(graph, 16, seed=1, allow_row_stochastic=True)
    assert np.array_equal(static.rows(3).dense(), static.rows(0).dense())


def test_redrawn_undirected_graphs_are_connected_in_every_round():
    mixing = build_mixing("random:0.25", 8, redraw=True)
    for round in range(20):
        matrix = mixing.rows(round).dense()
        assert (np.linalg.matrix_power(matrix, 8) > 0).all(), round


def test_redrawn_in_neighbours_need_not_be_connected_in_one_round():
    mixing = build_mixing("in-neighbours:1", 30, redraw=True, weights="uniform")
    assert (np.diff(mixing.rows(0).offsets) == 2).all()
    with pytest.raises(UserError, match="no connected graph"):
        build_mixing("in-neighbours:1", 30, weights="uniform")


def test_directed_graphs_need_permission():
    with pytest.raises(UserError, match="--weights uniform"):
        build_mixing("in-neighbours:4", 16)
    for mixing in (
        build_mixing("in-neighbours:4", 16, weights="uniform"),
        build_mixing("in-neighbours:4", 16, allow_row_stochastic=True),
    ):
        assert mixing.directed
        assert not mixing.doubly_stochastic
        assert "in-neighbours:4 is directed" in mixing.notes[0]
        np.testing.assert_allclose(mixing.rows(0).weights, 1 / 5, atol=1e-15)


def test_failures_on_one_way_links_need_permission():
    assert build_mixing("one-peer-exponential", 8).doubly_stochastic
    with pytest.raises(UserError, match="failing links of one-peer-exponential"):
        build_mixing("one-peer-exponential", 8, link_failure=0.1)
    mixing = build_mixing("one-peer-exponential", 32, link_failure=0.3, allow_row_stochastic=True)
    assert not mixing.doubly_stochastic
    matrix = mixing.rows(0).dense()
    assert set(matrix.diagonal()) == {0.5, 1.0}
    np.testing.assert_allclose(matrix.sum(1), 1)


@patient
@given(
    graphs(UNDIRECTED),
    st.sampled_from(["metropolis", "max-degree", "lazy"]),
    st.sampled_from([0.0, 0.2, 0.9]),
    st.sampled_from([0.0, 0.3, 0.95]),
    st.integers(0, 1000),
)
def test_failures_keep_a_doubly_stochastic_matrix_doubly_stochastic(
    graph, weights, link_failure, worker_failure, round
):
    whole = build_mixing(*graph, weights=weights).rows(round).dense()
    mixing = build_mixing(*graph, weights=weights, link_failure=link_failure, worker_failure=worker_failure)
    rows = mixing.rows(round)
    matrix = rows.dense()
    assert mixing.doubly_stochastic
    assert np.array_equal(matrix, matrix.T)
    assert (matrix >= 0).all()
    np.testing.assert_allclose(matrix.sum(0), 1, atol=1e-12)
    np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-12)
    assert np.array_equal(matrix[~rows.present], np.eye(graph[1])[~rows.present])
    links = pattern(matrix) > 0
    assert np.array_equal(matrix[links], whole[links])
    assert len(rows.columns) - graph[1] == links.sum()
    if worker_failure == 0:
        assert rows.present.all()


@patient
@given(graphs(["random", "star", "in-neighbours"]), st.integers(0, 1000))
def test_failures_keep_rows_summing_to_one(graph, round):
    redraw = graph[0].startswith("in")
    mixing = build_mixing(*graph, weights="uniform", redraw=redraw, link_failure=0.3, worker_failure=0.2)
    rows = mixing.rows(round)
    np.testing.assert_allclose(rows.dense().sum(1), 1, atol=1e-12)
    assert np.array_equal(rows.dense()[~rows.present], np.eye(graph[1])[~rows.present])


def test_links_fail_as_often_as_asked_and_independently():
    mixing = build_mixing("ring", 50, link_failure=0.2)
    alive = np.array([pattern(mixing.rows(round).dense())[np.arange(50), np.arange(-1, 49)] for round in range(200)])
    assert 1 - alive.mean() == pytest.approx(0.2, abs=0.015)
    assert np.abs(np.corrcoef(alive.T) - np.eye(50)).max() < 0.35
    assert alive.mean(0).min() > 0.65


def test_workers_are_absent_as_often_as_asked():
    mixing = build_mixing("ring", 50, worker_failure=0.3)
    present = np.array([mixing.rows(round).present for round in range(200)])
    assert 1 - present.mean() == pytest.approx(0.3, abs=0.02)
    assert present.mean(0).min() > 0.5
    assert not np.array_equal(present[0], present[1])


def test_somebody_is_always_present():
    mixing = build_mixing("ring", 3, worker_failure=0.99)
    assert min(int(mixing.rows(round).present.sum()) for round in range(100)) == 1


@patient
@given(st.integers(0, 50), st.integers(0, 50))
def test_failures_are_a_function_of_seed_and_round(seed, round):
    def rows(order: list[int], link_failure: float = 0.4) -> np.ndarray:
        mixing = build_mixing("ring", 30, link_failure=link_failure, worker_failure=0.1, seed=seed)
        return [mixing.rows(r).dense() for r in order][-1]

    assert np.array_equal(rows([round]), rows([round + 1, 3, round]))
    assert not np.array_equal(rows([round]), rows([round + 1]))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"graph": "ring", "redraw": True}, "leave out --redraw"),
        ({"graph": "torus", "num_workers": 7}, "use 6 or 8 workers"),
        ({"graph": "in-neighbours:8", "weights": "uniform"}, "at most in-neighbours:7"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options, says):
    with pytest.raises(UserError) as error:
        build_mixing(**{"num_workers": 8, **options})
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_the_weight_of_those_who_are_away_stays_with_their_neighbours() -> None:
    whole = build_mixing("random:0.6", 6, link_failure=0.2, seed=1)
    for round in range(4):
        before, after = whole.rows(round).dense(), without(whole, [1, 4]).rows(round).dense()
        there = [0, 2, 3, 5]
        kept = after[np.ix_(there, there)]
        assert np.array_equal(after[[1, 4]], np.eye(6)[[1, 4]])
        off = ~np.eye(4, dtype=bool)
        assert np.array_equal(kept[off], before[np.ix_(there, there)][off])
        np.testing.assert_allclose([kept.sum(0), kept.sum(1)], 1)
    assert without(whole, [1, 4]).rows(0).present.tolist() == [True, False, True, True, False, True]


def test_who_is_away_and_who_fails_are_both_absent() -> None:
    failing = build_mixing("full", 6, worker_failure=0.5, seed=1)
    for round in range(8):
        there = np.array([True, False, True, True, True, True])
        assert np.array_equal(without(failing, [1]).rows(round).present, failing.rows(round).present & there)


def test_without_some_workers_one_way_links_no_longer_keep_the_mean() -> None:
    rest = without(build_mixing("one-peer-exponential", 8), [1])
    assert not rest.doubly_stochastic
    assert not np.allclose(rest.rows(0).dense().sum(0), 1)
    assert without(build_mixing("ring", 8), [1]).doubly_stochastic


def test_links_fail_whoever_is_absent() -> None:
    """With the same lots no link would ever fail between workers that are there."""
    mixing = build_mixing("full", 3, link_failure=0.5, worker_failure=0.5, seed=1)
    whole = [rows for rows in map(mixing.rows, range(200)) if rows.present.all()]
    assert len(whole) > 5
    assert np.mean([len(rows.columns) - 3 for rows in whole]) == pytest.approx(3, abs=1)


def test_uniform_weights_leave_links_with_weights_of_their_own_as_they_are() -> None:
    mixing = build_mixing("links:0-1=0.3,1-2=0.5", 3, weights="uniform")
    assert mixing.doubly_stochastic and mixing.notes == ()
