"""Specs and the links they stand for, against networkx's own graphs."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.errors import UserError
from manyheads.topology.graphs import (
    Graph,
    Links,
    connected,
    draw_links,
    fixed_links,
    grid_shape,
    parse_graph,
    steps_from_first,
)

patient = settings(deadline=None)
"""A busy machine is no failure."""


def as_networkx(links: Links) -> nx.DiGraph:
    graph = nx.DiGraph(zip(links.sender.tolist(), links.receiver.tolist(), strict=True))
    graph.add_nodes_from(range(links.num_workers))
    return graph


def circulant(n: int) -> nx.Graph:
    return nx.circulant_graph(n, [2**j for j in range(n.bit_length()) if 2**j < n])


def torus(n: int) -> nx.Graph:
    rows, columns = grid_shape(n)
    grid = nx.grid_2d_graph(rows, columns, periodic=True)
    return nx.relabel_nodes(grid, {(r, c): r * columns + c for r, c in grid})


@pytest.mark.parametrize("num_workers", [4, 9, 12, 16])
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("ring", nx.cycle_graph),
        ("full", nx.complete_graph),
        ("star", lambda n: nx.star_graph(n - 1)),
        ("exponential", circulant),
        ("torus", torus),
    ],
)
def test_fixed_graphs_are_what_networkx_calls_them(spec, expected, num_workers):
    (links,) = fixed_links(parse_graph(spec), num_workers)
    ours, theirs = as_networkx(links), expected(num_workers).to_directed()
    theirs.remove_edges_from(list(nx.selfloop_edges(theirs)))
    assert set(ours.edges) == set(theirs.edges)


def test_one_peer_exponential_doubles_its_distance_round_by_round():
    rounds = fixed_links(parse_graph("one-peer-exponential"), 8)
    distances = [set((links.receiver - links.sender) % 8) for links in rounds]
    assert distances == [{1}, {2}, {4}]


@pytest.mark.parametrize("spec", ["ring", "full", "star", "exponential", "one-peer-exponential"])
def test_two_workers_share_one_link(spec):
    (links,) = fixed_links(parse_graph(spec), 2)
    assert links.receiver.tolist() == [0, 1]
    assert links.sender.tolist() == [1, 0]


@pytest.mark.parametrize("num_workers", range(3, 13))
def test_regular_graphs_are_regular_for_every_possible_degree(num_workers):
    for degree in range(2, num_workers):
        if degree * num_workers % 2 == 0:
            links = draw_links(Graph("regular", degree), num_workers, seed=1)
            assert (np.bincount(links.receiver, minlength=num_workers) == degree).all()
            assert nx.is_connected(as_networkx(links).to_undirected(reciprocal=True))


def test_regular_graphs_reach_every_pair_equally_often():
    n, degree, draws = 10, 3, 600
    seen = np.zeros((n, n))
    for seed in range(draws):
        links = draw_links(Graph("regular", degree), n, seed)
        seen[links.receiver, links.sender] += 1
    share = seen[~np.eye(n, dtype=bool)] / draws
    assert np.abs(share - degree / (n - 1)).max() < 0.1


def test_in_neighbours_are_that_many_different_others():
    links = draw_links(Graph("in-neighbours", 10), 40, seed=1)
    heard = np.zeros((40, 40), dtype=int)
    np.add.at(heard, (links.receiver, links.sender), 1)
    assert heard.max() == 1
    assert np.trace(heard) == 0
    assert (heard.sum(1) == 10).all()


@pytest.mark.parametrize("spec", ["random:0.3", "regular:4", "in-neighbours:4"])
def test_a_draw_depends_on_seed_and_round_alone(spec):
    def draw(seed: int, round: int) -> list[int]:
        links = draw_links(parse_graph(spec), 16, seed, round)
        return (links.receiver * 16 + links.sender).tolist()

    assert draw(1, 0) == draw(1, 0)
    assert draw(1, 0) != draw(2, 0)
    assert draw(1, 0) != draw(1, 1)


def test_sparse_random_graphs_are_drawn_until_connected():
    for seed in range(30):
        links = draw_links(Graph("random", 0.25), 8, seed)
        assert nx.is_connected(as_networkx(links).to_undirected())


def test_a_graph_that_is_seldom_connected_is_refused_at_once_or_drawn_for_long():
    """In round 0 nothing is lost; later a run would be."""
    seldom = Graph("random", 0.07)
    with pytest.raises(UserError, match="no connected graph in 100 draws"):
        draw_links(seldom, 12, seed=4)
    links = draw_links(seldom, 12, seed=4, round=1)
    assert connected(12, links.receiver, links.sender)


def test_the_density_of_random_graphs_is_their_probability():
    links = draw_links(Graph("random", 0.25), 300, seed=1)
    assert len(links.receiver) / (300 * 299) == pytest.approx(0.25, abs=0.01)


@patient
@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n * n - 1), max_size=40))))
def test_connected_means_strongly_connected(case):
    num_workers, codes = case
    links = Links(num_workers, *np.divmod(np.array(codes, dtype=np.int64), num_workers))
    assert connected(num_workers, links.receiver, links.sender) == nx.is_strongly_connected(as_networkx(links))
    away = nx.single_source_shortest_path_length(as_networkx(links), 0)
    steps = steps_from_first(num_workers, links.receiver, links.sender)
    assert steps.tolist() == [away.get(worker, -1) for worker in range(num_workers)]


@patient
@given(st.sampled_from(["random", "regular", "in-neighbours"]), st.floats(0.001, 1), st.integers(1, 500))
def test_specs_survive_being_written_down(family, probability, count):
    graph = Graph(family, probability if family == "random" else count)
    assert parse_graph(str(graph)) == graph


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("rong", "Did you mean 'ring'?"),
        ("", "Allowed: exponential"),
        ("ring:3", "write 'ring'"),
        ("random", "as in 'random:0.25'"),
        ("random:0", "above 0 and up to 1"),
        ("random:1.5", "above 0 and up to 1"),
        ("random:nan", "above 0 and up to 1"),
        ("regular:2.5", "a whole number from 1 up"),
        ("regular:-4", "a whole number from 1 up"),
        ("in-neighbours:", "as in 'in-neighbours:10'"),
    ],
)
def test_wrong_specs_are_refused_in_one_line(spec, says):
    with pytest.raises(UserError) as error:
        parse_graph(spec)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("spec", "num_workers", "says"),
    [
        ("regular:5", 7, "use regular:6"),
        ("regular:3", 3, "at most regular:2"),
        ("regular:1", 4, "use regular:2 or more"),
        ("in-neighbours:2", 2, "^in-neighbours:2 on 2 workers: at most in-neighbours:1 is possible.$"),
        ("random:0.01", 100, "use random:0.05 or more"),
        ("in-neighbours:1", 50, "use in-neighbours:4 or more, or --redraw"),
    ],
)
def test_impossible_draws_say_what_to_do(spec, num_workers, says):
    with pytest.raises(UserError, match=says):
        draw_links(parse_graph(spec), num_workers, seed=1)


@pytest.mark.parametrize(
    ("num_workers", "says"), [(13, "use 12 or 14 workers"), (3, "use 4 workers"), (2, "use 4 workers")]
)
def test_a_torus_needs_a_grid(num_workers, says):
    with pytest.raises(UserError, match=says):
        fixed_links(parse_graph("torus"), num_workers)
