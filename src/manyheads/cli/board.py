"""What a person sees of many runs at once: how far they are, and how each has ended."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

from manyheads.cli.terminal import FIRST_ROUND, while_waiting
from manyheads.cli.text import outcome, score
from manyheads.jobs import News
from manyheads.units import counted, human_seconds

_PATIENCE_SECONDS = 10.0
"""The longest time without a line where there is no live display."""

Tell = Callable[[News], None]


class Shown(NamedTuple):
    """What people see of a run beside its news."""

    label: str
    rounds: int
    seconds: float = 1.0
    """An estimate of what a round takes; only its ratio to those of the other runs matters."""


def follow(
    news: Iterable[News],
    runs: Sequence[Shown],
    title: str,
    *,
    finished: int = 0,
    validation: bool = False,
    quiet: bool = False,
) -> dict[str, News]:
    """Show the runs' news as they come: live on a terminal, elsewhere in lines. Gives the failures, by label.

    ``finished``: how many runs were finished before. With ``validation`` the scores shown are those on the validation
    split, by which rates are chosen.
    """
    tally = _Tally(runs, title, validation=validation)
    display: AbstractContextManager[Tell] = nullcontext(lambda item: None)
    if not quiet and sys.stdout.isatty():
        display = _live(tally)
    elif not quiet:
        display = _lines(tally, finished)
        news = while_waiting(news, lambda: f"{title}  {tally}" if tally.done else FIRST_ROUND)
    failed = {}
    try:
        with display as tell:
            for item in news:
                tally.take(item)
                if item.state == "failed":
                    failed[runs[item.job].label] = item
                tell(item)
    except KeyboardInterrupt:
        done = f"{tally.ended} of {counted(len(runs), 'run')} had ended"
        raise KeyboardInterrupt(f"stopped; {done}; the same command continues.") from None
    return failed


class _Tally:
    """How far all runs together are."""

    def __init__(self, runs: Sequence[Shown], title: str, *, validation: bool) -> None:
        self.runs, self.title, self.validation = runs, title, validation
        self.rounds = [0] * len(runs)
        self.scores = [""] * len(runs)
        self.total = sum(run.rounds for run in runs)
        self.ended = self.failed = 0
        self.here = 0.0
        self.began = time.monotonic()

    def take(self, news: News) -> None:
        if news.state == "running" and self.rounds[news.job]:
            # The pace counts only rounds that were made here, not those of a run that is continued.
            self.here += (news.round - self.rounds[news.job]) * self.runs[news.job].seconds
        elif not self.here:
            # Nor does it count first rounds, which take longer to prepare.
            self.began = time.monotonic()
        self.rounds[news.job] = self.runs[news.job].rounds if news.state == "failed" else news.round
        self.ended += news.state != "running"
        self.failed += news.state == "failed"
        if news.record is not None:
            values = news.record.metrics()
            held_out = f"validation {score(values, 'accuracy_validation')}"
            self.scores[news.job] = held_out if self.validation else outcome(values)

    @property
    def done(self) -> int:
        """Rounds that are made, or will never be, as their run failed."""
        return sum(self.rounds)

    def __str__(self) -> str:
        parts = [f"{self.ended}/{counted(len(self.runs), 'run')}"]
        if self.failed:
            parts.append(f"{self.failed} failed")
        to_come = sum((run.rounds - done) * run.seconds for run, done in zip(self.runs, self.rounds, strict=True))
        if self.here and to_come:
            parts.append(f"{human_seconds((time.monotonic() - self.began) * to_come / self.here)} left")
        return "  ".join(parts)

    def verdict(self, news: News) -> str | None:
        """A run's end in a line; None: it goes on, or was finished before."""
        label = self.runs[news.job].label
        if news.state == "failed":
            return f"{label}: failed: {news.error}"
        return f"{label}: {self.scores[news.job]}" if news.state == "finished" and self.scores[news.job] else None


@contextmanager
def _lines(tally: _Tally, finished: int) -> Iterator[Tell]:
    said = time.monotonic() - _PATIENCE_SECONDS
    if finished:
        print(f"{tally.title}  {finished} of {counted(len(tally.runs), 'run')} finished before", flush=True)

    def tell(news: News) -> None:
        nonlocal said
        line = tally.verdict(news)
        if line is None and news.state == "running" and time.monotonic() - said >= _PATIENCE_SECONDS:
            line = f"{tally.done}/{counted(tally.total, 'round')}"
        if line is not None:
            said = time.monotonic()
            print(f"{tally.title}  {tally}  {line}", flush=True)

    yield tell


@contextmanager
def _live(tally: _Tally) -> Iterator[Tell]:
    from rich.progress import BarColumn, Progress, TaskID, TextColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None, complete_style="cyan"),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, expand=True) as bar:
        total = bar.add_task(tally.title, total=tally.total, note=FIRST_ROUND)
        running: dict[int, TaskID] = {}

        def tell(news: News) -> None:
            run = tally.runs[news.job]
            if news.state == "running":
                if news.job not in running:
                    running[news.job] = bar.add_task(f"  {run.label}", total=run.rounds, note="")
                note = f"{news.round}/{run.rounds}  {tally.scores[news.job]}"
                bar.update(running[news.job], completed=news.round, note=note)
            elif news.job in running:
                bar.remove_task(running.pop(news.job))
            if (line := tally.verdict(news)) is not None:
                bar.console.print(line, markup=False, highlight=False)
            bar.update(total, completed=tally.done, note=str(tally))

        yield tell
