"""Graphs of a user's own: what is named is what is mixed, in one text, with weights and by round."""

import re
from functools import reduce

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from manyheads.errors import UserError
from manyheads.topology import brief, build_mixing, check_agreement, parse_graph, spectral

patient = settings(deadline=None)
"""A busy machine is no failure."""


def matrix(spec: str, num_workers: int, round: int = 0, **options) -> np.ndarray:
    return build_mixing(spec, num_workers, **options).rows(round).dense()


def as_links(P: np.ndarray) -> str:
    """As the guide writes a matrix of one's own."""
    return "links:" + ",".join(f"{i}-{j}={P[i, j]}" for i, j in np.argwhere(np.triu(P, 1) > 0))


@patient
@given(st.integers(2, 12), st.data())
def test_named_links_are_the_graph_they_name(num_workers, data):
    """However often, in whatever order and direction; uniform weights suit those where all degrees are one."""
    pair = st.tuples(*[st.integers(0, num_workers - 1)] * 2).filter(lambda link: link[0] != link[1])
    others = data.draw(st.lists(pair))
    named = [*others, *((k + 1, k) for k in range(num_workers - 1))]
    spec = "links:" + ",".join(f"{i}-{j}" for i, j in named)
    expected = nx.Graph(named)
    linked = nx.to_numpy_array(expected, nodelist=range(num_workers)) + np.eye(num_workers) > 0
    assert np.array_equal(matrix(spec, num_workers) > 0, linked)
    assert parse_graph(spec).balanced == nx.is_regular(expected)
    assert parse_graph(parse_graph(spec).spec) == parse_graph(spec)


@patient
@given(st.integers(2, 9), st.integers(0, 99))
def test_a_matrix_of_ones_own_is_mixed_as_it_is(num_workers, seed):
    """Any symmetric doubly stochastic P: a mean of permutations and their inverses."""
    rng = np.random.default_rng(seed)
    P = np.zeros((num_workers, num_workers))
    shares = rng.dirichlet(np.ones(4))
    for share, order in zip(
        shares, [np.roll(np.arange(num_workers), 1), *map(rng.permutation, [num_workers] * 3)], strict=True
    ):
        swap = np.eye(num_workers)[order]
        P += share * (swap + swap.T) / 2
    assert parse_graph(as_links(P)).weighted
    np.testing.assert_allclose(matrix(as_links(P), num_workers), P, atol=1e-15)
    assert build_mixing(as_links(P), num_workers).doubly_stochastic


def test_rounds_follow_each_other_and_begin_anew():
    """Two matchings of four workers: neither connects them, both together make them one in two rounds."""
    mixing = build_mixing("links:1-0,2-3/0-2,1-3", 4, weights="metropolis")
    assert mixing.period == 2
    first, second, third = (mixing.rows(round).dense() for round in range(3))
    assert first[0].tolist() == [0.5, 0.5, 0, 0]
    assert second[0].tolist() == [0.5, 0, 0.5, 0]
    assert np.array_equal(first, third)
    np.testing.assert_allclose(second @ first, np.full((4, 4), 0.25))
    assert spectral(mixing).rho == pytest.approx(0, abs=1e-12)


def test_a_worker_without_links_in_a_round_keeps_what_it_has():
    """And its weights are a row's, not a period's."""
    assert matrix("links:0-1=0.7/1-2=0.7", 3)[2].tolist() == [0, 0, 1]


def test_uniform_weights_suit_a_period_if_they_suit_each_of_its_rounds():
    assert parse_graph("links:0-1,2-3/0-2,1-3").balanced
    assert not parse_graph("links:0-1,2-3/0-2,1-2").balanced
    assert not build_mixing("links:0-1,2-3/0-2,1-2", 4, weights="uniform").doubly_stochastic


def test_weights_that_use_a_row_up_leave_nothing_on_the_diagonal():
    assert np.diag(matrix("links:0-1=0.5,1-2=0.5,0-2=0.5", 3)).tolist() == [0, 0, 0]
    third = repr(float(np.float32(1 / 3)))
    spec = "links:" + ",".join(f"{i}-{j}={third}" for i in range(4) for j in range(i))
    assert np.diag(matrix(spec, 4)).tolist() == [0, 0, 0, 0]


@patient
@given(st.integers(2, 12), st.sets(st.integers(1, 12)))
def test_one_matrix_for_all_rounds_is_refused_just_where_it_never_brings_agreement(num_workers, others):
    """Everyone hears those at some distances on a circle, alike; at the distance of a whole circle that is itself."""
    distances = {1} | {distance for distance in others if distance <= num_workers}
    circle = np.roll(np.eye(num_workers), 1, axis=0)
    P = sum(np.linalg.matrix_power(circle, distance) for distance in distances) / len(distances)
    P = (P + P.T) / 2
    mixing = build_mixing(as_links(P), num_workers)
    if spectral(mixing).rho < 1 - 1e-9:
        check_agreement(mixing)
    else:
        with pytest.raises(UserError, match=r"camps that at most exchange models, .* can never agree: give links"):
            check_agreement(mixing)


@patient
@given(st.data(), st.integers(2, 6), st.integers(1, 3))
def test_rounds_that_change_are_refused_just_where_they_never_bring_agreement(data, num_workers, period):
    """In each round some pairs exchange their models or mix them; the others keep what they have."""
    rounds = []
    for _ in range(period):
        order = data.draw(st.permutations(range(num_workers)))
        pairs = [*zip(order[::2], order[1::2], strict=False)][: data.draw(st.integers(1, num_workers // 2))]
        rounds.append(",".join(f"{i}-{j}={data.draw(st.sampled_from([1, 0.5]))}" for i, j in pairs))
    try:
        mixing = build_mixing("links:" + "/".join(rounds), num_workers)
    except UserError as refused:
        assert "not connected" in str(refused)
        assume(False)
    product = reduce(np.matmul, (mixing.rows(round).dense() for round in range(period)))
    if np.sort(np.abs(np.linalg.eigvals(product)))[-2] < 1 - 1e-6:
        check_agreement(mixing)
    else:
        with pytest.raises(UserError, match="can never agree"):
            check_agreement(mixing)


def test_models_that_are_exchanged_now_may_be_mixed_later():
    check_agreement(build_mixing("links:0-1=1/0-1=0.5", 2))
    with pytest.raises(UserError, match="can never agree"):
        check_agreement(build_mixing("links:0-1=1/1-2=1", 3))
    check_agreement(build_mixing("links:0-1=0.5,1-2=0.5,2-3=0.5,0-3=0.5", 4, link_failure=0.1))


def test_a_failed_links_weight_stays_with_both_ends():
    whole = matrix("links:0-1=0.5,1-2=0.25,0-2=0.25", 3)
    failing = build_mixing("links:0-1=0.5,1-2=0.25,0-2=0.25", 3, link_failure=0.5)
    for round in range(20):
        P = failing.rows(round).dense()
        np.testing.assert_allclose([P.sum(0), P.sum(1)], 1)
        assert np.array_equal(P, P.T)
        kept = (P > 0) & ~np.eye(3, dtype=bool)
        assert np.array_equal(P[kept], whole[kept])


@pytest.mark.parametrize("link", ["1-1", "0-4"])
def test_a_named_link_joins_two_of_the_workers(link):
    with pytest.raises(
        UserError, match=f"{link} does not link two of the workers 0 to 3: link others, or ask for more"
    ):
        build_mixing(f"links:0-1,1-2,2-3,{link}", 4)


def test_many_named_links_are_shown_briefly():
    assert brief("links:0-1,1-2") == "links:0-1,1-2"
    assert brief("links:2-1=.5,1-0=5e-1") == "links:0-1=0.5,1-2=0.5"
    path = ",".join(f"{k}-{k + 1}" for k in range(9))
    assert re.fullmatch(r"links:0-1,1-2,2-3,3-4,\.\.\. \(9, [0-9a-f]{4}\)", brief(f"links:{path}"))
    assert brief(f"links:{path}/0-2").startswith("links:0-1,1-2,2-3,3-4,... (10 in 2 rounds, ")
    other = path.replace("8-9", "7-9")
    assert brief(f"links:{other}") != brief(f"links:{path}"), "they begin alike"
    assert brief("server") == "server"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("links", "as in 'links:0-1,1-2,0-2'"),
        ("links:0-1,1", "as in 'links:0-1,1-2,0-2'"),
        ("links:0-1, 1-2", "as in 'links:0-1,1-2,0-2'"),
        ("links:0-1/", "with '/'"),
        ("links:0-1=0,1-2=0.5", "with weights above 0 and up to 1"),
        ("links:0-1=1.5,1-2=0.5", "with weights above 0 and up to 1"),
        ("links:0-1=0.1.2,1-2=0.5", "with weights above 0 and up to 1"),
        ("links:0-1=0.3,1-2", "only some of the links have a weight"),
        ("links:0-1=0.3,1-2=0.3/0-2", "only some of the links have a weight"),
        ("links:0-1=0.3,1-0=0.4,1-2=0.5", "0-1 has two weights in a round"),
        ("links:0-1=0.7,1-2=0.7", "worker 1's weights come to 1.4: give at most 1"),
        ("links:0-1,0-2/1-3", "does not link two of the workers 0 to 2"),
        ("links:0-1/1-0", "is not connected"),
    ],
)
def test_wrong_links_are_refused_in_one_line(spec, says):
    with pytest.raises(UserError) as error:
        build_mixing(spec, 3)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
