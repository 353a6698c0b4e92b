"""Keeping a run in its directory: records at once, checkpoints as often as their share of the time allows."""

import time
from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import Tensor

from manyheads.algorithms.base import State
from manyheads.checkpoint import Checkpoints
from manyheads.errors import UserError
from manyheads.files import write_tensors
from manyheads.metrics.similarity import mean_cosine, mean_cosines, similarities
from manyheads.metrics.theorem import assess
from manyheads.record import Record
from manyheads.session import Session
from manyheads.sites import resume_round
from manyheads.snapshot import Snapshot
from manyheads.store import RunDirectory
from manyheads.store.layout import CHECKPOINT, SIMILARITY
from manyheads.topology import is_graph
from manyheads.tree import Params

_CHECKPOINT_SHARE = 0.05
"""Part of a run's time that its checkpoints may take."""
_DISK_BYTES_PER_SECOND = 200e6
"""A cautious guess, for the first checkpoint; after that the time is measured."""
_MOST_MIXED = 500
"""Up to so many workers the spectrum of the graph takes no time to speak of."""
_MOST_MAPPED = 1000
"""Up to so many workers the cosines between every two of them are kept: three maps then take 12 MB."""


class Saver:
    """What a run does with its directory, round by round and at its end."""

    def __init__(self, session: Session, directory: RunDirectory, *, weights: bool = True) -> None:
        """``weights``: whether checkpoints and models are written; else only numbers are."""
        self.session, self.directory, self.weights = session, directory, weights
        sharers = session.sharers
        self.checkpoints = Checkpoints(
            directory.path / CHECKPOINT,
            run_id=session.experiment.run_id,
            num_workers=len(session.everyone.ids),
            workers=session.kept_workers,
            rank=sharers.rank,
            num_ranks=sharers.count,
            generation=sharers.generation,
            patience=sharers.patience,
        )
        self.earlier_seconds = 0.0
        """What earlier starts took. It allows for no checkpoints now: how much of it went into theirs is not known."""
        self.spent = 0.0
        """Seconds that this start has spent on checkpoints."""
        self.next_cost: float | None = None
        """What the next checkpoint is expected to take; None: not estimated yet."""

    def load(self) -> tuple[Snapshot | None, list[str]]:
        """The checkpoint to continue from, and what the user should be told.

        Processes that share a directory agree on the newest checkpoint in which none of them finds its own part
        damaged; sites, which have a directory each, agree on a round.
        """
        processes, sharers = self.session.processes, self.session.sharers
        at_most, notes = None, []
        if self.session.sites:
            at_most = resume_round(processes.gather_json(self.checkpoints.rounds()))
        while True:
            with sharers.one_before_others():
                snapshot, found = self.checkpoints.load(at_most)
            processes.wait_long()
            said = sharers.gather_json([snapshot.round if snapshot else 0, found])
            rounds, findings = zip(*said, strict=True)
            notes += dict.fromkeys(chain.from_iterable(findings))
            at_most = min(rounds)
            if at_most == max(rounds):
                self.earlier_seconds = snapshot.seconds if snapshot else 0.0
                return snapshot, notes

    def keep(self, round: int, state: State, seconds: float, simulated: float, record: Record | None) -> None:
        """Keep what is due after a round."""
        session, last = self.session, round == self.session.ctx.rounds
        processes, sharers, traffic = session.processes, session.sharers, session.ctx.network.traffic
        if record is not None and sharers.rank == 0:
            self.directory.append(record)
        if self.weights and processes.decide(last or self._due(round, state, seconds)):
            began = time.perf_counter()
            totals = (traffic.sent, traffic.received, traffic.on_wire, seconds, simulated)
            self.checkpoints.write_rows(Snapshot(round, state.params, state.buffers, *totals))
            sharers.wait_long()
            if sharers.rank == 0:
                # A run that continues from this checkpoint never makes the records before it again.
                self.directory.sync()
                self.checkpoints.complete(round, seconds)
            self.next_cost = time.perf_counter() - began
            self.spent += self.next_cost
        if last:
            if session.sites and self.weights:
                # A site whose disk is full goes back to an earlier checkpoint, to which those that have ended cannot.
                processes.wait_long()
            self.finish(state, record)
        elif session.sites and processes.decide(session.sites.overdue()):
            raise session.sites.given_up()

    def finish(self, state: State, record: Record | None) -> None:
        """Write what is written once, the summary last."""
        if record is None:
            raise UserError("the last of these rounds was never evaluated: ask for more --rounds.")
        session, sharers = self.session, self.session.sharers
        models = session.experiment.algorithm.models(state, session.ctx)
        leaves = {**models.params, **models.buffers}
        if self.weights and sharers.count == 1:
            self.directory.save_models(leaves, session.describe_model())
        elif self.weights:
            # Over the disk and not the network, which never carries heads.
            self.directory.save_some_models(leaves, session.ctx.network.workers)
            sharers.wait_long()
            if sharers.rank == 0:
                everyone = session.experiment.workers
                self.directory.join_models(session.describe_model(), everyone, sharers.patience)
        if sharers.rank == 0:
            alike = self._compare_workers(models.params, record)
            self.directory.finish(record, {**alike, **_about(session)})
        # The others may read the summary next, so it must be there.
        sharers.wait_long()

    def _compare_workers(self, own: Params, record: Record) -> dict[str, float]:
        """Keep how alike every two workers' data and models are; gives the models' means if the record lacks them."""
        session = self.session
        if not session.ctx.network.may_gather_private:
            session.notes.append("It is not known how alike the workers are: heads stay at their sites.")
            return {}
        if session.experiment.workers <= _MOST_MAPPED:
            maps = similarities(self._everyones(own), session.everyone.class_counts)
            write_tensors(self.directory.path / SIMILARITY, maps)
        if record.similarity_heads is None and record.similarity_representations is None:
            return mean_cosines(dict(self._everyones(own)))
        return {}

    def _everyones(self, own: Params) -> Iterable[tuple[str, Tensor]]:
        """The leaves of all workers' models, one after another; read from disk if other processes hold some rows."""
        return own.items() if self.session.sharers.count == 1 else self.directory.models(own)

    def _due(self, round: int, state: State, seconds: float) -> bool:
        every = self.session.runtime.checkpoint_every
        if every is not None:
            return round % every == 0
        if self.next_cost is None:
            size = sum(leaf.nbytes for leaf in (state.params | state.buffers).values())
            self.next_cost = size / _DISK_BYTES_PER_SECOND
        return self.spent + self.next_cost <= _CHECKPOINT_SHARE * (seconds - self.earlier_seconds)


def _about(session: Session) -> dict[str, Any]:
    """What the summary of a run says besides its last record: how alike data are, who mixed, where it was computed."""
    experiment, counts, found = session.experiment, session.everyone.class_counts, dict[str, Any]()
    if counts is not None and session.ctx.network.may_gather_private and (mean := mean_cosine([counts])) is not None:
        found["similarity_data"] = mean
    if is_graph(experiment.graph) and experiment.workers <= _MOST_MIXED:
        found |= assess(session.mixing).numbers
    if session.sites:
        found["disturbances"] = session.sites.disturbances
    if session.teacher is not None:
        found["teacher"] = session.teacher
    found |= {"title": experiment.algorithm.title, "root": experiment.root}
    return {**found, "notes": session.notes, "runtime": session.describe_runtime()}
