"""Runs a study's trials one after another, keeps their records, and stops in time."""

import gc
import shutil
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from manyheads.algorithms import State
from manyheads.derived import pick_device
from manyheads.experiment import Runtime
from manyheads.jobs import News, to_the_end
from manyheads.new_workers import Learned, open_join, open_join_from
from manyheads.rounds import run
from manyheads.session import Session, open_session
from manyheads.store import Run
from manyheads.store.layout import SUMMARY
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
            with closing(to_the_end(number, self._one(number, trial, taught=trial.name in needed))) as news:
                for item in news:
                    yield item
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

    def _one(self, number: int, trial: Trial, *, taught: bool) -> Generator[News]:
        """Run one trial. ``taught``: new workers build on it, so that what it has learned is kept."""
        if trial.new is not None and self._is_trained(trial):
            yield News(number, "running", trial.source.rounds)
        elif trial.new is not None:
            for news in self._one(number, trial.source, taught=True):
                yield replace(news, state="running")
        _free_memory(pick_device(self.runtime.device))
        out = self.path(trial)
        if not self.checkpoints:
            # Not the trial's own path, where new workers would look for a run with weights.
            out = out.with_name(f"{out.name}.numbers")
            shutil.rmtree(out, ignore_errors=True)
        session = self._open(trial, replace(trial.runtime(self.runtime), out=out))

        def keep(state: State) -> None:
            if taught and not self.checkpoints:
                self._learned[trial.name] = Learned.from_session(session, state, str(self.path(trial)))

        for step in run(session, keep, weights=self.checkpoints):
            yield News(number, "running", trial.rounds - session.ctx.rounds + step.round, step.record)
        # A run that was made again for new workers is recorded already, and keeps that record.
        if not self.records.have(trial):
            self.records.keep(out, trial)
        if not self.checkpoints:
            shutil.rmtree(out)
        yield News(number, "finished", trial.rounds)

    def _open(self, trial: Trial, runtime: Runtime) -> Session:
        """A session for a trial; for new workers, with what their source has learned."""
        if trial.new is None:
            return open_session(trial.experiment, runtime)
        if (learned := self._learned.get(trial.source.name)) is not None:
            return open_join_from(learned, trial.new, runtime)
        return open_join(Run.open(self.path(trial.source)), trial.new, runtime)

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
