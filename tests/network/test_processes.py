import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from manyheads.errors import UserError
from manyheads.network import processes as module
from manyheads.network.processes import Processes

CPU = torch.device("cpu")
Make = Callable[..., list[Processes]]


def test_a_process_alone_agrees_with_itself() -> None:
    alone = Processes(None, 0, 1, "start", 60, CPU)
    assert alone.total(3) == 3 and alone.decide(True) and not alone.decide(False)
    assert alone.gather_json("Grüße") == ["Grüße"] and alone.gather_json({"a": (1, None)}) == [{"a": [1, None]}]
    assert alone.failure("mine") == "mine" and alone.alone() is alone
    alone.wait()
    with alone.one_before_others():
        pass


def test_what_processes_tell_each_other_may_be_of_different_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    said, meeting = [0, "Grüße", {"a": [1.5] * 40}, []], threading.Barrier(4, timeout=60)
    blocks = [torch.empty(0)] * len(said)

    def tell(rank: int) -> list[object]:
        def gather(block: torch.Tensor) -> list[torch.Tensor]:
            blocks[rank] = block
            meeting.wait()
            # Those that torch gathers must have one shape.
            found = list(torch.stack(blocks))
            meeting.wait()
            return found

        process = Processes(None, rank, len(said), "start", 60, CPU)
        monkeypatch.setattr(process, "gather", gather)
        return process.gather_json(said[rank])

    with ThreadPoolExecutor(len(said)) as pool:
        assert list(pool.map(tell, range(len(said)))) == [said] * len(said)


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Processes that share a store, as many as are asked for, quick to notice things."""
    monkeypatch.setattr(module, "_BEAT_SECONDS", 0.05)
    # On a busy machine a thread may get no time for as long as this.
    monkeypatch.setattr(module, "_BEATS", 24)
    monkeypatch.setattr(module.atexit, "register", lambda leave: None)
    made: list[Processes] = []

    def make(count: int, timeout: float = 60, machines: str = "") -> list[Processes]:
        store = HashStore()
        for rank in range(count):
            if machines:
                monkeypatch.setenv("GROUP_RANK", machines[rank])
            made.append(Processes(store, rank, count, "start", timeout, CPU))
        return made

    yield make
    for process in made:
        process._fall_silent()


def fail(process: Processes, waited: float = 0.0) -> str:
    return str(process._lost(waited))


def test_a_failed_call_holds_nothing_that_it_worked_with(several: Make) -> None:
    """Not torch's process group above all: the others only notice that it is gone when nobody holds it."""
    held: list[weakref.ref[torch.Tensor]] = []

    def call() -> None:
        group = torch.zeros(1)
        held.append(weakref.ref(group))
        raise RuntimeError("gloo: connection closed")

    with pytest.raises(UserError, match="was lost") as error, several(2)[0].together():
        call()
    assert error.value.__cause__ is not None and held[0]() is None


def test_whoever_is_behind_is_named(several: Make) -> None:
    first, second, third = several(3)
    first._calls = third._calls = 5
    second._calls = 4
    assert fail(first).startswith("process 1 of 3 was lost")
    assert fail(third, 60).startswith("process 1 of 3 did not answer within 60 s")


@pytest.mark.parametrize("waited", [0, 60])
def test_processes_that_meet_but_cannot_be_connected(several: Make, waited: float) -> None:
    """A firewall between two sites is the likeliest cause: nothing of a round that takes too long."""
    first, *_ = several(3)
    first._calls, first.connecting = 2, True
    said = fail(first, waited)
    assert said.startswith("processes 1, 2 of 3 could not be connected with the others: check whether they are still")
    assert "that TCP is open between all machines" in said and "--timeout" not in said
    first._calls = 0
    assert fail(first, waited).startswith("a process of 3 could not be connected")


def test_whoever_has_stopped_is_named(several: Make) -> None:
    first, second, third = several(3)
    second._fall_silent()
    third._fall_silent()
    assert fail(first).startswith("processes 1, 2 of 3 were lost")


def test_in_sites_a_process_is_known_by_its_workers(several: Make) -> None:
    """Ranks are the order in which sites came, which their people do not know."""
    processes = several(3, machines="012")
    first, second, third = processes
    for process in processes:
        process.tells_why, process.whose = (
            False,
            ["worker 3 (s-3.npz)", "workers 0, 1 (s-0.npz to s-1.npz)", "worker 2"],
        )
    second._fall_silent()
    assert fail(first).startswith("the process of workers 0, 1 (s-0.npz to s-1.npz) was lost: see its output")
    third._fall_silent()
    assert fail(first).startswith("the processes of workers 0, 1 (s-0.npz to s-1.npz) and worker 2 were lost")
    second.failure("mine")
    assert (
        first.failure("lost")
        == "manyheads: the process of workers 0, 1 (s-0.npz to s-1.npz) failed: its output says why."
    )


@pytest.mark.parametrize(
    ("done", "most", "ending"),
    [
        (0, 2, "torchrun starts the run again within about half a minute, unless the machine is lost where all meet."),
        (2, 2, "The same command continues the run."),
        (None, None, "The same command continues the run."),
    ],
)
def test_how_a_run_goes_on_depends_on_torchrun(
    several: Make, monkeypatch: pytest.MonkeyPatch, done: int | None, most: int | None, ending: str
) -> None:
    for name, value in (("RESTART_COUNT", done), ("MAX_RESTARTS", most)):
        monkeypatch.delenv(f"TORCHELASTIC_{name}", raising=False)
        if value is not None:
            monkeypatch.setenv(f"TORCHELASTIC_{name}", str(value))
    first, second = several(2)
    second._fall_silent()
    assert fail(first).endswith(ending) and fail(first, 60).endswith(ending)


def test_whoever_has_not_come_is_absent(several: Make) -> None:
    first, second = several(2)
    assert first.absent() == []
    assert Processes(HashStore(), 1, 3, "start", 60, CPU).absent() == [0, 2]
    assert second.absent() == []


def test_whoever_has_left_because_of_another_is_not_named(several: Make) -> None:
    first, second, third = several(3)
    for process in (second, third):
        process._fall_silent()
    second._part()
    assert fail(first).startswith("process 2 of 3 was lost")


@pytest.mark.parametrize("leave", [Processes._part, lambda process: process.failure("mine")])
def test_a_beat_under_way_does_not_take_back_that_a_process_has_left(
    several: Make, monkeypatch: pytest.MonkeyPatch, leave: Callable[[Processes], object]
) -> None:
    _, second = several(2)
    tell, beats, go_on = second._tell, threading.Event(), threading.Event()

    def slow() -> None:
        beats.set()
        go_on.wait(5)
        tell()

    monkeypatch.setattr(second, "_tell", slow)
    assert beats.wait(5)
    with ThreadPoolExecutor() as pool:
        leaving = pool.submit(leave, second)
        time.sleep(0.1)
        go_on.set()
        assert leaving.result(5)
    second._fall_silent()
    assert second._whereabout(1) == module._LEFT


def failures(processes: list[Processes]) -> list[str | None]:
    """What each shows, when they fail in this order."""
    return [process.failure(f"by {process.rank}") for process in processes]


def test_one_process_speaks_for_all(several: Make) -> None:
    assert failures(several(3)) == ["by 0", None, None]


def test_every_machine_shows_what_failed_first(several: Make) -> None:
    processes = several(5, machines="00112")
    assert failures(processes[::-1]) == ["by 4", "by 4", None, "by 4", None]


def test_what_is_not_told_stays_on_its_machine(several: Make) -> None:
    processes = several(4, machines="0123")
    for process in processes:
        process.tells_why = False
    third, others = processes[2], processes[:2]
    assert third.failure("sample 17 of mine.npz is not a number") == "sample 17 of mine.npz is not a number"
    assert [fail(process) for process in others] and failures(others) == 2 * [
        "manyheads: process 2 of 4 failed: its output says why."
    ]
    assert processes[3].failure("another's mistake, found here") == "another's mistake, found here"


def test_what_others_say_is_shown_and_not_obeyed(several: Make) -> None:
    first, second = several(2, machines="01")
    first.failure("gone\x1b[2J\nfor good")
    assert second.failure("by 1") == "gone?[2J for good"


def test_one_process_speaks_for_a_host_when_the_store_is_gone(
    several: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    _, second, third, fourth = several(4)
    for process in (second, third, fourth):
        process._store_answers = False
    assert failures([second, third]) == ["by 1", "by 2"], "rather twice than not at all"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert failures([fourth, third, second]) == ["by 3", None, None]


def test_what_was_heard_in_time_is_shown_when_the_store_is_gone(
    several: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first, second, third = several(3, machines="001")
    assert second.failure("by 1") == "by 1"
    began = time.monotonic()
    second._part()
    assert time.monotonic() - began > module._BEAT_SECONDS, "torchrun ends the store with whoever has failed"
    third._store_answers = False
    assert third.failure("process 0 was lost") == "by 1"
    assert fail(first).startswith("a process"), "it is not looked for"


def test_a_store_that_is_gone_went_with_the_first_process(several: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    _, second = several(2)

    def gone(*_: object) -> None:
        raise RuntimeError("connection reset")

    monkeypatch.setattr(HashStore, "get", gone, raising=False)
    assert fail(second).startswith("process 0 of 2 was lost")
    monkeypatch.undo()
    assert second._ask(lambda: 1) is None, "nobody waits for it a second time"


def test_whoever_keeps_the_store_waits_for_those_who_may_still_ask(several: Make) -> None:
    first, second, third = several(3)
    first._keeps_store = True
    for process in (second, third):
        process._fall_silent()
    second._part()
    assert fail(first).startswith("process 2 of 3 was lost")
    began = time.monotonic()
    assert first._part()
    assert time.monotonic() - began < 1, "not for the one that is lost"
    # A process that leaves says nothing more.
    with ThreadPoolExecutor() as pool:
        third._keeps_store = True
        first._tell()
        parting = pool.submit(third._part)
        time.sleep(0.1)
        assert not parting.done()
        first._part()
        assert parting.result(2)


def test_only_errors_of_the_network_are_put_down_to_others(several: Make) -> None:
    first, second = several(2)
    second._fall_silent()
    with pytest.raises(RuntimeError, match="out of memory"), first.together():
        raise RuntimeError("out of memory")
    with pytest.raises(UserError, match="process 1 of 2 was lost"), first.together():
        raise RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")


def test_process_0_gives_up_before_the_others_give_it_up(several: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert 0 < several(2)[0].patience < 60
    assert Processes(None, 0, 1, "start", 60, CPU).patience == 0
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "elastic")
    assert Processes(None, 0, 1, "start", 60, CPU).patience > 0, "one that is left of several"


def test_a_long_wait_is_for_those_who_are_alive(several: Make) -> None:
    first, second, third = several(3, timeout=0.5)
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(process.wait_long) for process in (first, third)]
        time.sleep(1)
        assert not any(one.done() for one in waiting), "longer than the time-out, but they hear of it"
        second.wait_long()
        assert [one.result(2) for one in waiting] == [None, None]
        waiting = [pool.submit(process.wait_long) for process in (first, third)]
        second._fall_silent()
        for one in waiting:
            with pytest.raises(UserError, match=r"process 1 of 3 did not answer within 0\.5 s"):
                one.result(5)


def test_a_long_wait_for_one_that_has_failed(several: Make) -> None:
    first, second = several(2)
    second._fall_silent()
    assert second.failure("by 1")
    with pytest.raises(UserError, match="process 1 of 2 was lost"):
        first.wait_long()
    assert first.failure("process 1 was lost") is None, "the error is the other's to show"


def test_no_wait_is_endless(several: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONG", 1)
    first, _ = several(2, timeout=0.5)
    with pytest.raises(UserError, match=r"process 1 of 2 did not answer within 0\.5 s"):
        first.wait_long()


def test_a_long_wait_for_a_store_that_is_cut_off(several: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    _, second = several(2, timeout=0.2)
    monkeypatch.setattr(HashStore, "add", lambda *_: time.sleep(1), raising=False)
    with pytest.raises(UserError, match=r"process 0 of 2 did not answer within 0\.2 s"):
        second.wait_long()
