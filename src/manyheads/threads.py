"""Work shared by threads, with torch single-threaded in each, so that their number changes no bit of the results."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

_LARGE = 1 << 20
"""Numbers from which on handing work to threads costs less than it saves."""


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
            self._pool = ThreadPoolExecutor(self.count, initializer=_work_alone)
        try:
            return list(self._pool.map(work, items))
        except BaseException:
            # Stop the other threads: an item can take minutes, and after Ctrl-C the process waits for its last thread.
            self._stopped.set()
            self._pool.shutdown()
            self._pool = None
            self._stopped.clear()
            raise

    @contextmanager
    def shared(self) -> Iterator[None]:
        """In the block ``by_rows`` hands out rows to these threads, and torch has none inside operations.

        Those wait for each other many times in an operation: on a machine that has other work to do, they make the
        rounds of small nets several times as long.
        """
        before = _SHARED.set(self)
        try:
            with one_thread():
                yield
        finally:
            _SHARED.reset(before)

    def go_on(self) -> None:
        """Called by the work itself between steps; raises if nobody waits for the result any more."""
        if self._stopped.is_set():
            raise CancelledError


_SHARED: ContextVar[Threads | None] = ContextVar("threads", default=None)


def _work_alone() -> None:
    """What a thread of a pool starts with: it hands nothing out itself, as it would wait for itself."""
    torch.set_num_threads(1)
    _SHARED.set(None)


def share(work: Callable[..., Result], items: Sequence, leaf: Tensor) -> list[Result]:
    """``work`` on parts of a leaf, results in order; threads of the run share them if the leaf is large."""
    threads = _sharers(leaf)
    return [work(item) for item in items] if threads is None else threads.map(work, items)


def by_rows(work: Callable[[slice], Result], leaf: Tensor) -> list[Result]:
    """``work`` on slices that make up all rows of a leaf [W, ...], in order; threads of the run share a large leaf.

    Where a slice ends depends on the number of threads, so a row's numbers must not depend on the rows beside it.
    """
    threads, count = _sharers(leaf), len(leaf)
    parts = 1 if threads is None else min(threads.count, count)
    return share(work, [slice(*ends) for ends in pairwise(count * k // parts for k in range(parts + 1))], leaf)


def _sharers(leaf: Tensor) -> Threads | None:
    """The threads that work on a leaf; None: the one that asks."""
    return _SHARED.get() if leaf.device.type == "cpu" and leaf.numel() >= _LARGE else None


@contextmanager
def one_thread() -> Iterator[None]:
    """No threads inside operations: their number would change the order of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
