"""A lane of the device: its own stream and graph memory, in which steps are recorded once and then replayed."""

import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch

from manyheads.errors import UserError, first_line

Replay = Callable[[], None]

_WARM_UPS = 2
"""Runs before a capture, in which libraries choose kernels and allocate workspaces: a capture forbids that."""


class Lane:
    """On a GPU a stream; on a CPU nothing, so that the same code runs there step by step.

    Graphs of one lane share memory: they never run at the same time, and nothing outside reads what they allocate.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = None if self.stream is None else torch.cuda.graph_pool_handle()

    def use(self) -> AbstractContextManager[object]:
        """Inside, work goes to this lane."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def record(self, step: Callable[[], None]) -> Replay:
        """Record ``step``; gives a function that replays it. Recording runs it, too: load what it changes afterwards.

        It may read and write only tensors that stay where they are, and everything that varies must be in them.
        """
        if self.stream is None:
            step()
            return step
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with self.use():
            for _ in range(_WARM_UPS):
                step()
            self.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with _no_garbage_collected():
                # The rules of a capture bind this thread only, as autograd's own thread works on the stream too.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    step()
                except torch.OutOfMemoryError:
                    _abandon(graph)
                    raise
                except Exception as error:
                    _abandon(graph)
                    raise UserError(
                        f"the model cannot be captured as a CUDA graph ({first_line(error)}): use --engine loop."
                    ) from error
                graph.capture_end()
        return graph.replay


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Inside, no garbage is collected: destroying the graphs of an abandoned engine would break a capture under way."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _abandon(graph: "torch.cuda.CUDAGraph") -> None:
    """End a capture that failed, so that the stream can be used again."""
    with suppress(RuntimeError):
        graph.capture_end()


def take_turns(work: Sequence[tuple[Lane, Iterator[object]]]) -> None:
    """Run the work of all lanes side by side, one piece of each in turn, so that no lane runs out of work."""
    with _forked([lane for lane, _ in work]):
        waiting = deque(work)
        while waiting:
            lane, pieces = waiting.popleft()
            with lane.use():
                if next(pieces, _DONE) is not _DONE:
                    waiting.append((lane, pieces))


_DONE = object()


@contextmanager
def _forked(lanes: Sequence[Lane]) -> Iterator[None]:
    """Inside, the lanes run side by side. They start after all earlier work, and later work waits for all of them."""
    streams = [lane.stream for lane in lanes if lane.stream is not None]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
    try:
        yield
    finally:
        for stream in streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
