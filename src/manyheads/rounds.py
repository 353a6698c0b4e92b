"""The round loop: local phases, mixing, evaluation, records; a generator, so that whoever calls it does the showing."""

import json
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import isfinite, nan

import torch
from torch import Tensor

from manyheads.algorithms.base import Log, State
from manyheads.checkpoint import Checkpoints, Snapshot
from manyheads.data.shards import Shards
from manyheads.errors import Diverged, UserError
from manyheads.experiment import Experiment, Runtime
from manyheads.files import write_tensors
from manyheads.metrics.accuracy import summarise
from manyheads.metrics.clock import Clock, Speed
from manyheads.metrics.consensus import consensus_error, consensus_errors
from manyheads.metrics.similarity import mean_off_diagonal, similarities
from manyheads.metrics.theory import theory_terms
from manyheads.network.sites import resume_round
from manyheads.record import Record
from manyheads.session import Session, open_session, place
from manyheads.store import PARTITION, RunDirectory

_CHECKPOINT_SHARE = 0.05
_DISK_BYTES_PER_SECOND = 200e6
"""A careful guess of how long the first checkpoint takes; later ones are measured."""


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
            options = {"resume": runtime.resume, "patience": sharers.patience}
            directory = RunDirectory.open(directory.path, experiment, content=session.everyone.content, **options)
            stack.enter_context(directory.lock(sharers.patience))
        finished = directory.finished(ctx.rounds)
        if processes.total(sharers.rank == 0 and finished):
            if sites and not finished:
                raise UserError(
                    f"the other sites have ended these {ctx.rounds} rounds without this one: give more --rounds."
                )
            session.notes.append(f"{directory.path} already holds these {ctx.rounds} rounds: nothing to do.")
            return
        saver = _Saver(session, directory)
        with sharers.one_before_others():
            snapshot, notes = saver.load()
        session.notes.extend(notes)
        round, state, seconds, simulated = 0, None, 0.0, 0.0
        if snapshot is not None:
            round, state = snapshot.round, _restore(session, snapshot)
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
    session: Session, first: int, state: State, seconds: float, simulated: float, saver: "_Saver | None"
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
        loss = _checked_loss(log, round, session)
        if ctx.network.may_gather_private:
            clock.tick(log)
        record = None
        if theory or (round + 1) % runtime.eval_every == 0 or last:
            values, per_worker = _measure(session, before, trained, mixed, state)
            _check_finite({"train loss": per_worker["train_loss"]}, round, session)
            if theory and start is not None:
                values |= theory_terms(start, trained, log, round, ctx)
            seconds = time.perf_counter() - began
            simulated = clock.seconds if ctx.network.may_gather_private else nan
            record = _record(session, round + 1, loss, seconds, simulated, values, per_worker)
        del before, trained, mixed, start
        if saver is not None:
            saver.keep(round + 1, state, time.perf_counter() - began, clock.seconds, record)
        yield Step(round + 1, loss, record)


class _Saver:
    """Keeps a run in its directory: records at once, checkpoints as often as their share of the time allows."""

    def __init__(self, session: Session, directory: RunDirectory) -> None:
        self.session, self.directory = session, directory
        sharers, kept = session.sharers, session.kept_workers
        self.checkpoints = Checkpoints(
            directory.path / "checkpoint",
            run_id=session.experiment.run_id,
            num_workers=session.experiment.workers if session.sites is None else len(kept),
            workers=kept,
            rank=sharers.rank,
            num_ranks=sharers.count,
            generation=sharers.generation,
        )
        self.spent = 0.0
        self.next_cost: float | None = None

    def load(self) -> tuple[Snapshot | None, list[str]]:
        """The checkpoint to go on from; sites, which have one each, agree on its round."""
        if self.session.sites is None:
            return self.checkpoints.load()
        everywhere = self.session.processes.texts(json.dumps(self.checkpoints.rounds()))
        return self.checkpoints.load(at_most=resume_round([json.loads(rounds) for rounds in everywhere]))

    def keep(self, round: int, state: State, seconds: float, simulated: float, record: Record | None) -> None:
        session, last = self.session, round == self.session.ctx.rounds
        processes, sharers, traffic = session.processes, session.sharers, session.ctx.network.traffic
        if record is not None and sharers.rank == 0:
            self.directory.append(record)
        if processes.decide(last or self._due(round, state, seconds)):
            began = time.perf_counter()
            totals = (traffic.sent, traffic.received, traffic.on_wire, seconds, simulated)
            self.checkpoints.write_rows(Snapshot(round, state.params, state.buffers, *totals))
            sharers.wait()
            if sharers.rank == 0:
                self.checkpoints.complete(round, seconds)
            self.next_cost = time.perf_counter() - began
            self.spent += self.next_cost
        if last:
            self.finish(state, record)
        elif session.sites and processes.decide(session.sites.overdue()):
            raise session.sites.given_up()

    def finish(self, state: State, record: Record | None) -> None:
        """Write what is written once, the summary last."""
        if record is None:
            raise UserError("the last of these rounds was never evaluated: ask for more --rounds.")
        session, sharers = self.session, self.session.sharers
        models = session.experiment.algorithm.models(state, session.ctx)
        if sharers.count == 1:
            self.directory.save_models(models.params, models.buffers, session.describe_model())
        else:
            # Over the disk and not the network: heads stay where they are.
            self.directory.save_some_models(session.ctx.network.workers, models.params, models.buffers)
            sharers.wait()
            if sharers.rank == 0:
                self.directory.join_models(session.describe_model())
        if sharers.rank == 0:
            alike = self._compare_workers(models.params)
            disturbed = {"disturbances": session.sites.disturbances} if session.sites else {}
            about = {"notes": session.notes, "runtime": session.describe_runtime()}
            self.directory.finish(record, {**alike, **disturbed, **about})
        # Nobody goes on to read a summary that is not there yet.
        sharers.wait()

    def _compare_workers(self, names: Iterable[str]) -> dict[str, float]:
        """Keep how alike the workers' data and models are; the mean over every two workers."""
        session = self.session
        if not session.ctx.network.may_gather_private:
            session.notes.append("How alike the workers are is not said: heads stay where they are.")
            return {}
        classes = session.everyone.num_classes is not None
        maps = similarities(self.directory.models(names), session.everyone.class_counts if classes else None)
        write_tensors(self.directory.path / "similarity.safetensors", maps)
        return {f"similarity_{what}": mean_off_diagonal(matrix) for what, matrix in maps.items()}

    def _due(self, round: int, state: State, seconds: float) -> bool:
        every = self.session.runtime.checkpoint_every
        if every is not None:
            return round % every == 0
        if self.next_cost is None:
            size = sum(leaf.numel() * leaf.element_size() for leaf in (state.params | state.buffers).values())
            self.next_cost = size / _DISK_BYTES_PER_SECOND
        return self.spent + self.next_cost <= _CHECKPOINT_SHARE * seconds


def _restore(session: Session, snapshot: Snapshot) -> State:
    traffic = session.ctx.network.traffic
    traffic.sent, traffic.received = snapshot.sent.copy(), snapshot.received.copy()
    traffic.on_wire = snapshot.on_wire
    engine, device = session.ctx.engine, session.device
    return State(place(snapshot.params, engine, device), place(snapshot.buffers, engine, device))


def _speed(experiment: Experiment) -> Speed:
    assert experiment.step_seconds is not None, "an experiment is completed before it is used"
    return Speed(
        experiment.step_seconds, experiment.link_latency, experiment.link_bandwidth, experiment.algorithm.server
    )


def _checked_loss(log: Log, round: int, session: Session) -> float:
    """The mean loss of the last phase; a worker whose loss is no number ends the run."""
    gather = session.ctx.network.gather
    everywhere = {phase: gather(work.loss) for phase, work in log.items()}
    # NaN: the worker saw no sample. Losses that are no number come as infinity.
    _check_finite(
        {f"phase '{phase}'": loss.nan_to_num(nan=0.0, posinf=torch.inf).tolist() for phase, loss in everywhere.items()},
        round,
        session,
    )
    return float(list(everywhere.values())[-1].nanmean()) if everywhere else float("nan")


def _check_finite(losses: Mapping[str, Sequence[float | None]], round: int, session: Session) -> None:
    """A worker whose loss is no number ends the run, before anything of the round is kept."""
    for where, values in losses.items():
        for worker, value in enumerate(values):
            if value is not None and not isfinite(value):
                raise Diverged(
                    f"the loss of worker {worker} is not a number in round {round + 1}, {where}: "
                    f"lower --lr (now {session.ctx.rates.lr:g}) or --clip; the last good checkpoint is kept."
                )


Measured = tuple[dict[str, float], dict[str, list[float | None]]]


def _measure(session: Session, before: State, trained: State, mixed: State, end: State) -> Measured:
    """Every number of a record that comes from a state, and the values of each worker."""
    ctx, federation = session.ctx, session.federation
    values: dict[str, float] = {
        "consensus_error": nan,
        "consensus_error_relative": nan,
        "consensus_error_before_mixing": nan,
    }
    if ctx.network.may_gather_private:
        values["consensus_error"], values["consensus_error_relative"] = consensus_errors(mixed.params, ctx.network)
        values["consensus_error_before_mixing"] = consensus_error(before.params, ctx.network)

    def score(state: State, shards: Shards) -> tuple[Tensor, Tensor, Tensor]:
        models = session.experiment.algorithm.models(state, ctx)
        result = ctx.engine.evaluate(models.params, models.buffers, shards)
        # Whether a worker has samples, not how many: that stays with it.
        metric, loss, tested = (ctx.network.gather(v).cpu() for v in (result.metric, result.loss, result.count > 0))
        return metric, loss, tested

    accuracy, _, count = score(end, federation.test)
    values["accuracy_mean"], values["accuracy_std"], values["accuracy_worst10"] = summarise(accuracy, count)
    values["workers_without_test"] = int((count == 0).sum())
    accuracy_before, _, _ = score(before, federation.test)
    values["accuracy_before_mixing"] = summarise(accuracy_before, count)[0]
    _, train_loss, train_count = score(trained, federation.train)
    values["train_loss"] = summarise(train_loss, train_count)[0]
    per_worker = {
        "accuracy": _listed(accuracy, count),
        "accuracy_before_mixing": _listed(accuracy_before, count),
        "train_loss": _listed(train_loss, train_count),
    }
    if session.experiment.validation > 0:
        held_out, _, held_count = score(end, federation.validation)
        values["accuracy_validation"] = summarise(held_out, held_count)[0]
        per_worker["accuracy_validation"] = _listed(held_out, held_count)
    return values, per_worker


def _record(
    session: Session,
    round: int,
    loss: float,
    seconds: float,
    simulated: float,
    values: dict[str, float],
    per_worker: dict[str, list[float | None]],
) -> Record:
    network = session.ctx.network
    sent, received = (
        float(network.gather(torch.from_numpy(count)).double().mean())
        for count in (network.traffic.sent, network.traffic.received)
    )
    return Record(
        round=round,
        algorithm=session.experiment.algorithm.name,
        run_id=session.experiment.run_id,
        majority_floor=session.majority_floor,
        loss=loss,
        bytes_sent_per_worker=sent,
        bytes_received_per_worker=received,
        bytes_on_wire=session.processes.total(network.traffic.on_wire),
        seconds=seconds,
        simulated_seconds=simulated,
        peak_memory_bytes=peak_memory(session.device),
        per_worker=per_worker,
        **{"accuracy_validation": None, **values},  # pyright: ignore[reportArgumentType]
    )


def _listed(values: Tensor, counts: Tensor) -> list[float | None]:
    return [float(v) if c > 0 else None for v, c in zip(values, counts, strict=True)]


def peak_memory(device: torch.device) -> int:
    """The most memory this process has held: on the GPU where it trains there, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
