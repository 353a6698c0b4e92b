"""How far the workers' representations are from agreeing."""

from manyheads.algorithms.phases import REPRESENTATION
from manyheads.metrics.spread import spread
from manyheads.network.base import Network
from manyheads.tree import Params, select


def consensus_error(params: Params, network: Network) -> float:
    """(1/N) sum_i |phi_i - phibar|^2 over the representation parameters [W, ...] of all processes."""
    return consensus_errors(params, network)[0]


def consensus_errors(params: Params, network: Network) -> tuple[float, float]:
    """The same, and relative to |phibar|^2: not a number where phibar is zero."""
    found = spread(select(params, REPRESENTATION), network)
    return found.variance, found.variance / found.square_of_mean if found.square_of_mean else float("nan")
