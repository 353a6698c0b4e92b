"""``manyheads train``: train one algorithm and show how it goes; the same command continues a run that was stopped."""

import argparse
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

from manyheads.algorithms.join import Join
from manyheads.checkpoint import latest_round
from manyheads.cli import terminal, text
from manyheads.cli.options import add_options, experiments, given
from manyheads.cli.parser import Parser
from manyheads.derived import exchange_of
from manyheads.errors import UserError, flag
from manyheads.experiment import Experiment, Runtime
from manyheads.machine import local_rank
from manyheads.rounds import run as rounds_of
from manyheads.session import Session, open_session
from manyheads.store import Run
from manyheads.store.layout import CHECKPOINT

USAGE = "manyheads train ALGORITHM [options]"
ABOUT = "Train one algorithm, continuing where the run directory stopped."
EXAMPLES = """\
examples:
  manyheads train deprl --workers 32 --split dirichlet:0.1 --graph random:0.25
  manyheads train deprl --rounds 200       # a finished run goes on to round 200
  manyheads train d-psgd --data my.npz --model package.module:factory
  manyheads train --from runs/mine --seed 2

A value in [brackets] is the default. Where the default depends on data, net or device, 'auto' asks for it. A run that
was stopped, killed or given more rounds is continued by the same command.
"""


def fill(parser: Parser) -> None:
    parser.add_argument("--quiet", action="store_true", help="show nothing but the result")
    add_options(parser)


def run(args: argparse.Namespace) -> None:
    (experiment,) = experiments(args)
    _refuse_unused(args, experiment)
    with terminal.waiting(f"loading {experiment.data}", quiet=args.quiet) as progress:
        session = open_session(experiment, Runtime(**given(args, Runtime)), progress)
    # Only process 0 prints, but the people of each site see a run of their own.
    site_prints = session.sites is not None and local_rank() == 0
    with redirect_stdout(sys.__stdout__ if site_prints else sys.stdout):
        train(session, quiet=args.quiet)


def _refuse_unused(args: argparse.Namespace, experiment: Experiment) -> None:
    """Refuse options that have no effect; in a comparison they are allowed, as other algorithms may use them.

    The graph is allowed here too: people try one algorithm after another by changing only its name, and the run then
    records ``server``.
    """
    for name, used in exchange_of(experiment).items():
        if name != "graph" and name in args and getattr(experiment, name) not in (None, used):
            raise UserError(f"{flag(name)} is not used by {experiment.algorithm.name}: leave it out.")


def train(session: Session, *, quiet: bool) -> None:
    """Run a session's rounds and show them, its outcome and its directory."""
    out = session.runtime.out or _default_out(session)
    session = replace(session, runtime=replace(session.runtime, out=out))
    stopped = "stopped"
    try:
        steps = rounds_of(session)
        if not quiet:
            given, count = session.experiment, session.processes.count
            together = f", {count} processes" if count > 1 else ""
            where = f"{session.ctx.engine.name} engine, {session.device}{together}"
            print(f"{text.headline(given.algorithm.title, vars(given))} ({where})", flush=True)
        for step in terminal.follow(
            steps, session.ctx.rounds, session.notes, within=lambda: str(session.ctx.engine.progress), quiet=quiet
        ):
            stopped = f"stopped at round {step.round}"
    except KeyboardInterrupt:
        kept = latest_round(session.folder(out) / CHECKPOINT)
        then = f"continues it from round {kept}" if kept else "begins it again"
        raise KeyboardInterrupt(f"{stopped}; the same command {then}.") from None
    folder = session.folder(out)
    summary = Run.open(folder).summary()
    assert summary is not None, "a run that ends has a summary"
    print(text.summary_line(summary) if quiet else f"\n{text.summary_table(summary)}\n")
    accuracy, floor = summary["accuracy_mean"], summary["majority_floor"]
    if not quiet and None not in (accuracy, floor) and accuracy <= floor:
        more = "--rounds, or another --lr"
        if isinstance(session.experiment.algorithm, Join):
            more = "--head-epochs"  # A run of new workers trains heads only, for so many rounds.
        elif session.experiment.schedule == "corollary":
            more = "--rounds"  # It takes no rates of one's own.
        # Where nearly every sample is of that class, no amount of training can do much better.
        advice = f"try more {more}" if floor < 0.95 else "try a less unequal --split, which leaves more to learn"
        print(f"No better than naming each worker's most frequent class: {advice}.\n")
    print(folder)


def _default_out(session: Session) -> Path:
    """A place of its own for every experiment, so that the same command finds the same run."""
    experiment = session.experiment
    data = Path(str(experiment.data)).stem
    return Path("runs", f"{data}-{experiment.algorithm.name}-{experiment.run_id}")
