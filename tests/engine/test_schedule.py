"""Schedules: every worker's mini-batches in their order and true sizes, as arrays."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.data.shards import Shards
from manyheads.engine.batches import Passes, Source, dropout_base
from manyheads.engine.phase import SGD, Epochs, Phase, Steps, cross_entropy, single_head
from manyheads.engine.schedule import in_widths, narrowest, schedule


def make_phase(amount: Epochs | Steps) -> Phase:
    return Phase("body", frozenset({"head"}), amount, SGD(0.1), single_head(cross_entropy))


def make_shards(sizes: list[int]) -> Shards:
    offsets = tuple(np.cumsum([0, *sizes]).tolist())
    entries = torch.arange(offsets[-1])
    return Shards(torch.zeros(max(1, offsets[-1]), 1), entries, entries, offsets)


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=5),
    size=st.integers(2, 9),
    skip=st.booleans(),
    amount=st.one_of(st.builds(Epochs, st.integers(1, 3)), st.builds(Steps, st.integers(1, 12))),
    round=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_a_schedule_cuts_every_workers_passes_into_batches(sizes, size, skip, amount, round) -> None:
    shards, source, phase = make_shards(sizes), Source(5, size, skip), make_phase(amount)
    ids = [100 + row for row in range(len(sizes))]
    made = schedule(shards, range(len(sizes)), ids, phase, source, round)
    passes = Passes(phase, source, round)
    expected = {
        row: [order[k : k + size] for order in passes(n, ids[row]) for k in range(0, len(order), size)]
        for row, n in enumerate(sizes)
    }
    assert sorted(made.rows) == [row for row, batches in expected.items() if batches]
    assert list(made.lengths) == sorted(made.lengths, reverse=True)
    for k, row in enumerate(made.rows):
        here = slice(made.starts[k], made.starts[k] + made.lengths[k])
        assert list(made.counts[here]) == [len(batch) for batch in expected[row]]
        assert list(made.steps[here]) == list(range(made.lengths[k]))
        for entries, batch in zip(made.entries[here], expected[row], strict=True):
            assert list(entries[: len(batch)]) == list(batch + shards.offsets[row])
            assert all(shards.offsets[row] <= entry < shards.offsets[row + 1] for entry in entries)
        assert list(made.drawn(k)) == [entry + shards.offsets[row] for batch in expected[row] for entry in batch]
        assert made.bases[k] == dropout_base(source, phase, worker=ids[row], round=round)
    if made.rows:
        assert list(made.samples()) == [sum(map(len, expected[row])) for row in made.rows]
        entries, counts = made.side_by_side(slice(0, 3), 4)
        assert entries.shape == (made.lengths[0], 4, size)
        assert list((counts > 0).sum(0)) == [*made.lengths[:3], *[0] * (4 - len(made.lengths[:3]))]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(1, 8))
def test_a_sweep_holds_every_sample_once(sizes: list[int], width: int) -> None:
    made = in_widths(make_shards(sizes), range(len(sizes)), width)
    seen = [entry for entries, count in zip(made.entries, made.counts, strict=True) for entry in entries[:count]]
    assert sorted(seen) == list(range(sum(sizes)))
    assert made.entries.size == 0 or made.entries.max() < sum(sizes)


@given(st.integers(1, 300), st.integers(8, 300))
def test_a_step_is_as_wide_as_its_samples_need(count: int, width: int) -> None:
    count = min(count, width)
    found = narrowest(count, width)
    assert count <= found <= width
    assert found == width or found & (found - 1) == 0, "few widths, so few recordings"
    assert found < 2 * count or found == 8


def test_many_passes_can_be_stopped_on_the_way() -> None:
    asked = 0

    def go_on() -> None:
        nonlocal asked
        asked += 1
        if asked == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        schedule(make_shards([9]), [0], [0], make_phase(Steps(10**9)), Source(1, 4, False), 0, go_on=go_on)
