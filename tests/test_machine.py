"""What a process may use of its machine."""

import os
import sys

import pytest

from manyheads.machine import cores


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which cores a process may use")
def test_only_cores_that_a_process_may_use_are_counted():
    allowed = os.sched_getaffinity(0)
    assert cores() == len(allowed)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
