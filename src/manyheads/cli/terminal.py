"""What a person sees of a run while it goes on: its rounds, and what else takes long."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import Event, Thread, Timer
from typing import TYPE_CHECKING, TypeVar

from manyheads.cli.text import outcome
from manyheads.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from manyheads.rounds import Step

_PATIENCE_SECONDS = 2.0
"""How long to show nothing before saying what is going on, and the shortest time between two lines."""

_LONG_PATIENCE_SECONDS = 10.0
"""The same once there has been something to see."""

FIRST_ROUND = "preparing, and the first round"
"""What is going on until there is something to show: on a GPU a large net is compiled for minutes."""

_WIDE = 80
"""Letters in a line that are enough for a bar and all the text beside it."""

Item = TypeVar("Item")


def follow(
    steps: Iterable["Step"],
    rounds: int,
    notes: Sequence[str],
    *,
    within: Callable[[], str] = str,
    quiet: bool = False,
) -> Iterator["Step"]:
    """Pass a run's steps on and show them: as one live bar on a terminal, elsewhere as a line now and then.

    ``notes`` may grow while the run goes on; each is shown once. ``within`` tells how far a round has come.
    """
    if quiet:
        yield from steps
    elif sys.stdout.isatty():
        yield from _with_bar(steps, rounds, notes, within)
    else:
        yield from _with_lines(steps, rounds, notes, within)


@contextmanager
def waiting(what: str, *, quiet: bool = False) -> Iterator[Callable[[str, int, int | None], None]]:
    """Say what is going on once it takes long. Gives a callback for downloads: file, bytes so far, bytes in all."""
    if quiet:
        yield lambda name, done, total: None
        return
    from rich.console import Console

    console = Console(highlight=False)
    status = console.status(f"{what} ...")

    def start() -> None:
        # Where nobody reads any more, the command itself will find out.
        with suppress(OSError, ValueError):
            status.start() if console.is_terminal else print(f"{what} ...", flush=True)

    timer = Timer(_PATIENCE_SECONDS, start)
    said = time.monotonic()

    def downloading(name: str, done: int, total: int | None) -> None:
        nonlocal said
        line = f"downloading {name}: {human_bytes(done)}" + (f" of {human_bytes(total)}" if total else "")
        if console.is_terminal:
            status.update(f"{line} ...")
        elif time.monotonic() - said >= _PATIENCE_SECONDS:
            said = time.monotonic()
            print(line, flush=True)

    timer.start()
    try:
        yield downloading
    finally:
        timer.cancel()
        timer.join()
        status.stop()


def while_waiting(items: Iterable[Item], say: Callable[[], str]) -> Iterator[Item]:
    """The items; while the first takes long, and later while one takes very long, a line says what is going on."""
    heard, patience, ended = time.monotonic(), _PATIENCE_SECONDS, Event()

    def watch() -> None:
        nonlocal heard, patience
        while not ended.wait(_PATIENCE_SECONDS):
            if time.monotonic() - heard >= patience:
                heard, patience = time.monotonic(), _LONG_PATIENCE_SECONDS
                # Where nobody reads any more, the command itself will find out.
                with suppress(OSError, ValueError):
                    print(f"{say()} ...", flush=True)

    watching = Thread(target=watch, daemon=True)
    watching.start()
    try:
        for item in items:
            heard, patience = time.monotonic(), _LONG_PATIENCE_SECONDS
            yield item
    finally:
        ended.set()
        watching.join()


class _Pace:
    """How fast the rounds of this process go by, and the newest score."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self.began = rounds, time.monotonic()
        self.first: tuple[int, float] | None = None
        self.score = ""

    def after(self, step: "Step", between: str = "  ") -> str:
        """Score and loss in words, and rate and time left."""
        now = time.monotonic()
        # The first round takes longer to prepare: it counts only until there is another.
        round, since = self.first or (step.round - 1, self.began)
        self.first = self.first or (step.round, now)
        if step.record is not None:
            self.score = outcome(step.record.metrics())
        each = (now - since) / (step.round - round)
        rate = f"{1 / each:.1f} rounds/s" if each < 1 else f"{human_seconds(each)}/round"
        left = f"{human_seconds(each * (self.rounds - step.round))} left"
        return f"{self.score}{'  ' * bool(self.score)}loss {step.loss:.3f}{between}{rate}  {left}"


class _Notes:
    """Shows each note once, as they come."""

    def __init__(self, notes: Sequence[str], show: Callable[[str], None]) -> None:
        self.notes, self.show, self.shown = notes, show, 0

    def tell(self) -> None:
        for note in self.notes[self.shown :]:
            self.show(f"note: {note}")
        self.shown = len(self.notes)


def _with_lines(
    steps: Iterable["Step"], rounds: int, notes: Sequence[str], within: Callable[[], str]
) -> Iterator["Step"]:
    pace, news, said, done = _Pace(rounds), _Notes(notes, print), None, 0

    def going_on() -> str:
        what = f"round {done + 1}/{rounds}" if done else FIRST_ROUND
        return ": ".join(filter(None, [what, within()]))

    news.tell()
    for step in while_waiting(steps, going_on):
        done = step.round
        news.tell()
        line, now = pace.after(step), time.monotonic()
        if said is None or (step.record is not None and now - said >= _PATIENCE_SECONDS):
            said = now
            print(f"round {step.round:>{len(str(rounds))}}/{rounds}  {line}", flush=True)
        yield step
    news.tell()


def _with_bar(
    steps: Iterable["Step"], rounds: int, notes: Sequence[str], within: Callable[[], str]
) -> Iterator["Step"]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeElapsedColumn
    from rich.table import Column
    from rich.text import Text

    class Told(ProgressColumn):
        """The outcome of the last round and, when the next has become long, how far that has come."""

        def render(self, task: Task) -> Text:
            long = time.monotonic() - heard >= _LONG_PATIENCE_SECONDS
            return Text("  ".join(filter(None, [task.description, within() if long else ""])))

    heard = time.monotonic()
    # Where there is little room, only the bar gives way.
    others = (part(table_column=Column(no_wrap=True)) for part in (MofNCompleteColumn, TimeElapsedColumn, Told))
    parts = (BarColumn(bar_width=None, complete_style="cyan"), *others)
    with Progress(*parts, expand=True) as bar:
        between = "  " if bar.console.width >= _WIDE else "\n"
        task, pace = bar.add_task(FIRST_ROUND, total=rounds), _Pace(rounds)
        news = _Notes(notes, partial(bar.console.print, markup=False, highlight=False))
        news.tell()
        for step in steps:
            heard = time.monotonic()
            news.tell()
            bar.update(task, completed=step.round, description=pace.after(step, between))
            yield step
        news.tell()
