"""Mixing matrices as functions of the round: a graph's, with weights, redraws and failures."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from manyheads.errors import UserError
from manyheads.randomness import generator
from manyheads.topology.graphs import Graph, Links, draw_links, fixed_links, parse_graph
from manyheads.topology.rows import Mixing, Rows, check, sparse_rows


def build_mixing(
    graph: str,
    num_workers: int,
    *,
    weights: str = "metropolis",
    redraw: bool = False,
    link_failure: float = 0.0,
    worker_failure: float = 0.0,
    seed: int = 1,
    allow_row_stochastic: bool = False,
) -> Mixing:
    """The mixing of a graph spec, checked. Links with weights of their own make no use of ``weights``.

    ``redraw`` draws a random graph anew each round. In each round every link fails with probability ``link_failure``,
    and every worker is absent, with all its links, with probability ``worker_failure``; at least one worker is always
    present. The weight of a failed link stays with its receivers. A P that is not doubly stochastic is refused unless
    ``allow_row_stochastic`` (the algorithm's choice) or ``weights="uniform"`` (the user's) accepts it.
    """
    spec = parse_graph(graph)
    if redraw and not spec.random:
        raise UserError(f"{spec} is not random: leave out --redraw, or use random:P, regular:D or in-neighbours:K.")
    failing = link_failure > 0 or worker_failure > 0
    reason = _why_row_stochastic(spec, weights, failing)
    if reason and not (allow_row_stochastic or weights == "uniform"):
        raise UserError(
            f"{_note(reason)}: use an undirected graph such as exponential, or accept it with --weights uniform."
        )
    period, links = _links_by_round(spec, num_workers, seed, redraw)
    steady = Mixing(
        name=str(spec),
        num_workers=num_workers,
        period=period,
        directed=spec.directed,
        doubly_stochastic=reason is None,
        notes=(_note(reason),) if reason else (),
        draw=lru_cache(maxsize=period or 2)(lambda round: _weighted(links(round), weights)),
    )
    check(steady)
    if not failing:
        return steady

    def disturbed(round: int) -> Rows:
        present = _present(num_workers, worker_failure, seed, round)
        return _without_failed(steady.rows(round), present, link_failure, seed, round, spec.directed)

    return replace(steady, period=None, draw=lru_cache(maxsize=2)(disturbed))


def without(mixing: Mixing, away: Sequence[int]) -> Mixing:
    """The mixing in which some workers are absent from every round; the weight of their links stays with the others."""
    there = np.ones(mixing.num_workers, dtype=bool)
    there[list(away)] = False

    def draw(round: int) -> Rows:
        rows = mixing.rows(round)
        return _among(rows, rows.present & there, np.ones(len(rows.columns), dtype=bool))

    doubly = mixing.doubly_stochastic and not mixing.directed
    return replace(mixing, period=None, doubly_stochastic=doubly, draw=lru_cache(maxsize=2)(draw))


def _links_by_round(
    spec: Graph, num_workers: int, seed: int, redraw: bool
) -> tuple[int | None, Callable[[int], Links]]:
    """After how many rounds the links repeat (None: never), and a function from a round before that to its links."""
    if not spec.random:
        cycle = fixed_links(spec, num_workers)
        return len(cycle), cycle.__getitem__
    # Directed graphs that are redrawn need not be connected in every single round.
    connect = not (redraw and spec.directed)
    return None if redraw else 1, partial(draw_links, spec, num_workers, seed, connect=connect)


def _why_row_stochastic(spec: Graph, weights: str, failing: bool) -> str | None:
    """What keeps P from being doubly stochastic; None when it is."""
    if spec.directed and not spec.balanced:
        return f"{spec} is directed"
    if spec.directed and failing:
        return f"the failing links of {spec} are directed"
    if weights == "uniform" and not (spec.weighted or spec.balanced):
        return f"uniform weights on {spec}, whose workers differ in degree"
    return None


def _note(reason: str) -> str:
    return f"P is row-stochastic only and mixing does not keep the workers' mean ({reason})"


def _metropolis(degree: np.ndarray, links: Links) -> np.ndarray:
    return 1 / (1 + np.maximum(degree[links.receiver], degree[links.sender]))


WEIGHTS: dict[str, Callable[[np.ndarray, Links], np.ndarray]] = {
    "metropolis": _metropolis,
    "uniform": lambda degree, links: 1 / (1 + degree[links.receiver]),
    "max-degree": lambda degree, links: np.full(len(links.receiver), 1 / (1 + degree.max())),
    "lazy": lambda degree, links: _metropolis(degree, links) / 2,
}
"""(how many each worker hears [N], links) -> the weight of each link; the diagonal takes what is left of 1."""


def _weighted(links: Links, weights: str) -> Rows:
    degree = np.bincount(links.receiver, minlength=links.num_workers)
    present = np.ones(links.num_workers, dtype=bool)
    weight = WEIGHTS[weights](degree, links) if links.weight is None else links.weight
    return sparse_rows(links.receiver, links.sender, weight, present)


def _present(num_workers: int, failure: float, seed: int, round: int) -> np.ndarray:
    """Who takes part, [N] bool: always somebody, so that a mean over those present exists."""
    lots = generator(seed, "absence", round=round).random(num_workers)
    return lots >= min(failure, lots.max())


def _without_failed(
    rows: Rows, present: np.ndarray, link_failure: float, seed: int, round: int, directed: bool
) -> Rows:
    """Drop the failed links and those of absent workers; their weight stays with the receiver.

    An undirected link fails in both directions at once, so a symmetric P stays symmetric and doubly stochastic.
    """
    link = rows.receivers != rows.columns
    receiver, sender = rows.receivers[link], rows.columns[link]
    first, second = (receiver, sender) if directed else (np.minimum(receiver, sender), np.maximum(receiver, sender))
    names, index = np.unique(first * rows.num_workers + second, return_inverse=True)
    works = link.copy()
    works[link] = (generator(seed, "links", round=round).random(len(names)) >= link_failure)[index]
    return _among(rows, present, works)


def _among(rows: Rows, present: np.ndarray, works: np.ndarray) -> Rows:
    """P over working links, ``works`` [entries] bool, between present workers; other weight stays with the receiver."""
    receivers, senders = rows.receivers, rows.columns
    alive = works & (receivers != senders) & present[receivers] & present[senders]
    return sparse_rows(receivers[alive], senders[alive], rows.weights[alive], present)
