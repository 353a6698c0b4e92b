"""The round loop: local phases, mixing, evaluation, records; a generator, so that whoever calls it does the showing."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import nan

from manyheads.algorithms.base import State
from manyheads.errors import UserError
from manyheads.experiment import Experiment, Runtime
from manyheads.measure import check_finite, checked_loss, make_record, measure
from manyheads.metrics.clock import Clock, Speed
from manyheads.metrics.theory import theory_terms
from manyheads.record import Record
from manyheads.saver import Saver, restore
from manyheads.session import Session, open_session
from manyheads.store import RunDirectory
from manyheads.store.layout import PARTITION


@dataclass(frozen=True)
class Step:
    """One finished round: its number, its loss, and its record where it was evaluated."""

    round: int
    loss: float
    record: Record | None


def train(experiment: Experiment, runtime: Runtime | None = None) -> Iterator[Record]:
    """Train, yielding a Record for every evaluated round.

    >>> for record in train(Experiment(workers=4, rounds=2)):
    ...     print(record.round, record.accuracy_mean)  # doctest: +SKIP
    """
    for step in run(open_session(experiment, runtime or Runtime())):
        if step.record is not None:
            yield step.record


def run(session: Session) -> Iterator[Step]:
    """Run a session's rounds; with a run directory, from where it stops, keeping everything in it."""
    experiment, runtime, ctx = session.experiment, session.runtime, session.ctx
    if session.sites and session.sites.away and runtime.out is None:
        raise session.sites.never_there(experiment.data)
    if runtime.out is None:
        yield from _rounds(session, 0, experiment.algorithm.init(ctx), 0.0, 0.0, None)
        return
    processes, sharers, sites = session.processes, session.sharers, session.sites
    directory = RunDirectory(session.folder(runtime.out))
    with ExitStack() as stack:
        if sites and sites.away and not processes.total(directory.path.exists()):
            raise sites.never_there(experiment.data)
        if sharers.rank == 0:
            content, patience = session.everyone.content, sharers.patience
            directory = RunDirectory.open(
                directory.path, experiment, resume=runtime.resume, patience=patience, content=content
            )
            stack.enter_context(directory.lock(patience))
        # The others do not look before process 0 has made the folder: on a network's disk they would long see none.
        finished = sharers.rank == 0 and directory.finished(ctx.rounds)
        if processes.total(finished):
            if sites and not finished:
                raise UserError(
                    f"the other sites have ended these {ctx.rounds} rounds without this one: give more --rounds."
                )
            session.notes.append(f"{directory.path} already holds these {ctx.rounds} rounds: nothing to do.")
            return
        saver = Saver(session, directory)
        with sharers.one_before_others():
            snapshot, notes = saver.load()
        session.notes.extend(notes)
        round, state, seconds, simulated = 0, None, 0.0, 0.0
        if snapshot is not None:
            round, state = snapshot.round, restore(session, snapshot)
            seconds, simulated = snapshot.seconds, snapshot.simulated_seconds
        found = set(map(int, processes.texts(str(round))))
        if sites:
            sites.take_up(directory.path, max(found), round)
            session.notes.extend(sites.disturbances)
            round = max(found)
            if processes.decide(sites.overdue()):
                raise sites.given_up()
        elif len(found) > 1:
            raise UserError(f"{directory.path} shows the processes checkpoints of rounds {found}: start again.")
        if sharers.rank == 0:
            if directory.cut_back(round) or round:
                session.notes.append(f"Continuing the run in {directory.path} from round {round}.")
            session.everyone.save(directory.path / PARTITION)
        if state is not None and round == ctx.rounds:
            # Killed between its last checkpoint and its summary.
            saver.finish(state, directory.record(round))
        yield from _rounds(session, round, state or experiment.algorithm.init(ctx), seconds, simulated, saver)


def _rounds(
    session: Session, first: int, state: State, seconds: float, simulated: float, saver: Saver | None
) -> Iterator[Step]:
    runtime, ctx, algorithm = session.runtime, session.ctx, session.experiment.algorithm
    began = time.perf_counter() - seconds
    clock = Clock(_speed(session.experiment), ctx.network, simulated)
    for round in range(first, ctx.rounds):
        last = round + 1 == ctx.rounds
        theory = runtime.theory_every > 0 and ((round + 1) % runtime.theory_every == 0 or last)
        if algorithm.order == "train-mix":
            # Kept only where it is looked at: it is a second copy of all that moves.
            start = state if theory else None
            state, log = algorithm.local(state, round, ctx)
            before = trained = state
            state = mixed = algorithm.mix(state, round, ctx)
        else:
            before = state
            state = mixed = start = algorithm.mix(state, round, ctx)
            state, log = algorithm.local(state, round, ctx)
            trained = state
        loss = checked_loss(log, round, session)
        if ctx.network.may_gather_private:
            clock.tick(log)
        record = None
        if theory or (round + 1) % runtime.eval_every == 0 or last:
            values, per_worker = measure(session, before, trained, mixed, state)
            check_finite({"train loss": per_worker["train_loss"]}, round, session)
            if theory and start is not None:
                values |= theory_terms(start, trained, log, round, ctx)
            seconds = time.perf_counter() - began
            simulated = clock.seconds if ctx.network.may_gather_private else nan
            record = make_record(session, round + 1, loss, seconds, simulated, values, per_worker)
        del before, trained, mixed, start
        if saver is not None:
            saver.keep(round + 1, state, time.perf_counter() - began, clock.seconds, record)
        yield Step(round + 1, loss, record)


def _speed(experiment: Experiment) -> Speed:
    assert experiment.step_seconds is not None, "an experiment is completed before it is used"
    return Speed(
        experiment.step_seconds, experiment.link_latency, experiment.link_bandwidth, experiment.algorithm.server
    )
