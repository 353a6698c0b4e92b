"""One round's mixing matrix as sparse rows, and what every mixing matrix must satisfy."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from manyheads.errors import UserError
from manyheads.topology.graphs import connected, distinct, steps_from_first

TOLERANCE = 1e-6
"""How far from 1 a sum may lie: loose enough for a matrix that was float32 once."""

SEARCHED_ROUNDS = 64
"""How many rounds of a mixing without a period are joined in search of a connected graph."""


@dataclass(frozen=True, eq=False)
class Rows:
    """P of one round, N rows of neighbours and weights: worker i gets ``sum_j P_ij x_j``.

    A row always holds its diagonal entry, even with weight 0, and other entries only where a message crosses a link:
    ``len(columns) - N`` messages are sent in the round.
    """

    offsets: np.ndarray
    """Row i is the entries ``offsets[i]:offsets[i + 1]``, [N + 1] int64."""
    columns: np.ndarray
    """Whom the worker hears, ascending within a row, [entries] int64."""
    weights: np.ndarray
    """[entries] float64."""
    present: np.ndarray
    """[N] bool: an absent worker neither trains nor mixes in the round, and its row is that of the identity."""

    @property
    def num_workers(self) -> int:
        return len(self.present)

    @property
    def receivers(self) -> np.ndarray:
        """The row each entry stands in, [entries] int64."""
        return np.repeat(np.arange(self.num_workers), np.diff(self.offsets))

    def dense(self) -> np.ndarray:
        """P, [N, N] float64."""
        matrix = np.zeros((self.num_workers, self.num_workers))
        matrix[self.receivers, self.columns] = self.weights
        return matrix


@dataclass(frozen=True, eq=False)
class Mixing:
    """Round -> P. Pure: the same round gives the same rows, in any order and in any process."""

    name: str
    """The spec, e.g. ``random:0.25``."""
    num_workers: int
    period: int | None
    """After how many rounds P repeats itself; None: never."""
    directed: bool
    """Whether links may carry one way only."""
    doubly_stochastic: bool
    """Whether the columns of every P sum to 1 as its rows do, so that mixing keeps the workers' mean."""
    notes: tuple[str, ...]
    """What the user has to know about this P, a line each; every output repeats them."""
    draw: Callable[[int], Rows] = field(repr=False)
    """Round (below the period, where there is one) -> P."""

    def rows(self, round: int) -> Rows:
        """P of one round. Cached and shared: do not write into it."""
        return self.draw(round if self.period is None else round % self.period)


def sparse_rows(receiver: np.ndarray, sender: np.ndarray, weight: np.ndarray, present: np.ndarray) -> Rows:
    """Rows made of links, each array [links]; the diagonal takes what is left of a row's sum of 1."""
    num_workers = len(present)
    everyone = np.arange(num_workers)
    # 1 minus the weights, computed from an equal share, so that on a regular graph all weights have the same bits.
    share = 1 / (1 + np.bincount(receiver, minlength=num_workers))
    diagonal = share + np.bincount(receiver, share[receiver] - weight, minlength=num_workers)
    # A user's own weights may sum to slightly more than 1.
    diagonal = np.where((diagonal > -TOLERANCE) & (diagonal < 0), 0.0, diagonal)
    receivers = np.concatenate([receiver, everyone])
    columns = np.concatenate([sender, everyone])
    order = np.argsort(receivers * num_workers + columns, kind="stable")
    offsets = np.append(0, np.bincount(receivers).cumsum())
    return Rows(offsets, columns[order], np.concatenate([weight, diagonal])[order], present)


def check_rows(rows: Rows, round: int, *, directed: bool, doubly_stochastic: bool) -> None:
    """Refuse a P that is not what it claims to be."""
    num_workers, receivers = rows.num_workers, rows.receivers
    if not (np.isfinite(rows.weights) & (rows.weights >= 0)).all():
        worst = rows.weights[np.argmin(np.where(np.isfinite(rows.weights), rows.weights, -np.inf))]
        raise UserError(f"P of round {round} holds the weight {worst:g}: every weight must be a number of at least 0.")
    _check_sums("row", np.bincount(receivers, rows.weights, minlength=num_workers), round)
    if not doubly_stochastic:
        return
    _check_sums("column", np.bincount(rows.columns, rows.weights, minlength=num_workers), round)
    if directed:
        return
    transposed = np.argsort(rows.columns, kind="stable")
    same = np.array_equal(rows.columns[transposed], receivers) and np.array_equal(receivers[transposed], rows.columns)
    if not same or np.abs(rows.weights[transposed] - rows.weights).max() > TOLERANCE:
        raise UserError(f"P of round {round} is not symmetric: make it so, or declare its links directed.")


def _check_sums(kind: str, sums: np.ndarray, round: int) -> None:
    worst = int(np.argmax(np.abs(sums - 1)))
    if abs(sums[worst] - 1) > TOLERANCE:
        mend = "" if kind == "row" else ", or allow a row-stochastic P"
        raise UserError(
            f"in P of round {round}, {kind} {worst} sums to {sums[worst]:.6g}: make each {kind} sum to 1{mend}."
        )


def check(mixing: Mixing) -> None:
    """Refuse a mixing that breaks its own claims, or whose union over one period is not connected.

    Without a period the first rounds are looked at, until their union is connected.
    """
    num_workers = mixing.num_workers
    union = np.empty(0, dtype=np.int64)
    for round in range(mixing.period or SEARCHED_ROUNDS):
        rows = mixing.rows(round)
        check_rows(rows, round, directed=mixing.directed, doubly_stochastic=mixing.doubly_stochastic)
        union = distinct(np.append(union, rows.receivers * num_workers + rows.columns))
        if mixing.period is None and connected(num_workers, *np.divmod(union, num_workers)):
            return
    if not connected(num_workers, *np.divmod(union, num_workers)):
        raise UserError(
            f"{mixing.name} on {num_workers} workers is not connected, so they can never agree: "
            "add links until every worker can be reached from every other."
        )


def check_agreement(mixing: Mixing) -> None:
    """Refuse a periodic mixing under which camps of workers at most swap their models, and so never agree.

    Follow a model through the rounds of one period after another: in such a mixing it does not reach everybody, or it
    comes back to its worker only after multiples of more rounds than the period has.
    """
    period, num_workers = mixing.period, mixing.num_workers
    if period is None:
        return
    links = []
    for round in range(period):
        rows = mixing.rows(round)
        heard = (rows.receivers != rows.columns) | (rows.weights > TOLERANCE)
        # Every worker is one node in each round of the period, which hears nodes of the round before.
        after = (round + 1) % period
        links.append((after * num_workers + rows.receivers[heard], round * num_workers + rows.columns[heard]))
    receiver, sender = map(np.concatenate, zip(*links, strict=True))
    everyone = period * num_workers
    if not connected(everyone, receiver, sender) or _cycle(everyone, receiver, sender) > period:
        raise UserError(
            f"{mixing.name} on {num_workers} workers splits them into camps that at most exchange models, so they"
            " can never agree: give links whose weights come to less than 1."
        )


def _cycle(num_workers: int, receiver: np.ndarray, sender: np.ndarray) -> int:
    """The greatest common divisor of the lengths of all cycles in a strongly connected graph."""
    steps = steps_from_first(num_workers, receiver, sender)
    return int(np.gcd.reduce(steps[sender] + 1 - steps[receiver]))
