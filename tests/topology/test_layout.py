"""Pictures of graphs: every worker has a place of its own, the same every time."""

import numpy as np
import pytest

from manyheads.topology import build_mixing, edges, positions

SPECS = [
    "ring",
    "full",
    "torus",
    "exponential",
    "star",
    "one-peer-exponential",
    "random:0.4",
    "regular:4",
    "in-neighbours:3",
]


@pytest.mark.parametrize("graph", SPECS)
def test_places_are_distinct_bounded_and_repeatable(graph):
    mixing = build_mixing(graph, 12, allow_row_stochastic=True)
    places = positions(mixing)
    assert places.shape == (12, 2)
    assert np.abs(places).max() <= 1 + 1e-9
    distance = np.linalg.norm(places[:, None] - places[None], axis=-1) + np.eye(12)
    assert distance.min() > 0.01
    assert np.array_equal(places, positions(build_mixing(graph, 12, allow_row_stochastic=True)))


def test_springs_leave_the_global_generator_alone():
    before = np.random.get_state(legacy=False)["state"]["pos"]  # noqa: NPY002
    positions(build_mixing("random:0.4", 12))
    assert np.random.get_state(legacy=False)["state"]["pos"] == before  # noqa: NPY002


def test_shapes():
    ring = positions(build_mixing("ring", 8))
    np.testing.assert_allclose(np.linalg.norm(ring, axis=1), 1)
    np.testing.assert_allclose(ring[:3], [[0, 1], [0.5**0.5, 0.5**0.5], [1, 0]], atol=1e-12)
    torus = positions(build_mixing("torus", 12))
    assert (len(np.unique(torus[:, 1])), len(np.unique(torus[:, 0]))) == (3, 4)
    np.testing.assert_allclose(positions(build_mixing("star", 5))[0], 0)
    assert positions(build_mixing("random:0.4", 12, link_failure=0.9)).shape == (12, 2), (
        "whoever is alone has a place too"
    )
    np.testing.assert_allclose(np.linalg.norm(positions(build_mixing("random:0.05", 500)), axis=1), 1)


def test_edges_name_each_pair_once():
    assert edges(build_mixing("ring", 4)) == [(0, 1), (0, 3), (1, 2), (2, 3)]
    assert edges(build_mixing("one-peer-exponential", 4)) == edges(build_mixing("ring", 4))
    full = build_mixing("full", 6, link_failure=0.5)
    present = full.rows(0).dense()
    assert edges(full) == [(i, j) for i in range(6) for j in range(i + 1, 6) if present[i, j] > 0]
