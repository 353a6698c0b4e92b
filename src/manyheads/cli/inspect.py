"""``manyheads inspect``: what would run, and what has run."""

import argparse

from manyheads.cli.parser import Parser

USAGE = "manyheads inspect COMMAND ..."
ABOUT = "Look at a graph, a split, a net's speed or memory before it is used, or at a run."

_COMMANDS = {
    "graph": "degrees, spectral gap and a picture of a graph",
    "data": "sizes of the shards and the worker-by-class map of a split",
    "speed": "seconds a mini-batch takes, for --step-seconds",
    "memory": "memory a run takes on a GPU, and how many workers fit",
    "run": "what ran in a directory and where it stands",
    "constants": "smoothness and noise where a run stands, and Theorem 1 with them",
}


def fill(parser: Parser) -> None:
    parser.add_commands("manyheads.cli.inspect_", _COMMANDS)


def run(args: argparse.Namespace) -> None:
    args.parser.print_help()
