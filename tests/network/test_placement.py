import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.errors import UserError
from manyheads.network.placement import blocks, crossings, owners
from manyheads.topology import build_mixing


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 45))
def test_blocks_share_the_workers_out(load: list[int], processes: int) -> None:
    workers = len(load)
    if processes > workers:
        with pytest.raises(UserError, match=f"{processes} processes for {workers} workers?: start at most {workers}"):
            blocks(load, processes)
        return
    placement = blocks(load, processes)
    assert [worker for block in placement for worker in block] == list(range(workers))
    assert len(placement) == processes and all(placement)
    sizes = [len(block) for block in blocks([7] * workers, processes)]
    assert max(sizes) - min(sizes) <= 1


def test_blocks_are_cut_where_the_loads_are_nearest() -> None:
    assert blocks([30, 10, 10, 10], 2) == (range(1), range(1, 4))
    assert blocks([1, 1, 1, 1, 100], 2) == (range(4), range(4, 5))
    assert blocks([100, 1, 1, 1, 1], 3) == (range(1), range(1, 2), range(2, 5))


def test_who_is_hosted_by_nobody() -> None:
    assert owners((range(3, 5), range(1)), 6).tolist() == [1, -1, -1, 0, 0, -1]


def test_a_ring_of_128_over_4_processes_sends_8_rows() -> None:
    """Two ends of every block, each to one other process."""
    owner = owners(blocks([9] * 128, 4), 128)
    destinations, workers = crossings(build_mixing("ring", 128).rows(0), owner)
    assert len(workers) == 8
    assert sorted(workers.tolist()) == [0, 31, 32, 63, 64, 95, 96, 127]
    assert np.bincount(destinations).tolist() == [2, 2, 2, 2]


@given(st.integers(2, 12), st.integers(1, 5), st.sampled_from(["ring", "random:0.5", "full", "star", "exponential"]))
def test_a_row_crosses_once_to_every_process_that_needs_it(workers: int, processes: int, graph: str) -> None:
    processes = min(processes, workers)
    owner = owners(blocks([1] * workers, processes), workers)
    matrix = build_mixing(graph, workers, seed=3).rows(0)
    links = nx.from_numpy_array(matrix.dense() != 0)
    expected = {
        (owner[a], b) for one, other in links.edges for a, b in ((one, other), (other, one)) if owner[a] != owner[b]
    }
    found = list(zip(*crossings(matrix, owner), strict=True))
    assert set(found) == expected and len(found) == len(expected) and found == sorted(found)
