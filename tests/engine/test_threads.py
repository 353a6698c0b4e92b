"""Threads: results in order, torch single-threaded inside, and an end for all when one fails."""

import threading
import time

import pytest
import torch

from manyheads.engine.threads import Threads


@pytest.mark.parametrize("count", [1, 3])
def test_results_come_in_order_from_work_without_threads_of_its_own(count: int) -> None:
    def work(item: int) -> tuple[int, int]:
        time.sleep(0.001 * (5 - item))
        return item, torch.get_num_threads()

    before = torch.get_num_threads()
    assert Threads(count).map(work, range(5)) == [(item, 1) for item in range(5)]
    assert torch.get_num_threads() == before


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
    assert threads.map(abs, [-1, -2]) == [1, 2]
