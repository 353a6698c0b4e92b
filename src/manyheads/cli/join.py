"""``manyheads join``: new workers on what a finished run has learned; they train only their heads."""

import argparse

from manyheads.cli import terminal
from manyheads.cli.options import add_fields, given
from manyheads.cli.parser import Parser, path
from manyheads.cli.train import train
from manyheads.experiment import Runtime
from manyheads.new_workers import NewWorkers, open_join
from manyheads.store import Run

USAGE = "manyheads join RUN [options]"
ABOUT = """\
Take the representation that a finished run has learned, freeze it, and let new workers with a fresh split of the data
train heads of their own on it. If the run's algorithm has no personal heads, the last layer is trained anew. The result
is a run like any other, with a round for each pass.
"""

_RUNTIME = ("out", "data_dir", "device", "engine", "threads", "eval_every", "checkpoint_every", "deterministic")


def fill(parser: Parser) -> None:
    parser.add_argument("directory", metavar="RUN", type=path, help="directory of a finished run")
    parser.add_argument("--quiet", action="store_true", help="show nothing but the result")
    add_fields(parser, NewWorkers, title="the new workers")
    add_fields(parser, Runtime, _RUNTIME, title="where and how")


def run(args: argparse.Namespace) -> None:
    new = NewWorkers(**given(args, NewWorkers))
    with terminal.waiting(f"loading {args.directory}", quiet=args.quiet):
        session = open_join(Run.open(args.directory), new, Runtime(**given(args, Runtime)))
    train(session, quiet=args.quiet)
