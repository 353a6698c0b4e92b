"""``manyheads inspect constants``: what the theory assumes about a problem, estimated where a run has ended."""

import argparse

from manyheads.algorithms import Algorithm, State
from manyheads.algorithms.checking import starting_state
from manyheads.algorithms.phases import HEAD, REPRESENTATION
from manyheads.cli.options import add_fields, given
from manyheads.cli.parser import Parser, path
from manyheads.cli.terminal import waiting
from manyheads.cli.text import facts
from manyheads.data.federation import saved_with_other_data
from manyheads.errors import UserError
from manyheads.experiment import Runtime
from manyheads.metrics import theorem
from manyheads.metrics.estimate import gradient_noise, smoothness, variability
from manyheads.metrics.theorem import Assessment, Problem
from manyheads.metrics.theory import at_mean
from manyheads.session import Session, open_session
from manyheads.snapshot import Snapshot
from manyheads.start import restore
from manyheads.store import Run
from manyheads.store.layout import PARTITION
from manyheads.topology import is_graph

USAGE = "manyheads inspect constants RUN [options]"
ABOUT = "Estimate L, sigma^2 and varsigma^2 at a run's mean representation, and the rates they call for."


def fill(parser: Parser) -> None:
    parser.add_argument("directory", metavar="RUN", type=path, help="run directory")
    add_fields(parser, Runtime, ("data_dir", "device", "threads"), title="where and how")


def run(args: argparse.Namespace) -> None:
    run = Run.open(args.directory)
    snapshot = run.state()
    with waiting(f"loading {run.experiment.data}") as downloading:
        session = open_session(run.experiment, Runtime(**given(args, Runtime)), downloading, run.constants())
    if session.sites:
        raise UserError(
            f"{run.path} is a single site's, but the theory is about the mean of all workers: give another run."
        )
    if saved_with_other_data(run.path / PARTITION, session.everyone.data_digest):
        raise UserError(
            f"{run.path} was not trained on the data that {run.experiment.data} holds now: put the old data back."
        )
    if set(session.ctx.model.groups) != REPRESENTATION | HEAD:
        raise UserError(
            f"{args.directory} has no representation with a single head, which the theory is about: give another run."
        )
    with waiting("measuring gradients"):
        lines = _estimates(session, snapshot)
    print(facts(lines))


def _estimates(session: Session, snapshot: Snapshot) -> list[tuple[str, str]]:
    """What is measured where a run stands, and Theorem 1 with it, as (label, value) lines."""
    ctx, algorithm, parts = session.ctx, session.experiment.algorithm, (REPRESENTATION, HEAD)
    first = starting_state(algorithm, ctx)
    point = at_mean(algorithm.models(restore(session, snapshot, first), ctx), ctx)
    curvature = [float(smoothness(point, part, ctx).max()) for part in parts]
    noise = [float(gradient_noise(point, part, ctx).mean()) for part in parts]
    varsigma = variability(point, ctx)
    rates = [ctx.rates.sgd(snapshot.round, head=head).lr for head in (False, _moves_heads_alone(algorithm))]
    both = "{:.3g} in the representation, {:.3g} in the heads".format
    lines = [
        ("after round", str(snapshot.round)),
        ("L", f"{both(*curvature)}: the largest of any worker, a lower bound"),
        ("sigma^2", f"{both(*noise)}: noise of mini-batches of {ctx.source.batch_size}, mean over workers"),
        ("varsigma^2", f"{varsigma:.3g}: how far apart the workers' gradients of the representation lie"),
        ("rates", f"{rates[0]:.3g} for the representation, {rates[1]:.3g} for the heads"),
    ]
    if not is_graph(session.experiment.graph):
        return lines
    if not any(curvature):
        return [*lines, ("theorem 1", "says nothing where L is 0")]
    known = theorem.assess(session.mixing, lipschitz=max(curvature), tau=max(1, algorithm.head_passes))
    lines += theorem.describe(known)
    return lines if known.constants is None else [*lines, *_bound(session, first, known, max(noise), varsigma)]


def _moves_heads_alone(algorithm: Algorithm) -> bool:
    """Whether heads have a rate of their own; if they move only with all the rest, they do so at its rate."""
    return algorithm.head_passes > 0


def _bound(
    session: Session, first: State, known: Assessment, noise: float, variability: float
) -> list[tuple[str, str]]:
    """Theorem 1's bound with what was measured, and its terms, as (label, value) lines."""
    ctx = session.ctx
    begun = session.experiment.algorithm.models(first, ctx)
    terms = Problem(
        start_loss=float(ctx.engine.evaluate(begun.params, begun.buffers, session.federation.train).loss.mean()),
        rounds=session.experiment.recipe.rounds,
        workers=len(ctx.ids),
        beta=ctx.rates.lr,
        alpha=ctx.rates.head_lr if _moves_heads_alone(session.experiment.algorithm) else ctx.rates.lr,
        tau=known.tau,
        lipschitz=known.lipschitz,
        noise=noise,
        variability=variability,
    ).bound()
    when = "if the first rates were kept, and as small as the theorem asks"
    total = ("  its bound", f"{sum(terms.values()):.3g} on the mean of M(k), {when}")
    return [total, *((f"    {name}", f"{term:.3g}") for name, term in terms.items())]
