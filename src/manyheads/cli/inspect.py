"""``manyheads inspect``: what would run, and what has run."""

import argparse

from manyheads.cli import inspect_constants, inspect_data, inspect_graph, inspect_memory, inspect_run, inspect_speed
from manyheads.cli.parser import Parser

HELP = "look at a graph, a split, a net's speed or memory, or a run"
USAGE = "manyheads inspect COMMAND ..."
ABOUT = "Look at a graph, a split, a net's speed or memory before it is used, or at a run."


def fill(parser: Parser) -> None:
    parser.add_commands((inspect_graph, inspect_data, inspect_speed, inspect_memory, inspect_run, inspect_constants))


def run(args: argparse.Namespace) -> None:
    args.parser.print_help()
