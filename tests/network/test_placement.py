import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.errors import UserError
from manyheads.network.placement import blocks, crossings, owners
from manyheads.topology import build_mixing


@given(st.integers(1, 60), st.integers(1, 60))
def test_blocks_share_the_workers_out(workers: int, processes: int) -> None:
    if processes > workers:
        with pytest.raises(UserError, match=f"{processes} processes for {workers} workers: start at most {workers}"):
            blocks(workers, processes)
        return
    placement = blocks(workers, processes)
    assert [worker for block in placement for worker in block] == list(range(workers))
    sizes = [len(block) for block in placement]
    assert len(sizes) == processes and max(sizes) - min(sizes) <= 1


def test_who_is_hosted_by_nobody() -> None:
    assert owners((range(3, 5), range(1)), 6).tolist() == [1, -1, -1, 0, 0, -1]


def test_a_ring_of_128_over_4_processes_sends_8_rows() -> None:
    """Two ends of every block, each to one other process."""
    owner = owners(blocks(128, 4), 128)
    destinations, workers = crossings(build_mixing("ring", 128).rows(0), owner)
    assert len(workers) == 8
    assert sorted(workers.tolist()) == [0, 31, 32, 63, 64, 95, 96, 127]
    assert np.bincount(destinations).tolist() == [2, 2, 2, 2]


@given(st.integers(2, 12), st.integers(1, 5), st.sampled_from(["ring", "random:0.5", "full", "star", "exponential"]))
def test_a_row_crosses_once_to_every_process_that_needs_it(workers: int, processes: int, graph: str) -> None:
    processes = min(processes, workers)
    owner = owners(blocks(workers, processes), workers)
    matrix = build_mixing(graph, workers, seed=3).rows(0)
    links = nx.from_numpy_array(matrix.dense() != 0)
    expected = {
        (owner[a], b) for one, other in links.edges for a, b in ((one, other), (other, one)) if owner[a] != owner[b]
    }
    found = list(zip(*crossings(matrix, owner), strict=True))
    assert set(found) == expected and len(found) == len(expected) and found == sorted(found)
