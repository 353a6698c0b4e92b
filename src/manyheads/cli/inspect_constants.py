"""``manyheads inspect constants``: what the theory assumes about a problem, estimated where a run has ended."""

import argparse
from pathlib import Path

from manyheads.cli.parser import Commands, Parser


def add(commands: Commands) -> None:
    commands.add_parser(
        "constants",
        help="smoothness and noise where a run stands, and Theorem 1 with them",
        usage="manyheads inspect constants DIR [options]",
        description="Estimate L, sigma^2 and varsigma^2 at a run's mean representation, and what they ask of rates.",
        fill=_add_options,
        run=run,
    )


def _add_options(parser: Parser) -> None:
    from manyheads.cli.options import add_fields
    from manyheads.experiment import Runtime

    parser.add_argument("directory", metavar="DIR", type=Path, help="run directory")
    add_fields(parser, Runtime, ("data_dir", "device", "threads"), title="where and how")


def run(args: argparse.Namespace) -> None:
    from manyheads import terminal
    from manyheads.algorithms.phases import HEAD, REPRESENTATION
    from manyheads.cli.options import given
    from manyheads.data.federation import saved_content
    from manyheads.errors import UserError
    from manyheads.experiment import Runtime
    from manyheads.metrics.estimate import gradient_noise, smoothness, variability
    from manyheads.metrics.theorem import theorem_constants
    from manyheads.metrics.theory import at_mean
    from manyheads.saver import restore
    from manyheads.session import open_session
    from manyheads.store import Run
    from manyheads.store.layout import PARTITION

    run = Run.open(args.directory)
    snapshot = run.state()
    with terminal.waiting(f"loading {run.experiment.data}") as downloading:
        session = open_session(run.experiment, Runtime(**given(args, Runtime)), downloading, run.constants())
    if session.sites:
        raise UserError(f"{run.path} is a site's, and the theory is about the mean of all workers: give another run.")
    if saved_content(run.path / PARTITION) not in (None, session.everyone.content):
        raise UserError(f"{run.path} was trained on other data than {run.experiment.data} holds now: put them back.")
    ctx = session.ctx
    if set(ctx.model.groups) != REPRESENTATION | HEAD:
        raise UserError(f"{args.directory} has no representation with one head beside it, which the theory is about.")
    with terminal.waiting("measuring gradients"):
        point = at_mean(session.experiment.algorithm.models(restore(session, snapshot), ctx), ctx)
        curvature = {groups: smoothness(point, groups, ctx) for groups in (REPRESENTATION, HEAD)}
        noise = {groups: gradient_noise(point, groups, ctx) for groups in (REPRESENTATION, HEAD)}
        varsigma = variability(point, ctx)

    def both(values: dict[frozenset[str], float]) -> str:
        return f"{values[REPRESENTATION]:.3g} in the representation, {values[HEAD]:.3g} in the heads"

    largest = {groups: float(values.max()) for groups, values in curvature.items()}
    mean = {groups: float(values.mean()) for groups, values in noise.items()}
    now = [ctx.rates.sgd(snapshot.round, head=head).lr for head in (False, True)]
    lines = [
        ("after round", str(snapshot.round)),
        ("L", f"{both(largest)}: the largest of any worker, a lower bound"),
        ("sigma^2", f"{both(mean)}: noise of mini-batches of {ctx.source.batch_size}, mean over workers"),
        ("varsigma^2", f"{varsigma:.3g}: how far the workers' gradients of the representation lie apart"),
        ("rates", f"{now[0]:.3g} for the representation, {now[1]:.3g} for the heads"),
    ]
    if session.experiment.graph not in ("server", "none"):
        tau = max(1, session.experiment.algorithm.head_passes)
        lines += theorem_constants(session.mixing, lipschitz=max(largest.values()), tau=tau)
    print(terminal.facts(lines))
