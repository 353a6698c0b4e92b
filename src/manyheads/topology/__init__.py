"""Who mixes with whom and with which weights: graph specs, mixing matrices by round, their checks and pictures."""

from manyheads.topology.graphs import brief, is_graph, parse_graph
from manyheads.topology.layout import edges, positions
from manyheads.topology.mixing import WEIGHTS, build_mixing
from manyheads.topology.rows import Mixing, Rows, check, check_agreement
from manyheads.topology.spectrum import describe, spectral

__all__ = [
    "WEIGHTS",
    "Mixing",
    "Rows",
    "brief",
    "build_mixing",
    "check",
    "check_agreement",
    "describe",
    "edges",
    "is_graph",
    "parse_graph",
    "positions",
    "spectral",
]
