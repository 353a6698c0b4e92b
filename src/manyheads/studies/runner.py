"""Runs a study's trials one after another, keeps their records, and stops in time."""

import gc
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from manyheads.algorithms import State
from manyheads.derived import pick_device
from manyheads.experiment import Runtime
from manyheads.jobs import Job, News, run_jobs, to_the_end
from manyheads.new_workers import Learned, open_join, open_join_from
from manyheads.rounds import run
from manyheads.saver import about
from manyheads.session import Session, open_session
from manyheads.store import Run, RunDirectory
from manyheads.store.layout import PARTITION, SUMMARY
from manyheads.studies.cost import Costs, Kind, kind
from manyheads.studies.records import Records
from manyheads.studies.trial import Trial

_FIRST_ROUNDS = 3
"""Rounds before a run's pace is known: the first ones compile and warm up."""
_AT_MOST_TOO_LONG = 3
"""An estimate may be this many times too long: a run is skipped only if even a fraction of it does not fit."""


@dataclass
class Runner:
    """Where runs are made and what is kept of them."""

    records: Records
    work: Path
    """Where run directories with their weights lie until they are recorded."""
    runtime: Runtime
    checkpoints: bool = True
    """Whether weights go to disk, so that a stopped run goes on where it stopped."""
    _learned: dict[str, Learned] = field(default_factory=dict)
    """What trials that are not on disk have learned, by their names, for the new workers of later trials."""

    def path(self, trial: Trial) -> Path:
        """Where a trial's run directory lies; trials that evaluate the same run more or less often have others."""
        return self.work / f"{trial.name}-{trial.experiment.run_id}-every{trial.every}"

    def run(self, trials: Sequence[Trial], seconds: float | None = None) -> Generator[News]:
        """Run trials in their order.

        With ``seconds``, runs that cannot end in time are left out: judged by an estimate before the first round, by
        the run's own pace after that, or by the time that similar runs took.
        """
        deadline = float("inf") if seconds is None else time.monotonic() + seconds
        costs = Costs(self.records.folder, pick_device(self.runtime.device).type)
        takes: dict[tuple[Kind, bool], float] = {}
        for number, trial in enumerate(trials):
            if self.records.have(trial):
                # It was recorded for new workers that build on it.
                yield News(number, "finished", trial.rounds)
                continue
            began, trained = time.monotonic(), self._is_trained(trial)
            if began >= deadline:
                return
            alike = (kind(trial), trained)
            if began + takes.get(alike, costs(trial, trained=trained).seconds / _AT_MOST_TOO_LONG) > deadline:
                continue
            pace = _Pace(trial.rounds)
            needed = {later.source.name for later in trials[number + 1 :] if later.new is not None}
            with closing(to_the_end(number, self._one(trial, taught=trial.name in needed))) as news:
                for item in news:
                    yield replace(item, job=number)
                    if item.state == "running" and (end := pace.end(item.round)) > deadline:
                        takes[alike] = end - began
                        break
                    if item.state == "finished":
                        takes[alike] = time.monotonic() - began
            self._clear(trial, needed)

    def _is_trained(self, trial: Trial) -> bool:
        """Whether what a trial's new workers build on has been learned."""
        source = trial.source
        return trial.new is not None and (source.name in self._learned or (self.path(source) / SUMMARY).exists())

    def _one(self, trial: Trial, *, taught: bool = False) -> Generator[News]:
        """Run one trial. ``taught``: new workers build on it, so that what it has learned is kept."""
        _free_memory(pick_device(self.runtime.device))
        runtime = trial.runtime(self.runtime)
        if not self.checkpoints:
            # Similarities need a run directory, into which weights are then written only once, at the end.
            runtime = replace(runtime, checkpoint_every=trial.source.rounds)
        if trial.new is not None:
            yield from self._new_workers(trial, runtime)
        elif self.checkpoints or trial.similarity:
            yield from self._with_weights(trial, runtime)
        else:
            session = open_session(trial.experiment, replace(runtime, out=None))

            def keep(state: State) -> None:
                if taught:
                    self._learned[trial.name] = Learned.from_session(session, state, str(self.path(trial)))

            yield from self._without_weights(trial, session, keep)

    def _with_weights(self, trial: Trial, runtime: Runtime) -> Generator[News]:
        """A run in a directory of its own, continued where that stops."""
        for news in run_jobs([Job(trial.experiment, self.path(trial), trial.name)], runtime):
            if news.state == "finished" and not self.records.have(trial):
                self.records.keep(self.path(trial), trial)
            yield news

    def _new_workers(self, trial: Trial, runtime: Runtime) -> Generator[News]:
        """The run whose representation the new workers use, unless it exists, and then their own."""
        assert trial.new is not None
        source = trial.source
        if self._is_trained(trial):
            yield News(0, "running", source.rounds)
        else:
            for news in self._one(source, taught=True):
                if news.state == "failed":
                    yield news
                    return
                yield replace(news, state="running")
            _free_memory(pick_device(self.runtime.device))
        out = self.path(trial) if self.checkpoints else None
        runtime = replace(runtime, out=out)
        if source.name in self._learned:
            session = open_join_from(self._learned[source.name], trial.new, runtime)
        else:
            session = open_join(Run.open(self.path(source)), trial.new, runtime)
        if out is None:
            yield from self._without_weights(trial, session)
            return
        for step in run(session):
            yield News(0, "running", source.rounds + step.round, step.record)
        self.records.keep(out, trial)
        yield News(0, "finished", trial.rounds)

    def _without_weights(
        self, trial: Trial, session: Session, ended: Callable[[State], None] = lambda state: None
    ) -> Generator[News]:
        """A run of which only numbers reach the disk."""
        # Not the trial's own path, where new workers would look for a run with weights.
        path = self.path(trial).with_name(f"{self.path(trial).name}.numbers")
        record = None
        with ExitStack() as held:
            directory = RunDirectory.open(path, session.experiment, held, resume=False, federation=session.everyone)
            directory.cut_back(0)
            session.everyone.save(directory.path / PARTITION)
            for step in run(session, ended):
                if step.record is not None:
                    record = step.record
                    directory.append(record)
                yield News(0, "running", trial.rounds - session.ctx.rounds + step.round, step.record)
            assert record is not None, "the last round is evaluated"
            directory.finish(record, about(session))
            # A run that was made again for new workers is recorded already, and keeps that record.
            if not self.records.have(trial):
                self.records.keep(path, trial)
        shutil.rmtree(path)
        yield News(0, "finished", trial.rounds)

    def _clear(self, trial: Trial, needed: set[str]) -> None:
        """Remove what no later trial needs; of run directories only those that are recorded."""
        for one in (trial, trial.source):
            if one.name not in needed:
                self._learned.pop(one.name, None)
                if self.records.have(one):
                    shutil.rmtree(self.path(one), ignore_errors=True)


class _Pace:
    """When a run will end, by the rounds it has made here."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.first: tuple[int, float] | None = None

    def end(self, round: int) -> float:
        """The monotonic time of its end; minus infinity while that is unknown, and when it is more than half done."""
        now = time.monotonic()
        if self.first is None:
            self.first = (round, now)
        since, began = self.first
        if round - since < _FIRST_ROUNDS or 2 * round > self.rounds:
            return float("-inf")
        return now + (self.rounds - round) * (now - began) / (round - since)


def _free_memory(device: torch.device) -> None:
    """Free the memory that earlier runs held: engines plan with what is free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.init()  # or the next line would fail in a process that has not used the GPU yet
        torch.cuda.reset_peak_memory_stats(device)
