"""The round loop: local phases, mixing, evaluation, records; a generator, so that whoever calls it does the showing."""

import logging
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import nan
from pathlib import Path

from manyheads.algorithms.base import State
from manyheads.errors import UserError
from manyheads.experiment import Experiment, Runtime
from manyheads.files import locked
from manyheads.measure import check_finite, checked_loss, make_record, measure
from manyheads.metrics.clock import Clock, Speed
from manyheads.metrics.theory import theory_terms
from manyheads.models.split import constants_of
from manyheads.record import Record
from manyheads.saver import Saver, restore
from manyheads.session import Session, open_session
from manyheads.sites import refuse_others
from manyheads.store import RunDirectory
from manyheads.store.layout import PARTITION

_LOG = logging.getLogger("manyheads")


@dataclass(frozen=True)
class Step:
    """One finished round: its number, its loss, and its record where it was evaluated."""

    round: int
    loss: float
    record: Record | None


def train(experiment: Experiment, runtime: Runtime | None = None) -> Generator[Record, None, None]:
    """Train, yielding a Record for every evaluated round; closed earlier, it stops and releases the directory.

    Prints nothing: what there is to say about the run at its start goes to the logger ``manyheads``.

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


def run(session: Session) -> Iterator[Step]:
    """Run a session's rounds; with a run directory, from where it stops, keeping everything in it.

    The directory is taken up at once, before the first round is asked for: a mistake about it shows here.
    """
    experiment, sites, out = session.experiment, session.sites, session.runtime.out
    if out is None:
        if sites and sites.away:
            raise sites.never_there(experiment.data)
        return _rounds(session, 0, experiment.algorithm.init(session.ctx), 0.0, 0.0, None)
    with ExitStack() as held:
        directory = _open_directory(session, session.folder(out), held)
        if _is_finished(session, directory):
            return iter(())
        saver = Saver(session, directory)
        steps = _rounds(session, *_take_up(session, saver), saver)
        return _holding(held.pop_all(), steps)


def _open_directory(session: Session, path: Path, held: ExitStack) -> RunDirectory:
    """The run directory, locked for as long as ``held`` is."""
    sites, sharers = session.sites, session.sharers
    if sites:
        refuse_others(path, session.ctx.network.workers)
        # Before anybody makes a folder.
        begun = session.processes.total(path.exists())
        if sites.away and not begun:
            raise sites.never_there(session.experiment.data)
    if sharers.rank > 0:
        return RunDirectory(path)
    resume, content = session.runtime.resume, session.everyone.content
    directory = RunDirectory.open(path, session.experiment, resume=resume, patience=sharers.patience, content=content)
    held.enter_context(locked(directory.path, sharers.patience))
    return directory


def _is_finished(session: Session, directory: RunDirectory) -> bool:
    rounds = session.ctx.rounds
    # The others do not look before process 0 has made the folder: on a network's disk they would long see none.
    held = directory.finished_rounds() if session.sharers.rank == 0 else 0
    finished = held >= rounds
    count = session.processes.total(finished)
    if not count:
        return False
    if session.sites and count < session.processes.count:
        # All end here: torchrun lets none go before the last.
        whose = "this site has ended" if finished else "other sites have ended"
        others = "others have not" if finished else "this one has not"
        raise UserError(f"{whose} these {rounds} rounds and {others}: give all of them more --rounds.")
    what = f"{held} rounds, and its result is that of the last" if held > rounds else f"these {rounds} rounds"
    session.notes.append(f"{directory.path} already holds {what}: nothing to do.")
    return True


def _take_up(session: Session, saver: Saver) -> tuple[int, State, float, float]:
    """Where the run goes on: the rounds that are done, the state after them, seconds and simulated seconds."""
    directory, processes, sites = saver.directory, session.processes, session.sites
    snapshot, notes = saver.load()
    session.notes.extend(notes)
    state = restore(session, snapshot) if snapshot else session.experiment.algorithm.init(session.ctx)
    if session.sharers.rank == 0:
        directory.keep_constants(constants_of(session.ctx.model))
    round = snapshot.round if snapshot else 0
    if sites:
        everywhere = [*map(int, processes.texts(str(round)))]
        round = sites.take_up(directory.path, session.ctx.network.workers, everywhere)
        session.notes.extend(sites.disturbances)
        if processes.decide(sites.overdue()):
            raise sites.given_up()
    if session.sharers.rank == 0:
        directory.cut_back(round)
        if (directory.path / PARTITION).exists():
            session.notes.append(f"Continuing the run in {directory.path} from round {round}.")
        session.everyone.save(directory.path / PARTITION)
    if snapshot is None:
        return round, state, 0.0, 0.0
    if round == session.ctx.rounds:
        # Killed between its last checkpoint and its summary.
        saver.finish(state, directory.record(round))
    return round, state, snapshot.seconds, snapshot.simulated_seconds


def _holding(held: ExitStack, steps: Iterator[Step]) -> Iterator[Step]:
    with held:
        yield from steps


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
            check_finite({"train loss": per_worker["train_loss"]}, log, round, session)
            if theory and start is not None:
                values |= theory_terms(start, trained, log, ctx)
            simulated = clock.seconds if ctx.network.may_gather_private else nan
            values |= {"loss": loss, "seconds": time.perf_counter() - began, "simulated_seconds": simulated}
            record = make_record(session, round + 1, values, per_worker)
        del before, trained, mixed, start
        if saver is not None:
            saver.keep(round + 1, state, time.perf_counter() - began, clock.seconds, record)
        paused = time.perf_counter()
        yield Step(round + 1, loss, record)
        # What the caller does with a round is no time of the run's.
        began += time.perf_counter() - paused


def _speed(experiment: Experiment) -> Speed:
    assert experiment.step_seconds is not None, "an experiment is completed before it is used"
    return Speed(
        experiment.step_seconds, experiment.link_latency, experiment.link_bandwidth, experiment.algorithm.server
    )
