"""Memory plans: counted before the start, cut to what is free."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from manyheads.data.shards import Shards
from manyheads.engine.cuda_graphs.memory_plan import MemoryPlan, describe, plan_memory, settle
from manyheads.engine.precision import Precision
from manyheads.errors import UserError
from manyheads.models.split import Split
from manyheads.models.splitting import split


def make_shards(sizes: list[int]) -> Shards:
    offsets = tuple(np.cumsum([0, *sizes]).tolist())
    entries = torch.arange(offsets[-1])
    return Shards(torch.zeros(offsets[-1], 1), entries, entries, offsets)


def make_net() -> Split:
    return split(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2)), None, torch.randn(2, 3, 8, 8))


def test_memory_is_counted_before_the_start() -> None:
    slots = Precision(deterministic=True)
    few, many = (replace(make_shards([1000 // n] * n), x=torch.zeros(1000, 3, 8, 8)) for n in (10, 1000))
    small, large = (plan_memory(make_net(), train, batch_size=16, precision=slots) for train in (few, many))
    assert small.row == (4 * 27 + 4 + 144 * 2 + 2) * 4
    assert large.device - small.device == 990 * small.row * 3
    assert small.largest(large.device) == 1000
    assert small.data == few.x.numel() * 4 * 2, "images lie there in two layouts"
    assert not small.stacked
    stacked = plan_memory(make_net(), few, batch_size=16, precision=Precision())
    assert (stacked.stacked, stacked.lanes) == (True, 10)
    assert stacked.lane > 16 * 4 * 36 * 27, "there is room for the patches of a batch"
    heavy = plan_memory(make_net(), few, batch_size=10**7, precision=Precision())
    assert not heavy.stacked, "a step that keeps the device busy alone"
    twice = plan_memory(make_net(), few, batch_size=16, precision=slots, extra_rows=1.0)
    assert twice.rows == 2 * small.rows
    assert twice.work == small.work + small.lanes * small.row, "an anchor or a mask lies beside the weights in training"
    assert settle(large, large.device) == large
    assert {label.split()[0] for label, _ in describe(large)} >= {"rows", "training:", "data"}


def test_a_plan_is_cut_to_what_is_free() -> None:
    plan = MemoryPlan(100, 10**9, 10**9, False, 8, 10**9, 10**9)
    tight = settle(plan, plan.device - 5 * 10**9)
    assert (tight.lanes, tight.rows_on_host) == (2, False)
    streamed = settle(plan, 20 * 10**9)
    assert (streamed.lanes, streamed.rows_on_host) == (8, True)
    with pytest.raises(UserError, match=r"100 workers of this model need .* GB .* enough for 0: lower --workers"):
        settle(plan, 2 * 10**9)


def test_rows_must_fit_on_the_host_where_they_go_there() -> None:
    """Two copies of them at the least; what is said is what three take."""
    plan = MemoryPlan(100, 10**9, 10**9, False, 8, 10**9, 10**9)
    free, enough = 20 * 10**9, 200 * 10**9
    streamed = settle(plan, free, enough)
    assert (streamed.rows_on_host, streamed.host, plan.host) == (True, 300 * 10**9, 0)
    assert settle(plan, plan.device, 0) == plan, "rows on the device take nothing there"
    line = r"^the rows of 100 workers .* need 300 GB, and the GPU has 20\.0 GB free and its host {}, .* for {}: lower"
    with pytest.raises(UserError, match=line.format("180 GB", 60)):
        settle(plan, free, 180 * 10**9)
    with pytest.raises(UserError, match=line.format("0 B", 5)):
        settle(plan, free, 0)
    with pytest.raises(UserError, match=r"on the GPU .* enough for 0"):
        settle(plan, 2 * 10**9, 0)
    label = "rows of 100 workers, 3 copies, in host memory"
    assert dict(describe(streamed, enough))[label] == "300 GB, and this machine has 200 GB free"
    assert dict(describe(streamed, 300 * 10**9))[label] == "300 GB"
