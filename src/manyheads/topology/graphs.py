"""Graph specs such as ``ring``, ``random:0.25`` or ``links:0-1,1-2``, and the links they stand for."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from manyheads.errors import UserError, unknown
from manyheads.randomness import generator
from manyheads.topology.own_links import OwnLinks, parse_links

Pairs = tuple[np.ndarray, np.ndarray]
"""(receivers, senders), each [pairs] int64, in any order."""


@dataclass(frozen=True)
class Graph:
    """A spec taken apart: ``random:0.25`` is ``Graph("random", 0.25)``."""

    family: str
    number: float | None = None
    own: OwnLinks | None = None
    """The links that a user names one by one."""

    def __str__(self) -> str:
        return str(self.own) if self.own else self.spec

    @property
    def spec(self) -> str:
        """The canonical text of this graph, whichever way it was written."""
        if self.own:
            return self.own.spec
        return self.family if self.number is None else f"{self.family}:{self.number}"

    @property
    def random(self) -> bool:
        """Whether the links are drawn."""
        return self.own is None and FAMILIES[self.family].draw is not None

    @property
    def directed(self) -> bool:
        """Whether a link carries one way only."""
        return self.own is None and FAMILIES[self.family].directed

    @property
    def weighted(self) -> bool:
        """Whether the links come with weights of their own."""
        return self.own is not None and self.own.weighted

    @property
    def balanced(self) -> bool:
        """Whether uniform weights are doubly stochastic on it: everyone hears, and is heard by, equally many."""
        return self.own.balanced if self.own else FAMILIES[self.family].balanced


@dataclass(frozen=True)
class Links:
    """Who hears whom: ``receiver[l]`` hears ``sender[l]``, sorted by receiver, then sender; nobody hears themselves.

    An undirected link stands twice, once for each direction.
    """

    num_workers: int
    receiver: np.ndarray
    sender: np.ndarray
    weight: np.ndarray | None = None
    """Their entries in P, if the user has given them, [links]."""


def parse_graph(spec: str) -> Graph:
    """Read a spec: a name, and after a colon a random graph's number or the user's own links."""
    family, colon, text = spec.partition(":")
    if family == "links":
        return Graph(family, own=parse_links(text))
    if family not in FAMILIES:
        raise unknown("graph", family, [*FAMILIES, "links"])
    kind = FAMILIES[family]
    if kind.draw is None:
        if colon:
            raise UserError(f"graph '{spec}': {family} takes no number: write '{family}'.")
        return Graph(family)
    probability = family == "random"
    try:
        number = float(text) if probability else int(text)
    except ValueError:
        number = math.nan
    if 0 < number <= (1 if probability else math.inf):
        return Graph(family, number)
    wanted = "a probability above 0 and up to 1" if probability else "a whole number from 1 up"
    raise UserError(f"graph '{spec}': {family} takes {wanted}, as in '{kind.example}'.")


def is_graph(spec: str) -> bool:
    """Whether a spec is a graph and not ``server`` or ``none``, which algorithms without a graph have instead."""
    return spec not in ("server", "none")


def brief(spec: str) -> str:
    """A spec for people: a long list of the user's own links is cut to the first few."""
    return str(parse_graph(spec)) if spec.startswith("links:") else spec


def fixed_links(graph: Graph, num_workers: int) -> list[Links]:
    """The rounds of one period of a graph that is not drawn."""
    if graph.own:
        graph.own.check(num_workers)
        return [_own_links(num_workers, *graph.own.arrays(round)) for round in range(len(graph.own.rounds))]
    period = FAMILIES[graph.family].period
    assert period is not None
    return [_links(num_workers, pairs, graph.directed) for pairs in period(num_workers)]


def draw_links(graph: Graph, num_workers: int, seed: int, round: int = 0, *, connect: bool = True) -> Links:
    """Draw a random graph, again and again until it is connected unless ``connect`` is False."""
    kind, rng = FAMILIES[graph.family], generator(seed, "graph", round=round)
    assert graph.number is not None and kind.draw is not None
    # In round 0, before anything is trained, a hopeless spec is refused soon; a later round is tried for long.
    draws = 100 if round == 0 else 100_000
    for _ in range(draws):
        links = _links(num_workers, kind.draw(num_workers, graph.number, rng), graph.directed)
        if not connect or connected(num_workers, links.receiver, links.sender):
            return links
    advice = kind.denser(num_workers)
    raise UserError(f"{graph} on {num_workers} workers gave no connected graph in {draws} draws: use {advice}.")


def connected(num_workers: int, receiver: np.ndarray, sender: np.ndarray) -> bool:
    """Whether every worker's news reaches every other, over any number of steps; [links], [links] -> bool."""
    to_all, to_one = ((receiver, sender), (sender, receiver))
    return all((steps_from_first(num_workers, to, start) >= 0).all() for to, start in (to_all, to_one))


def steps_from_first(num_workers: int, to: np.ndarray, start: np.ndarray) -> np.ndarray:
    """How many links away from worker 0 each worker is, [workers]; -1: out of reach. Every link is followed once."""
    ends = np.bincount(start, minlength=num_workers).cumsum()
    linked = np.split(to[np.argsort(start, kind="stable")], ends[:-1])
    steps = np.full(num_workers, -1)
    steps[0], done, newest = 0, 0, np.zeros(1, dtype=np.int64)
    while len(newest):
        done += 1
        reached = np.concatenate([linked[worker] for worker in newest])
        newest = distinct(reached[steps[reached] < 0])
        steps[newest] = done
    return steps


def distinct(codes: np.ndarray) -> np.ndarray:
    """The different values, ascending: as np.unique, but many times faster, since that hashes integers."""
    codes = np.sort(codes)
    return codes[np.diff(codes, prepend=-1) > 0]


def grid_shape(num_workers: int) -> tuple[int, int]:
    """The squarest grid of exactly that many workers: (rows, columns), rows <= columns."""
    rows = next(r for r in range(math.isqrt(num_workers), 0, -1) if num_workers % r == 0)
    return rows, num_workers // rows


def _links(num_workers: int, pairs: Pairs, directed: bool) -> Links:
    receiver, sender = pairs
    codes = receiver * num_workers + sender
    if not directed:
        codes = np.concatenate([codes, sender * num_workers + receiver])
    receiver, sender = np.divmod(distinct(codes), num_workers)
    # A single worker on a circle would be its own neighbour.
    others = receiver != sender
    return Links(num_workers, receiver[others], sender[others])


def _own_links(num_workers: int, one: np.ndarray, other: np.ndarray, weight: np.ndarray | None) -> Links:
    receiver, sender = np.concatenate([one, other]), np.concatenate([other, one])
    order = np.lexsort((sender, receiver))
    return Links(num_workers, receiver[order], sender[order], None if weight is None else np.tile(weight, 2)[order])


def _hops(num_workers: int, distances: list[int]) -> Pairs:
    """Everyone hears the workers that stand these distances before them on a circle."""
    receiver = np.tile(np.arange(num_workers), len(distances))
    return receiver, (receiver - np.repeat(np.array(distances, dtype=np.int64), num_workers)) % num_workers


def _powers(num_workers: int) -> list[int]:
    """1, 2, 4, ... below the number of workers."""
    return [2**j for j in range((num_workers - 1).bit_length())]


def _star(num_workers: int) -> list[Pairs]:
    leaves = np.arange(1, num_workers)
    return [(leaves, np.zeros_like(leaves))]


def _torus(num_workers: int) -> list[Pairs]:
    rows, columns = grid_shape(num_workers)
    if rows == 1:
        others = "4" if num_workers < 4 else f"{num_workers - 1} or {num_workers + 1}"
        raise UserError(
            f"{num_workers} workers cannot form the grid of a torus: use {others} workers, or a graph such as ring."
        )
    grid = np.arange(num_workers).reshape(rows, columns)
    before = [np.roll(grid, 1, axis).ravel() for axis in (0, 1)]
    return [(np.tile(grid.ravel(), 2), np.concatenate(before))]


def _random(num_workers: int, probability: float, rng: np.random.Generator) -> Pairs:
    receiver, sender = np.nonzero(np.triu(rng.random((num_workers, num_workers)) < probability, k=1))
    return receiver, sender


def _regular(num_workers: int, number: float, rng: np.random.Generator) -> Pairs:
    """Pair the workers' open ends at random, keep the new links and pair the rest again, as Steger and Wormald do."""
    degree = int(number)
    if degree >= num_workers:
        raise UserError(f"regular:{degree} on {num_workers} workers: at most regular:{num_workers - 1} is possible.")
    if degree == 1 and num_workers > 2:
        raise UserError(f"regular:1 links only pairs, so {num_workers} workers stay apart: use regular:2 or more.")
    if degree * num_workers % 2:
        near = f"regular:{degree - 1}" if degree + 1 >= num_workers else f"regular:{degree + 1}"
        raise UserError(
            f"regular:{degree} on {num_workers} workers is impossible, as one of the two must be even: use {near}."
        )
    # A dense graph is the complement of a sparse one, and pairing rarely gets stuck on sparse ones.
    sparse = min(degree, num_workers - 1 - degree)
    while (linked := _pair_up(num_workers, sparse, rng)) is None:
        pass
    if sparse != degree:
        linked = ~linked
    receiver, sender = np.nonzero(np.triu(linked, k=1))
    return receiver, sender


def _pair_up(num_workers: int, degree: int, rng: np.random.Generator) -> np.ndarray | None:
    """One attempt at a regular graph: [N, N] bool with a true diagonal, or None when only forbidden pairs are left."""
    linked = np.eye(num_workers, dtype=bool)
    ends = np.repeat(np.arange(num_workers), degree)
    while len(ends):
        pairs = np.sort(rng.permutation(ends).reshape(-1, 2), axis=1)
        low, high = pairs.T
        new = np.zeros(len(pairs), dtype=bool)
        new[np.unique(low * num_workers + high, return_index=True)[1]] = True
        new &= ~linked[low, high]
        linked[low[new], high[new]] = linked[high[new], low[new]] = True
        ends = pairs[~new].ravel()
        left = np.unique(ends)
        if len(ends) and linked[np.ix_(left, left)].all():
            return None
    return linked


def _in_neighbours(num_workers: int, number: float, rng: np.random.Generator) -> Pairs:
    count = int(number)
    if count >= num_workers:
        most = f"in-neighbours:{num_workers - 1}"
        raise UserError(f"in-neighbours:{count} on {num_workers} workers: at most {most} is possible.")
    lots = rng.random((num_workers, num_workers))
    np.fill_diagonal(lots, 2.0)
    sender = np.argpartition(lots, count - 1, axis=1)[:, :count].ravel()
    return np.repeat(np.arange(num_workers), count), sender


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of graphs, either fixed or drawn: how to make one, and what holds for each."""

    period: Callable[[int], list[Pairs]] | None = None
    """Number of workers -> the rounds of one period."""
    draw: Callable[[int, float, np.random.Generator], Pairs] | None = None
    """(number of workers, the spec's number, generator) -> one draw."""
    directed: bool = False
    balanced: bool = True
    example: str = ""
    denser: Callable[[int], str] = lambda num_workers: ""
    """Number of workers -> what to use instead of a spec that gives no connected graph."""


FAMILIES: dict[str, Family] = {
    "ring": Family(period=lambda n: [_hops(n, [1])]),
    "full": Family(period=lambda n: [_hops(n, list(range(1, n)))]),
    "torus": Family(period=_torus),
    "exponential": Family(period=lambda n: [_hops(n, _powers(n))]),
    "star": Family(period=_star, balanced=False),
    "one-peer-exponential": Family(
        period=lambda n: [_hops(n, [distance]) for distance in _powers(n) or [0]], directed=True
    ),
    "random": Family(
        draw=_random,
        balanced=False,
        example="random:0.25",
        denser=lambda n: f"random:{math.ceil(100 * (1 - n ** (-1 / (n - 1)))) / 100} or more",
    ),
    "regular": Family(draw=_regular, example="regular:4", denser=lambda n: "regular:3 or ring"),
    "in-neighbours": Family(
        draw=_in_neighbours,
        directed=True,
        balanced=False,
        example="in-neighbours:10",
        denser=lambda n: f"in-neighbours:{math.ceil(math.log(n))} or more, or --redraw",
    ),
}
