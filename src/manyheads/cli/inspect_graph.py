"""``manyheads inspect graph``: who mixes with whom, how fast that brings the workers together, and a picture of it."""

import argparse
from pathlib import Path

from manyheads import drawing, topology
from manyheads.algorithms import DisPFL
from manyheads.cli import figures
from manyheads.cli.options import add_fields, given
from manyheads.cli.parser import Parser, path
from manyheads.cli.terminal import waiting
from manyheads.cli.text import facts
from manyheads.derived import mixing_of
from manyheads.experiment import Experiment
from manyheads.metrics import theorem

USAGE = "manyheads inspect graph [options]"
ABOUT = "Print what there is to know about a graph and its mixing weights, and draw it."

_OPTIONS = ("graph", "workers", "weights", "redraw", "link_failure", "worker_failure", "seed")


def fill(parser: Parser) -> None:
    add_fields(parser, Experiment, _OPTIONS, title="graph")
    parser.add_argument("--out", type=path, metavar="FILE", help="picture: .png, .svg or .pdf [graph-NAME-WORKERS.png]")


def run(args: argparse.Namespace) -> None:
    # A graph can be looked at before an algorithm is chosen: this one takes any, and notes say what P lacks.
    experiment = Experiment(algorithm=DisPFL(), **given(args, Experiment))
    mixing = mixing_of(experiment)
    slug = "links" if experiment.graph.startswith("links:") else experiment.graph.replace(":", "-")
    out = args.out or Path(f"graph-{slug}-{experiment.workers}.png")
    figures.check_name(out)
    links = topology.edges(mixing)
    with waiting("measuring"):
        lines = [*topology.describe(mixing), *theorem.describe(theorem.assess(mixing))]
    if len(links) > drawing.MOST_LINKS:
        lines.append(("drawn", f"{drawing.MOST_LINKS:,} of the links, chosen at random"))
    print(facts(lines))
    with waiting("drawing"):
        figures.graph(topology.positions(mixing), links, out)
    print(out)
