"""Runs a study's trials one after another, keeps their records, and stops in time."""

import gc
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from manyheads.experiment import Runtime
from manyheads.jobs import Job, News, run_jobs, to_the_end
from manyheads.new_workers import open_join
from manyheads.parts import pick_device
from manyheads.rounds import run
from manyheads.saver import about
from manyheads.session import Session, open_session
from manyheads.store import Run, RunDirectory
from manyheads.store.layout import PARTITION, SUMMARY
from manyheads.studies.cost import Costs
from manyheads.studies.records import Records
from manyheads.studies.trial import Trial

_FIRST_ROUNDS = 3
"""Rounds before a run's pace is known: the first ones compile and warm up."""
_AT_MOST_TOO_LONG = 3
"""How many times longer than a run an estimate of it may be."""


@dataclass(frozen=True)
class Runner:
    """Where runs are made and what is kept of them."""

    records: Records
    work: Path
    """Where run directories with their weights lie until they are recorded."""
    runtime: Runtime
    checkpoints: bool = True
    """Whether weights go to disk, so that a stopped run goes on where it stopped. New workers need them in any case."""
    kept: Callable[[Trial], None] = lambda trial: None
    """Told of every trial whose record has just been made."""

    def path(self, trial: Trial) -> Path:
        """Where a trial's run directory lies; one that looks at its run more often has another."""
        return self.work / f"{trial.name}-{trial.experiment.run_id}-every{trial.every}"

    def run(self, trials: Sequence[Trial], seconds: float | None = None) -> Generator[News]:
        """Run trials in their order.

        With ``seconds``, runs are left that cannot end in time: by what is estimated before any round is made, by the
        run's own pace, or by that of others like it.
        """
        deadline = float("inf") if seconds is None else time.monotonic() + seconds
        costs = Costs(self.records.folder, pick_device(self.runtime.device).type)
        takes: dict[tuple[str, str, bool], float] = {}
        for number, trial in enumerate(trials):
            began, trained = time.monotonic(), self._is_trained(trial)
            if began >= deadline:
                return
            kind = (trial.data, trial.experiment.algorithm.name, trained)
            if began + takes.get(kind, costs(trial, trained=trained).seconds / _AT_MOST_TOO_LONG) > deadline:
                continue
            if self.records.have(trial):
                # New workers have left the record of the run that they build on.
                yield News(number, "finished", trial.rounds)
                continue
            pace = _Pace(trial.rounds)
            needed = {later.source.name for later in trials[number + 1 :] if later.new is not None}
            with closing(to_the_end(number, self._one(trial, weights=trial.name in needed))) as news:
                for item in news:
                    yield replace(item, job=number)
                    if item.state == "running" and (end := pace.end(item.round)) > deadline:
                        takes[kind] = end - began
                        break
                else:
                    takes[kind] = time.monotonic() - began
            self._clear(trial, needed)

    def _is_trained(self, trial: Trial) -> bool:
        """Whether the run that a trial's new workers build on lies there."""
        return trial.new is not None and (self.path(trial.source) / SUMMARY).exists()

    def _one(self, trial: Trial, *, weights: bool) -> Generator[News]:
        """One run and its end. ``weights``: others need them."""
        _free_memory(pick_device(self.runtime.device))
        runtime = trial.runtime(self.runtime)
        if not self.checkpoints:
            # The weights that others need are those of the end.
            runtime = replace(runtime, checkpoint_every=trial.source.rounds)
        if trial.new is not None:
            yield from self._new_workers(trial, runtime)
        elif self.checkpoints or weights or trial.similarity:
            yield from self._with_weights(trial, runtime)
        else:
            yield from self._without_weights(trial, open_session(trial.experiment, replace(runtime, out=None)))

    def _with_weights(self, trial: Trial, runtime: Runtime) -> Generator[News]:
        """A run in a directory of its own, from where that stops."""
        for news in run_jobs([Job(trial.experiment, self.path(trial), trial.name)], runtime):
            if news.state == "finished" and not self.records.have(trial):
                self._keep(self.path(trial), trial)
            yield news

    def _new_workers(self, trial: Trial, runtime: Runtime) -> Generator[News]:
        """The run whose representation they use, unless it is there, and then theirs."""
        assert trial.new is not None
        source = trial.source
        for news in self._with_weights(source, runtime):
            if news.state == "failed":
                yield news
                return
            yield replace(news, state="running")
        out = self.path(trial) if self.checkpoints else None
        session = open_join(Run.open(self.path(source)), trial.new, replace(runtime, out=out))
        if out is None:
            yield from self._without_weights(trial, session)
            return
        for step in run(session):
            yield News(0, "running", source.rounds + step.round, step.record)
        self._keep(out, trial)
        yield News(0, "finished", trial.rounds)

    def _without_weights(self, trial: Trial, session: Session) -> Generator[News]:
        """A run of which only numbers reach the disk."""
        # Beside the one with weights that new workers would look for.
        path = self.path(trial).with_name(f"{self.path(trial).name}.numbers")
        content, record = session.everyone.content, None
        with ExitStack() as held:
            directory = RunDirectory.open(path, session.experiment, held, resume=False, content=content)
            directory.cut_back(0)
            session.everyone.save(directory.path / PARTITION)
            for step in run(session):
                if step.record is not None:
                    record = step.record
                    directory.append(record)
                yield News(0, "running", trial.rounds - session.ctx.rounds + step.round, step.record)
            assert record is not None, "the last round is evaluated"
            directory.finish(record, about(session))
            self._keep(path, trial)
        shutil.rmtree(path)
        yield News(0, "finished", trial.rounds)

    def _keep(self, directory: Path, trial: Trial) -> None:
        self.records.keep(directory, trial)
        self.kept(trial)

    def _clear(self, trial: Trial, needed: set[str]) -> None:
        """Remove the run directories that no later trial needs: of each the record is there."""
        for one in (trial, trial.source):
            if one.name not in needed and self.records.have(one):
                shutil.rmtree(self.path(one), ignore_errors=True)


class _Pace:
    """When a run will end, by the rounds it has made here."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.first: tuple[int, float] | None = None

    def end(self, round: int) -> float:
        """The monotonic time of its end; minus infinity while that is not known, or not worth asking any more."""
        now = time.monotonic()
        if self.first is None:
            self.first = (round, now)
        since, began = self.first
        if round - since < _FIRST_ROUNDS or 2 * round > self.rounds:
            return float("-inf")
        return now + (self.rounds - round) * (now - began) / (round - since)


def _free_memory(device: torch.device) -> None:
    """Give the device back what earlier runs held: engines plan with the memory that is free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.init()  # before which there is nothing to reset, and torch fails
        torch.cuda.reset_peak_memory_stats(device)
