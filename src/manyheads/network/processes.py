"""The processes of one run: how they agree on things, and notice that one of them is gone.

torch.distributed only says that a call has failed, not because of whom. So every process keeps writing to the store
that all of them reach: every half second "CALLS BEATS", how many calls it has entered together with the others and how
often it has written, and "left" when it ends. Who has entered fewer calls than this process, or has stopped writing,
is the one that is missing. The first process that fails also leaves its error message there: whatever fails after it
fails because of it, so that one process on each machine shows that message and no other.
"""

import atexit
import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from manyheads.errors import Transient, UserError, one_line
from manyheads.network.restarts import how_it_goes_on
from manyheads.units import numbered, plural

_BEAT_SECONDS = 0.5
"""How often a process writes to the store how far it has come."""
_BEATS = 8
"""For how many of these a process that seems to be missing is watched."""
POLL_SECONDS = 0.02
"""How often to look whether another process has done something."""
_STORE_SECONDS = 5.0
"""How long the store may take to answer: without a limit a cut network shows only after a quarter of an hour."""
_PATIENCE = 0.8
"""The part of a time-out that a process may spend waiting while others wait for it."""
_LONG = 60
"""How many time-outs the longest wait takes."""
_LEFT = "left"
_FAILURE = "failure"

Answer = TypeVar("Answer")


class Processes:
    """This process among those of the run, by rank. One alone agrees with itself."""

    def __init__(
        self,
        store: Store | None,
        rank: int,
        count: int,
        generation: str,
        timeout: float,
        wire: torch.device,
        keeps_store: bool = False,
    ) -> None:
        self.rank, self.count, self.timeout = rank, count, timeout
        self.generation = generation
        """Names this start of the run, unlike any other."""
        self.wire = wire
        """Where torch.distributed wants the tensors it sends."""
        self.local_count = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if count > 1 else 1
        """How many of them are on this host."""
        self._machine = os.environ.get("GROUP_RANK", socket.gethostname())
        """The torchrun that this process belongs to, by its number among them, or else the host's name."""
        self._store, self._keeps_store = store, keeps_store
        self.tells_why = True
        """Whether the others may read what this process fails with, and not only that it does."""
        self.whose: Sequence[str] | None = None
        """Whose data each process has, in words, for sites: people know those by their data, not by rank."""
        self.connecting = False
        """Whether the processes have met but still open the connections between them."""
        self._is_first_to_fail = self._lost_others = False
        self._first_failure = ""
        """The message of the first process that failed, once it is known here."""
        self._calls = self._beats = self._long_waits = 0
        self._found_missing: list[int] = []
        self._store_answers = True
        self._ended, self._beating = threading.Event(), threading.Thread(target=self._beat, daemon=True)
        if store is not None:
            self._tell()
            self._beating.start()
            atexit.register(self._leave)

    def alone(self) -> "Processes":
        """This process as if there were no others."""
        return self if self.count == 1 else Processes(None, 0, 1, self.generation, self.timeout, self.wire)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around calls of torch.distributed that all processes make: when they fail, whoever is missing is named."""
        self._calls += 1
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            # gloo has no error of its own.
            if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
                raise
            # Its frames hold the process group, whose connections close only when nobody does: the others would notice
            # this process's end late.
            traceback.clear_frames(error.__traceback__)
            raise self._lost(time.monotonic() - began) from error

    def gather(self, block: Tensor) -> list[Tensor]:
        """Every process's block, all of one shape and on the CPU, by rank."""
        if self._store is None:
            return [block]
        blocks = [torch.empty_like(block) for _ in range(self.count)]
        with self.together():
            dist.all_gather(blocks, block)
        return blocks

    def gather_json(self, value: Any) -> list[Any]:
        """Every process's value, by rank, as it comes out of JSON: this process's own too."""
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [int(length) for length in self.gather(torch.tensor(len(own)))]
        blocks = self.gather(torch.nn.functional.pad(own, (0, max(lengths) - len(own))))
        return [json.loads(block[:length].numpy().tobytes()) for block, length in zip(blocks, lengths, strict=True)]

    def wait(self) -> None:
        """Return when all processes have called this."""
        self.total(0)

    def wait_long(self) -> None:
        """The same where some may take longer than the time-out, as with large files: waits for all that are alive."""
        if (store := self._store) is None:
            return
        self._calls, self._long_waits = self._calls + 1, self._long_waits + 1
        began, before, heard = time.monotonic(), [""] * self.count, [0.0] * self.count
        come, delay = 1, POLL_SECONDS

        def look() -> tuple[list[str], int]:
            # Whereabouts before the count: a process that has arrived may have left again by the time of the count.
            return self._whereabouts(), store.add(f"long wait/{self._long_waits}", come)

        while True:
            asked = time.monotonic()
            answer, now = self._ask(look, self.timeout), time.monotonic()
            if answer is None:
                raise self._lost(now - asked, [0])
            said, here = answer
            if here == self.count:
                return
            heard = [now if said[rank] != before[rank] else heard[rank] for rank in range(self.count)]
            gone = [rank for rank in range(self.count) if said[rank] == _LEFT or now - heard[rank] > self.timeout]
            if gone:
                raise self._lost(now - heard[gone[0]], gone)
            if now - began > _LONG * self.timeout:
                raise self._lost(now - began)
            come, before, delay = 0, said, min(2 * delay, _BEAT_SECONDS)
            time.sleep(delay)

    @contextmanager
    def one_before_others(self) -> Iterator[None]:
        """Process 0 runs the block first, and then all the others do."""
        if self.rank > 0:
            self.wait_long()
        yield
        if self.rank == 0:
            self.wait_long()

    @property
    def patience(self) -> float:
        """Seconds to allow for a process of an earlier start to notice that it was cut off, and end."""
        return _PATIENCE * self.timeout if self.count > 1 or "TORCHELASTIC_RUN_ID" in os.environ else 0.0

    def total(self, number: int) -> int:
        """The sum over all processes."""
        return sum(map(int, self.gather(torch.tensor(number))))

    def decide(self, choice: bool) -> bool:
        """What process 0 chooses."""
        return bool(self.gather(torch.tensor(choice, dtype=torch.uint8))[0])

    def absent(self) -> list[int]:
        """The ranks that have not been heard of yet."""
        assert self._store is not None
        self._found_missing = [rank for rank in range(self.count) if not self._store.check([self._place(rank)])]
        return self._found_missing

    def called(self, ranks: Sequence[int]) -> str:
        """Some processes as people know them."""
        if not ranks:
            return "a process"
        if self.whose is None:
            return numbered("process", ranks)
        return f"the {plural('process', len(ranks))} of {' and '.join(self.whose[rank] for rank in ranks)}"

    def failure(self, line: str) -> str | None:
        """What to show when this process fails with a ``line``; None: another process on this machine shows it.

        That is the line of the first process that failed. If the store no longer answers, it is the first failure if
        this process knows of it, else its own line.
        """
        if (store := self._store) is None:
            return line
        # Which process was lost may be told to everybody. Any other error of a site may name its data: it stays there.
        public = self.tells_why or self._lost_others
        told = line if public else f"manyheads: {self._called_among_all([self.rank])} failed: its output says why."

        def tell() -> tuple[str, bool]:
            # In this order: a process that sees this one leave fails too, and must find that it is not the first.
            first = one_line(store.compare_set(_FAILURE, "", told).decode(errors="replace"))
            shows = store.add(f"{_FAILURE}/{self._machine}", 1) == 1
            self._fall_silent()
            store.set(self._place(), _LEFT)
            return first, shows

        first, shows = self._ask(tell) or (self._first_failure or line, self._leaves_first_mark())
        self._is_first_to_fail = first == told
        return (first if public else line) if shows else None

    def _called_among_all(self, ranks: Sequence[int]) -> str:
        return f"{self.called(ranks)} of {self.count}" if self.whose is None else self.called(ranks)

    def _leaves_first_mark(self) -> bool:
        """Whether this process is the first on this machine to leave a mark: an empty temporary file."""
        try:
            Path(gettempdir(), f"manyheads-{self.generation}-{self._machine}").touch(exist_ok=False)
        except OSError as error:
            # If no mark can be left, better to show the message twice than not at all.
            return not isinstance(error, FileExistsError)
        return True

    def _learn_of_failure(self) -> bool:
        """Whether a process has failed; remembers its message, for when the store no longer answers."""
        assert self._store is not None
        if self._store.check([_FAILURE]):
            self._first_failure = one_line(self._store.get(_FAILURE).decode(errors="replace"))
        return self._first_failure != ""

    def _lost(self, waited: float, missing: list[int] | None = None) -> UserError:
        """The error of having lost others: those in ``missing``; None: whoever is found to be gone."""
        if missing is None:
            # The store lives on the first host: if it does not answer, that host is gone.
            missing = [0] if (found := self._ask(self._missing)) is None else found
        self._found_missing, self._lost_others = missing, True
        several = len(missing) > 1
        who = self._called_among_all(missing)
        alive = f"check whether {'they are' if several else 'it is'} still running"
        if self.connecting:
            # They reach the store, so what is shut is the way between two of them.
            return Transient(
                f"{who} could not be connected with the others: {alive}, and that TCP is open between all machines, in"
                f" both directions; GLOO_SOCKET_IFNAME names another network interface. {how_it_goes_on()}"
            )
        if waited < self.timeout:
            lost = "were lost: see their output" if several else "was lost: see its output"
            return Transient(f"{who} {lost}, and {alive}. {how_it_goes_on()}")
        return Transient(
            f"{who} did not answer within {self.timeout:g} s: {alive}; if a round takes longer, give a longer"
            f" --timeout. {how_it_goes_on()}"
        )

    def _missing(self) -> list[int]:
        """The processes that are behind this one, or have stopped writing to the store."""
        if self._learn_of_failure():
            # The one that is gone has said why.
            return []
        self._tell()
        before, missing = self._whereabouts(), []
        for beat in range(_BEATS):
            time.sleep(_BEAT_SECONDS)
            both = enumerate(zip(before, self._whereabouts(), strict=True))
            missing = [rank for rank, (then, now) in both if self._is_missing(rank, then, now)]
            # After a while those that are only slow have caught up.
            if beat >= 2 and len(missing) <= 1:
                break
        return missing

    def _is_missing(self, rank: int, then: str, now: str) -> bool:
        return rank != self.rank and now != _LEFT and (now == then or int(now.split()[0]) < self._calls)

    def _whereabouts(self) -> list[str]:
        """What each process has last written of how far it is."""
        return [self._whereabout(rank) for rank in range(self.count)]

    def _whereabout(self, rank: int) -> str:
        assert self._store is not None
        return self._store.get(self._place(rank)).decode()

    def _beat(self) -> None:
        with suppress(RuntimeError):
            while not self._ended.wait(_BEAT_SECONDS):
                self._tell()
                self._learn_of_failure()

    def _fall_silent(self) -> None:
        """Stop writing: a beat that is still under way would overwrite what is written next."""
        self._ended.set()
        self._beating.join()

    def _tell(self) -> None:
        assert self._store is not None
        self._beats += 1
        self._store.set(self._place(), f"{self._calls} {self._beats}")

    def _place(self, rank: int | None = None) -> str:
        return f"whereabouts/{self.rank if rank is None else rank}"

    def _leave(self) -> None:
        self._ended.set()
        if dist.is_initialized():
            # Until torch 2.8 this holds Python's lock while it waits for gloo's threads, one of which may need the lock
            # to release the last message: without a moment to do so beforehand neither would ever end.
            time.sleep(POLL_SECONDS)
            dist.destroy_process_group()
        self._ask(self._part)

    def _part(self) -> bool:
        assert self._store is not None
        self._fall_silent()
        self._store.set(self._place(), _LEFT)
        # The process that keeps the store goes last: others may still ask it whether they are to show an error, and a
        # thread that is still asking when Python ends makes it end with an error of its own. The first to fail waits
        # too, until the others know: when it ends, torchrun ends all on its machine, perhaps the one with the store.
        patience = _PATIENCE * _STORE_SECONDS if self._keeps_store else 2 * _BEAT_SECONDS * self._is_first_to_fail
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and self._somebody_is_left():
            time.sleep(POLL_SECONDS)
        return True

    def _somebody_is_left(self) -> bool:
        return any(self._whereabout(rank) != _LEFT for rank in range(self.count) if rank not in self._found_missing)

    def _ask(self, question: Callable[[], Answer], seconds: float = _STORE_SECONDS) -> Answer | None:
        """``ask``, except that a store which once gave no answer is not asked again."""
        answer = ask(question, seconds) if self._store_answers else None
        self._store_answers = answer is not None
        return answer


def ask(question: Callable[[], Answer], seconds: float) -> Answer | None:
    """The store's answer; None: it gave none in time."""
    answers: list[Answer] = []

    def get() -> None:
        with suppress(RuntimeError):
            answers.append(question())

    asking = threading.Thread(target=get, daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else None
