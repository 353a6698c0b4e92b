"""The round loop: local phases, mixing, evaluation, records; a generator, so that the caller decides what to show."""

import logging
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import nan

from manyheads.algorithms.base import State
from manyheads.algorithms.checking import mixed_state, starting_state, trained_state
from manyheads.compatibility import check_theory_state
from manyheads.errors import user_code
from manyheads.experiment import Experiment, Runtime
from manyheads.measure import check_finite, checked_loss, make_record, measure
from manyheads.metrics.clock import Clock, Speed
from manyheads.metrics.theory import theory_terms
from manyheads.record import Record
from manyheads.saver import Saver
from manyheads.session import Session, open_session
from manyheads.start import Start, begin_or_resume, is_finished, open_directory, write_result

_LOG = logging.getLogger("manyheads")


@dataclass(frozen=True)
class Step:
    """One finished round: its number, its loss, and its record if it was evaluated."""

    round: int
    loss: float
    record: Record | None


def train(experiment: Experiment, runtime: Runtime | None = None) -> Generator[Record, None, None]:
    """Train, yielding a Record for every evaluated round; closing the generator stops the run and frees its directory.

    It prints nothing: notes on the run go to the logger ``manyheads`` at its start.

    >>> for record in train(Experiment(workers=4, rounds=2)):
    ...     print(record.round, record.accuracy_mean)  # doctest: +SKIP
    """
    yield from records(open_session(experiment, runtime or Runtime()))


def records(session: Session) -> Generator[Record, None, None]:
    """Run a session's rounds, yielding a Record for every evaluated one; its notes go to the logger."""
    steps = run(session)
    for note in session.notes:
        _LOG.info("%s", note)
    for step in steps:
        if step.record is not None:
            yield step.record


def run(
    session: Session, ended: Callable[[State], None] = lambda state: None, *, weights: bool = True
) -> Iterator[Step]:
    """Run a session's rounds. With a run directory, continue where that stops and keep everything in it.

    The directory is opened at once, not when the first round is asked for, so that mistakes about it show here.
    ``ended`` is called with the state after the last round, unless the run in the directory was finished before.
    Without ``weights`` only numbers are kept, and a run that is stopped is lost.
    """
    experiment, sites, out = session.experiment, session.sites, session.runtime.out
    with session.sharing():
        first = starting_state(experiment.algorithm, session.ctx)
    check_theory_state(session.runtime, session.ctx, first)
    with ExitStack() as held:
        saver, start = None, Start(0, first)
        if out is not None:
            directory = open_directory(session, session.folder(out), held)
            saver = Saver(session, directory, weights=weights)
            if sites:
                write_result(session, sites, saver, first)
            if is_finished(session, directory):
                return iter(())
            start = begin_or_resume(session, saver, first)
        elif sites and sites.away:
            raise sites.never_there(experiment.data)
        steps = _rounds(session, start, saver, ended)
        return _guarded(held.pop_all(), steps, start.round, session)


def _guarded(held: ExitStack, steps: Iterator[Step], done: int, session: Session) -> Iterator[Step]:
    """The steps after round ``done``. If the user's own code fails in one, such as a net on an odd sample, say so.

    ``held``: what is given back when they end.
    """
    with held:
        while True:
            code = f"in round {done + 1} of {session.experiment.algorithm.name} your code"
            with user_code(code, maybe_ours=True), session.sharing():
                step = next(steps, None)
            if step is None:
                return
            done = step.round
            yield step


def _rounds(session: Session, start: Start, saver: Saver | None, ended: Callable[[State], None]) -> Iterator[Step]:
    runtime, ctx, algorithm = session.runtime, session.ctx, session.experiment.algorithm
    began = time.perf_counter() - start.seconds
    clock = Clock(_speed(session.experiment), ctx.network, start.simulated_seconds)
    first, state = start.round, start.state
    # ``start`` would keep the first rows in memory for the whole run.
    del start
    for round in range(first, ctx.rounds):
        last = round + 1 == ctx.rounds
        theory = runtime.theory_every > 0 and ((round + 1) % runtime.theory_every == 0 or last)
        if algorithm.order == "train-mix":
            entered = state
            state, log = trained_state(algorithm, state, round, ctx)
            loss = checked_loss(log, entered, round, session)
            if not theory:
                # It is a second copy of everything that moves: kept only if M(k) is measured.
                entered = None
            before = trained = state
            state = mixed = mixed_state(algorithm, state, round, ctx)
        else:
            before = state
            state = mixed = entered = mixed_state(algorithm, state, round, ctx)
            state, log = trained_state(algorithm, state, round, ctx)
            loss = checked_loss(log, entered, round, session)
            trained = state
        if ctx.network.may_gather_private:
            clock.tick(log)
        record = None
        if theory or (round + 1) % runtime.eval_every == 0 or last:
            values, per_worker = measure(session, before, trained, mixed, state)
            check_finite({"train loss": per_worker["train_loss"]}, log, round, session)
            if theory and entered is not None:
                values |= theory_terms(entered, trained, log, ctx)
            simulated = clock.seconds if ctx.network.may_gather_private else nan
            values |= {"loss": loss, "seconds": time.perf_counter() - began, "simulated_seconds": simulated}
            record = make_record(session, round + 1, values, per_worker)
        del before, trained, mixed, entered
        if saver is not None:
            saver.keep(round + 1, state, time.perf_counter() - began, clock.seconds, record)
        paused = time.perf_counter()
        yield Step(round + 1, loss, record)
        # The time that the caller takes does not count.
        began += time.perf_counter() - paused
    ended(state)


def _speed(experiment: Experiment) -> Speed:
    assert experiment.step_seconds is not None, "an experiment is completed before it is used"
    server = experiment.algorithm.exchange == "server"
    return Speed(experiment.step_seconds, experiment.link_latency, experiment.link_bandwidth, server)
