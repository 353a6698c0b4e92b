"""The processes of one run: how they agree on things, and notice that one of them is gone."""

import atexit
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from manyheads.errors import Passing, UserError, one_line
from manyheads.network.restarts import how_it_goes_on
from manyheads.units import plural

_BEAT_SECONDS = 0.5
"""How often a process says in the store how far it is."""
_BEATS = 8
"""How many of these one that is not heard of is given."""
POLL_SECONDS = 0.02
"""How often to look for what another process is about to do."""
_STORE_SECONDS = 5.0
"""How long the store may take to answer. Where the network is cut, it would take a quarter of an hour to say so."""
_PATIENCE = 0.8
"""The part of a time-out that one who is waited for may wait for something else."""
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
        """Whose data each process has, in words, where people know sites by that; ranks only say who came when."""
        self._is_first_to_fail = self._suffers = False
        self._heard = ""
        """What the first to fail has said."""
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
        """Every process's value, which JSON can hold, by rank; as JSON has it, one's own too."""
        own = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [int(length) for length in self.gather(torch.tensor(len(own)))]
        blocks = self.gather(torch.nn.functional.pad(own, (0, max(lengths) - len(own))))
        return [json.loads(block[:length].numpy().tobytes()) for block, length in zip(blocks, lengths, strict=True)]

    def wait(self) -> None:
        """Go on when all have come here."""
        self.total(0)

    def wait_long(self) -> None:
        """The same where some may take longer than the time-out, with large files perhaps: for all who are alive."""
        if (store := self._store) is None:
            return
        self._calls, self._long_waits = self._calls + 1, self._long_waits + 1
        began, before, heard = time.monotonic(), [""] * self.count, [0.0] * self.count
        come, delay = 1, POLL_SECONDS

        def look() -> tuple[list[str], int]:
            # Where they are first: whoever has come here may have left again when they are counted.
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
        """Process 0 goes through the block, and then the others do."""
        if self.rank > 0:
            self.wait_long()
        yield
        if self.rank == 0:
            self.wait_long()

    @property
    def patience(self) -> float:
        """Seconds until a process of an earlier start that was cut off has noticed it and ended."""
        return _PATIENCE * self.timeout if self.count > 1 or "TORCHELASTIC_RUN_ID" in os.environ else 0.0

    def total(self, number: int) -> int:
        """The sum over all processes."""
        return sum(map(int, self.gather(torch.tensor(number))))

    def decide(self, choice: bool) -> bool:
        """What process 0 chooses."""
        return bool(self.gather(torch.tensor(choice, dtype=torch.uint8))[0])

    def absent(self) -> list[int]:
        """The processes that have not come yet."""
        assert self._store is not None
        self._found_missing = [rank for rank in range(self.count) if not self._store.check([self._place(rank)])]
        return self._found_missing

    def called(self, ranks: Sequence[int]) -> str:
        """Some processes as people know them."""
        if not ranks:
            return "a process"
        if self.whose is None:
            return named(ranks)
        return f"the {plural('process', len(ranks))} of {' and '.join(self.whose[rank] for rank in ranks)}"

    def failure(self, line: str) -> str | None:
        """What to show when this process fails with a line of its own (``one_line``); None: another here shows it.

        What fails after the first fails because of it: one process of every machine shows the line of the first. Where
        the store cannot be asked any more, that if it was heard, else its own.
        """
        if (store := self._store) is None:
            return line
        # Who was lost may be told to anybody. All else in sites is a mistake of this one, or one that all find.
        public = self.tells_why or self._suffers
        told = line if public else f"manyheads: {self._called_among_all([self.rank])} failed: its output says why."

        def tell() -> tuple[str, bool]:
            # In this order: whoever sees that this process has left must not be taken for the first.
            first = one_line(store.compare_set(_FAILURE, "", told).decode(errors="replace"))
            shows = store.add(f"{_FAILURE}/{self._machine}", 1) == 1
            self._fall_silent()
            store.set(self._place(), _LEFT)
            return first, shows

        first, shows = self._ask(tell) or (self._heard or line, self._leaves_first_mark())
        self._is_first_to_fail = first == told
        return (first if public else line) if shows else None

    def _called_among_all(self, ranks: Sequence[int]) -> str:
        return f"{self.called(ranks)} of {self.count}" if self.whose is None else self.called(ranks)

    def _leaves_first_mark(self) -> bool:
        """Whether this process is the first here to leave a mark, an empty file among the temporary ones."""
        try:
            Path(gettempdir(), f"manyheads-{self.generation}-{self._machine}").touch(exist_ok=False)
        except OSError as error:
            # Better twice than not at all.
            return not isinstance(error, FileExistsError)
        return True

    def _hear(self) -> bool:
        """Whether a process has failed, and remember what it has said."""
        assert self._store is not None
        if self._store.check([_FAILURE]):
            self._heard = one_line(self._store.get(_FAILURE).decode(errors="replace"))
        return self._heard != ""

    def _lost(self, waited: float, missing: list[int] | None = None) -> UserError:
        """``missing``: those who are; None: whoever is found to be."""
        if missing is None:
            # The store lives and dies with the first host.
            missing = [0] if (found := self._ask(self._missing)) is None else found
        self._found_missing, self._suffers = missing, True
        several = len(missing) > 1
        who = self._called_among_all(missing)
        alive = f"check whether {'they are' if several else 'it is'} still running"
        if waited < self.timeout:
            lost = "were lost: see their output" if several else "was lost: see its output"
            return Passing(f"{who} {lost}, and {alive}. {how_it_goes_on()}")
        return Passing(
            f"{who} did not answer within {self.timeout:g} s: {alive}; if a round takes longer, give a longer"
            f" --timeout. {how_it_goes_on()}"
        )

    def _missing(self) -> list[int]:
        """The processes that are behind this one, or that have stopped telling where they are."""
        if self._hear():
            # Nobody is missing without a word.
            return []
        self._tell()
        before, missing = self._whereabouts(), []
        for beat in range(_BEATS):
            time.sleep(_BEAT_SECONDS)
            both = enumerate(zip(before, self._whereabouts(), strict=True))
            missing = [rank for rank, (then, now) in both if self._misses(rank, then, now)]
            # Those who are only slow come after a while.
            if beat >= 2 and len(missing) <= 1:
                break
        return missing

    def _misses(self, rank: int, then: str, now: str) -> bool:
        return rank != self.rank and now != _LEFT and (now == then or int(now.split()[0]) < self._calls)

    def _whereabouts(self) -> list[str]:
        """What each process has last said of where it is."""
        return [self._whereabout(rank) for rank in range(self.count)]

    def _whereabout(self, rank: int) -> str:
        assert self._store is not None
        return self._store.get(self._place(rank)).decode()

    def _beat(self) -> None:
        with suppress(RuntimeError):
            while not self._ended.wait(_BEAT_SECONDS):
                self._tell()
                self._hear()

    def _fall_silent(self) -> None:
        """Tell no more: a beat that is under way would take back what is said after it."""
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
            # Until torch 2.8 gloo's threads are waited for under Python's lock, which one of them needs that is still
            # letting go of the last message: without a moment for that neither would ever end.
            time.sleep(POLL_SECONDS)
            dist.destroy_process_group()
        self._ask(self._part)

    def _part(self) -> bool:
        assert self._store is not None
        self._fall_silent()
        self._store.set(self._place(), _LEFT)
        # Whoever keeps the store goes last: the others may still ask it whether an error is theirs to show. A thread
        # that is still asking when Python ends would end it with an error of its own. When the first to fail ends,
        # torchrun ends all on its machine, perhaps the one that keeps the store: it waits until the others have heard.
        patience = _PATIENCE * _STORE_SECONDS if self._keeps_store else 2 * _BEAT_SECONDS * self._is_first_to_fail
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and self._somebody_is_left():
            time.sleep(POLL_SECONDS)
        return True

    def _somebody_is_left(self) -> bool:
        return any(self._whereabout(rank) != _LEFT for rank in range(self.count) if rank not in self._found_missing)

    def _ask(self, question: Callable[[], Answer], seconds: float = _STORE_SECONDS) -> Answer | None:
        """``ask``, but a store that has once given no answer is not waited for again."""
        answer = ask(question, seconds) if self._store_answers else None
        self._store_answers = answer is not None
        return answer


def named(ranks: Sequence[int]) -> str:
    return f"{plural('process', len(ranks))} {', '.join(map(str, ranks))}"


def ask(question: Callable[[], Answer], seconds: float = _STORE_SECONDS) -> Answer | None:
    """The store's answer; None: it gives none in time."""
    answers: list[Answer] = []

    def get() -> None:
        with suppress(RuntimeError):
            answers.append(question())

    asking = threading.Thread(target=get, daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else None
