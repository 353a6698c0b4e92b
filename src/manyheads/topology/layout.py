"""Where to draw the workers, and which of them to join by a line."""

import numpy as np

from manyheads.topology.graphs import distinct, grid_shape
from manyheads.topology.rows import Mixing

MOST_SPRINGS = 400
"""With more workers a random graph is a blur in any layout, and a circle costs nothing."""


def edges(mixing: Mixing) -> list[tuple[int, int]]:
    """The pairs of workers that exchange anything in round 0, in either direction: each once, (i, j) with i < j."""
    rows = mixing.rows(0)
    low, high = np.minimum(rows.receivers, rows.columns), np.maximum(rows.receivers, rows.columns)
    # A pair as one number: that is sorted many times faster.
    pairs = distinct((low * mixing.num_workers + high)[low < high])
    return [divmod(pair, mixing.num_workers) for pair in pairs.tolist()]


def positions(mixing: Mixing) -> np.ndarray:
    """A place for every worker, the same every time: [N, 2] within -1..1.

    A grid for a torus, a hub in the middle for a star, springs for random graphs (in round 0) and links of the user's
    own, and a circle for others.
    """
    num_workers = mixing.num_workers
    family = mixing.name.partition(":")[0]
    if family == "torus":
        rows, columns = grid_shape(num_workers)
        y, x = np.meshgrid(np.linspace(1, -1, rows), np.linspace(-1, 1, columns), indexing="ij")
        return np.stack([x.ravel(), y.ravel()], axis=1)
    if family == "star":
        return np.concatenate([np.zeros((1, 2)), _circle(num_workers - 1)])
    if family in ("random", "regular", "in-neighbours", "links") and num_workers <= MOST_SPRINGS:
        return _springs(num_workers, edges(mixing))
    return _circle(num_workers)


def _circle(count: int) -> np.ndarray:
    """Evenly round the clock, from twelve."""
    angle = 2 * np.pi * np.arange(count) / count
    return np.stack([np.sin(angle), np.cos(angle)], axis=1)


def _springs(num_workers: int, pairs: list[tuple[int, int]]) -> np.ndarray:
    import networkx

    graph = networkx.Graph(pairs)
    graph.add_nodes_from(range(num_workers))
    # Starting from the circle leaves nothing to chance; the seed only keeps networkx off numpy's global generator.
    start = dict(enumerate(_circle(num_workers)))
    places = networkx.spring_layout(graph, pos=start, iterations=100, seed=0)
    return np.stack([places[worker] for worker in range(num_workers)])
