"""Many runs side by side over the cores, each in its own directory and continued where it stopped."""

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Literal

import torch

from manyheads.data import load
from manyheads.data.federation import saved_data_digest
from manyheads.derived import pick_device
from manyheads.errors import Diverged, UserError, is_out_of_memory
from manyheads.experiment import Experiment, Runtime
from manyheads.machine import cores
from manyheads.record import Record
from manyheads.rounds import run
from manyheads.session import open_session
from manyheads.store import RunDirectory
from manyheads.store.layout import PARTITION, finished_rounds


@dataclass(frozen=True)
class Job:
    """A run to be made."""

    experiment: Experiment
    """Complete."""
    path: Path
    label: str
    """What people know it by among the others."""

    @property
    def rounds(self) -> int:
        return self.experiment.recipe.rounds

    @property
    def finished(self) -> bool:
        return finished_rounds(self.path) >= self.rounds


@dataclass(frozen=True)
class News:
    """What has become of a job."""

    job: int
    """Its place in the list."""
    state: Literal["running", "finished", "failed"]
    round: int = 0
    """Rounds done."""
    record: Record | None = None
    """The round's record, where it was evaluated."""
    error: str = ""
    """Why it failed, in one line."""
    diverged: bool = False
    """Whether it failed because of its rates, so that it would fail again."""


def run_jobs(jobs: Sequence[Job], runtime: Runtime) -> Generator[News]:
    """Run what is not finished yet. A run that fails does not stop the others.

    On the CPU every core has a process of its own that makes one run after another; on a GPU, and on a single core
    (``threads=1``), this process makes them. Closing the generator stops the processes; what they have kept stays.
    """
    waiting, digest = [], cache(lambda data: load(data, runtime.data_dir).digest())
    for number, job in enumerate(jobs):
        known = saved_data_digest(job.path / PARTITION)
        # A finished run whose data or code have changed since is not skipped: opening it refuses it with the reason.
        same = known is None or known == digest(job.experiment.data)
        if job.finished and same and not RunDirectory(job.path).changed_code(job.experiment):
            yield News(number, "finished", job.rounds)
        else:
            waiting.append(number)
    threads = runtime.threads or cores()
    processes = 1 if pick_device(runtime.device).type == "cuda" else min(threads, len(waiting))
    if processes > 1:
        yield from _in_processes(jobs, waiting, replace(runtime, threads=threads // processes), processes)
    else:
        for number in waiting:
            yield from to_the_end(number, _run(number, jobs[number], runtime))


def to_the_end(number: int, news: Generator[News]) -> Generator[News]:
    """The news of one run; if it fails, the last of them says why.

    Whatever is wrong with one run must not cost the hours of the others.
    """
    try:
        yield from news
    except UserError as error:
        yield News(number, "failed", error=str(error), diverged=isinstance(error, Diverged))
    except Exception as error:
        why = "it does not fit into the device's memory."
        if not is_out_of_memory(error):
            traceback.print_exc()
            why = f"{type(error).__name__}, as shown above."
        yield News(number, "failed", error=why)


def _run(number: int, job: Job, runtime: Runtime) -> Generator[News]:
    for step in run(open_session(job.experiment, replace(runtime, out=job.path))):
        yield News(number, "running", step.round, step.record)
    yield News(number, "finished", job.rounds)


def _in_processes(jobs: Sequence[Job], waiting: Sequence[int], runtime: Runtime, count: int) -> Iterator[News]:
    """Hand the jobs out to processes that live for as long as there are jobs."""
    queue = deque(waiting)
    processes: dict[Connection, SpawnProcess] = {}
    busy: dict[Connection, int] = {}

    def hand_out(pipe: Connection) -> None:
        busy[pipe] = queue.popleft()
        # If its process has died meanwhile, the next recv() says so.
        with suppress(ConnectionError):
            pipe.send((busy[pipe], jobs[busy[pipe]]))

    def start() -> None:
        # A forked child would share the threads and locks that torch holds in this process.
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, runtime), daemon=True)
        with _without_interrupts():
            process.start()
        theirs.close()
        processes[pipe] = process
        hand_out(pipe)

    try:
        for _ in range(count):
            start()
        while busy:
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                try:
                    news: News = pipe.recv()
                except (EOFError, ConnectionError):
                    processes[pipe].join()
                    status = processes[pipe].exitcode or 0
                    # Memory is what the system kills for; a process that ends by itself has said why.
                    why = ": it may have run out of memory" if status < 0 else ", as shown above"
                    reason = f"its process ended with status {status}{why}."
                    news = News(busy.pop(pipe), "failed", error=reason)
                    if queue:
                        start()
                else:
                    if news.state != "running":
                        del busy[pipe]
                        if queue:
                            hand_out(pipe)
                yield news
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.join()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes started in the block never see Ctrl-C, which a terminal sends to all: the first one stops the others.

    A new process inherits the signal mask of the one that starts it.
    """
    # Python's resource tracker, which starts with the first process, would unblock the signal again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, runtime: Runtime) -> None:
    """A process that runs jobs, one after the other, for as long as the one that started it lives."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    assert runtime.threads is not None
    torch.set_num_threads(runtime.threads)
    while True:
        number, job = pipe.recv()
        for news in to_the_end(number, _run(number, job, runtime)):
            pipe.send(news)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
