"""Work shared by threads, with torch single-threaded in each, so that their number changes no bit of the results."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")


class Threads:
    """A number of threads, started when there is work for more than one, and stopped together."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None
        self._stopped = threading.Event()

    def map(self, work: Callable[..., Result], items: Sequence) -> list[Result]:
        """``work`` on every item, results in order."""
        if self.count == 1 or len(items) < 2:
            with one_thread():
                return [work(item) for item in items]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.count, initializer=torch.set_num_threads, initargs=(1,))
        try:
            return list(self._pool.map(work, items))
        except BaseException:
            # Stop the other threads: an item can take minutes, and after Ctrl-C the process waits for its last thread.
            self._stopped.set()
            self._pool.shutdown()
            self._pool = None
            self._stopped.clear()
            raise

    def go_on(self) -> None:
        """Called by the work itself between steps; raises if nobody waits for the result any more."""
        if self._stopped.is_set():
            raise CancelledError


@contextmanager
def one_thread() -> Iterator[None]:
    """No threads inside operations: their number would change the order of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
