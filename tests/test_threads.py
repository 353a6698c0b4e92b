"""Threads: results in order, torch single-threaded inside, rows shared, and an end for all when one fails."""

import threading
import time

import pytest
import torch

from manyheads import threads as module
from manyheads.threads import Threads, by_rows


@pytest.mark.parametrize("count", [1, 3])
def test_results_come_in_order_from_work_without_threads_of_its_own(count: int) -> None:
    def work(item: int) -> tuple[int, int]:
        time.sleep(0.001 * (5 - item))
        return item, torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert Threads(count).map(work, range(5)) == [(item, 1) for item in range(5)]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_when_one_fails_the_others_end_and_the_next_work_is_done() -> None:
    threads, both_run, ended = Threads(2), threading.Barrier(2), threading.Event()

    def work(fails: bool) -> None:
        both_run.wait()
        if fails:
            raise ValueError("this one")
        try:
            while True:
                threads.go_on()
                time.sleep(0.001)
        finally:
            ended.set()

    with pytest.raises(ValueError, match="this one"):
        threads.map(work, [True, False])
    assert ended.is_set()
    assert threads.map(lambda item: threads.go_on() or item, [1, 2]) == [1, 2]


@pytest.fixture
def no_leaf_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LARGE", 1)


@pytest.mark.usefixtures("no_leaf_is_small")
@pytest.mark.parametrize(("count", "rows", "parts"), [(1, 5, 1), (2, 5, 2), (3, 7, 3), (8, 3, 3), (2, 0, 1)])
def test_a_run_s_threads_share_all_rows_in_order(count: int, rows: int, parts: int) -> None:
    with Threads(count).shared():
        shares = by_rows(range(rows).__getitem__, torch.zeros(rows, 2))
    assert [row for share in shares for row in share] == list(range(rows))
    assert len(shares) == parts


@pytest.mark.usefixtures("no_leaf_is_small")
def test_outside_of_a_run_and_inside_of_its_threads_rows_stay_together() -> None:
    leaf, threads = torch.zeros(4, 2), Threads(2)
    assert by_rows(lambda rows: rows, leaf) == [slice(0, 4)]
    with threads.shared():
        assert threads.map(lambda _: by_rows(lambda rows: rows, leaf), [0, 1]) == [[slice(0, 4)]] * 2


def test_small_leaves_are_not_shared() -> None:
    with Threads(2).shared():
        assert by_rows(lambda rows: rows, torch.zeros(4, 2)) == [slice(0, 4)]


def test_torch_has_its_own_threads_back_after_a_run_s_even_if_that_fails() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError), Threads(2).shared():
            assert torch.get_num_threads() == 1
            raise ValueError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
