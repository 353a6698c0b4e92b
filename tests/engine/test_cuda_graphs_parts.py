"""The parts of the engine for GPUs: schedules, layouts, kinds of phases, memory plans, footprints."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from manyheads.data.shards import Shards
from manyheads.engine.batches import Source, dropout_base, plan
from manyheads.engine.choose import make_engine
from manyheads.engine.cuda_graphs.descent import UpdateRule, descend_
from manyheads.engine.cuda_graphs.footprint import footprint_of
from manyheads.engine.cuda_graphs.fused import PlainUpdate
from manyheads.engine.cuda_graphs.kinds import bare, kind, meaning
from manyheads.engine.cuda_graphs.memory import MemoryPlan, describe, plan_memory, settle
from manyheads.engine.cuda_graphs.precision import Precision
from manyheads.engine.cuda_graphs.rows import Extras, FlatRows, Kind, Layout
from manyheads.engine.cuda_graphs.schedule import in_widths, narrowest, schedule
from manyheads.engine.phase import SGD, Epochs, Phase, Steps, cross_entropy, single_head
from manyheads.engine.workload import Workload
from manyheads.errors import UserError
from manyheads.models.split import Split
from manyheads.models.splitting import split

WHOLE = frozenset({"representation", "head"})
CPU = torch.device("cpu")


ONCE = Epochs(1)


def make_phase(amount: Epochs | Steps = ONCE, **options) -> Phase:
    return Phase("body", WHOLE, amount, SGD(0.1, 0.9), single_head(cross_entropy), **options)


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
def test_a_schedule_holds_the_batches_of_the_plan(sizes, size, skip, amount, round) -> None:
    shards, source, phase = make_shards(sizes), Source(5, size, skip), make_phase(amount)
    ids = [100 + row for row in range(len(sizes))]
    made = schedule(shards, range(len(sizes)), ids, phase, source, round)
    expected = {row: plan(n, phase, source, worker=ids[row], round=round) for row, n in enumerate(sizes)}
    assert sorted(made.rows) == [row for row, batches in expected.items() if batches]
    assert list(made.lengths) == sorted(made.lengths, reverse=True)
    for k, row in enumerate(made.rows):
        here = slice(made.starts[k], made.starts[k] + made.lengths[k])
        assert list(made.counts[here]) == [len(batch) for batch in expected[row]]
        assert list(made.steps[here]) == list(range(made.lengths[k]))
        for entries, batch in zip(made.entries[here], expected[row], strict=True):
            assert list(entries[: len(batch)]) == list(batch + shards.offsets[row])
            assert all(shards.offsets[row] <= entry < shards.offsets[row + 1] for entry in entries)
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


def test_leaves_lie_apart_aligned_and_channels_last() -> None:
    shapes = {"a": (3,), "w": (4, 2, 3, 3), "s": ()}
    layout = Layout(shapes, channels_last=True)
    flat = torch.zeros(2, layout.size)
    views = layout.views(flat)
    for k, (name, view) in enumerate(views.items()):
        assert view.shape == (2, *shapes[name])
        assert layout.offsets[name] % 64 == 0
        view.fill_(k + 1)
    assert views["w"][0].is_contiguous(memory_format=torch.channels_last)
    assert [int((flat == k + 1).sum()) for k in range(3)] == [6, 144, 2], "no leaf runs into another"


def test_a_layer_update_is_a_descent_along_its_gradient() -> None:
    torch.manual_seed(0)
    rule, rate = UpdateRule(0.9, 0.01, None, 0.5), torch.tensor([0.1], dtype=torch.float64)
    shapes = {"fc.weight": (3, 4), "fc.bias": (3,)}
    rows = FlatRows(shapes, Kind(3, CPU, torch.float64), Extras(False, True, True, True))
    part = rows.parts[0]
    for flat in (part.weight, part.momentum, part.anchor):
        assert flat is not None
        flat.copy_(torch.randn_like(flat))
    assert part.momentum is not None
    before, momentum = part.weight.clone(), part.momentum.clone()
    d, x = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(2, 5, 4, dtype=torch.float64)
    factor, count = torch.tensor([0.5, 1.0], dtype=torch.float64), torch.tensor([5, 0])
    PlainUpdate(rule).by_factors(part, "fc", d, x, factor, count, rate, bias=True)
    expected, here = before[:1, :12].clone(), slice(0, 12)
    gradient = torch.einsum("bo,bi->oi", d[0], x[0]).reshape(1, -1)
    anchor, mask = part.anchor, part.mask
    assert anchor is not None and mask is not None
    args = (None, None, momentum[:1, here], anchor[:1, here], mask[:1, here])
    descend_(expected, gradient * factor[0], rate, rule, *args)
    torch.testing.assert_close(part.weight[:1, here], expected)
    assert torch.equal(part.weight[1:], before[1:]), "a finished worker and one beyond the first rows stay"
    assert not torch.equal(part.weight[0, 64:67], before[0, 64:67]), "the bias moves"


def test_phases_share_recordings_when_only_rates_and_tensors_differ() -> None:
    first = make_phase(constants={"c": torch.ones(3, 2)}, mask={"head.w": torch.ones(3)})
    again = Phase(
        "head",
        WHOLE,
        Epochs(1),
        SGD(0.05, 0.9),
        single_head(cross_entropy),
        {"c": torch.zeros(5, 2)},
        mask={"head.w": torch.zeros(5)},
    )
    assert kind(first) == kind(again)
    for other in (
        make_phase(),
        make_phase(constants=first.constants, mask={}),
        replace(first, amount=Epochs(2)),
        replace(first, optimizer=SGD(0.1, 0.8)),
        replace(first, objective=single_head(lambda o, y: o.sum(1))),
    ):
        assert kind(other) != kind(first)
    held = bare(first)
    assert kind(held) == kind(first)
    assert held.constants["c"].numel() == 2 and held.mask is not None and held.mask["head.w"].numel() == 0


def test_meaning_looks_into_closures() -> None:
    def make(number: float, thing: object):
        return lambda x: (x, number, thing)

    thing = object()
    assert meaning(make(1.0, thing)) == meaning(make(1.0, thing))
    assert meaning(make(1.0, thing)) != meaning(make(2.0, thing))
    assert meaning(make(1.0, thing)) != meaning(make(1.0, object()))


def test_meaning_looks_at_defaults() -> None:
    def make(first: float, named: float):
        return lambda x, first=first, *, named=named: (x, first, named)

    assert meaning(make(1.0, 2.0)) == meaning(make(1.0, 2.0))
    assert len({meaning(make(*numbers)) for numbers in ((1.0, 2.0), (3.0, 2.0), (1.0, 3.0))}) == 3


def test_meaning_looks_into_partial_functions() -> None:
    def loss(x: float, factor: float, *, held: dict) -> tuple:
        return x, factor, held

    held = {"rate": 1.0}
    first = meaning(partial(loss, factor=2.0, held=held))
    assert first == meaning(partial(loss, factor=2.0, held=held)), "made anew in every round"
    assert first != meaning(partial(loss, factor=3.0, held=held))
    held["rate"] = 2.0
    assert first != meaning(partial(loss, factor=2.0, held=held))


def test_meaning_looks_at_what_lies_deeper_and_comes_to_an_end() -> None:
    options = SimpleNamespace(factor=1.0, inner=[SimpleNamespace(depth=1)])
    options.itself = options

    class Objective:
        def __init__(self) -> None:
            self.options = options

        def __call__(self, x: float) -> float:
            return self.options.factor * x

    objective = Objective()
    first = meaning(objective)
    assert first == meaning(objective)
    options.inner[0].depth = 2
    second = meaning(objective)
    options.factor = 3.0
    assert len({first, second, meaning(objective)}) == 3


def make_net() -> Split:
    return split(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2)), None, torch.randn(2, 3, 8, 8))


class Peeks(nn.Module):
    """Looks at its numbers, which cannot be captured."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else -x


def test_a_footprint_counts_and_names_what_cannot_be_captured() -> None:
    footprint = footprint_of(make_net(), (3, 8, 8))
    assert footprint.blocked is None
    assert footprint.products == 4 * 36 * 27 + 144 * 2
    assert footprint.activations == 144 + 144 + 2
    assert footprint.patches == 36 * 27
    peeking = split(nn.Sequential(nn.Linear(4, 3), Peeks(), nn.Linear(3, 2)), None, torch.randn(2, 4))
    assert footprint_of(peeking, (4,)).blocked == "representation.1"


def test_memory_is_counted_before_the_start() -> None:
    slots = Precision(deterministic=True)
    few, many = (replace(make_shards([1000 // n] * n), x=torch.zeros(1000, 3, 8, 8)) for n in (10, 1000))
    small, large = (plan_memory(make_net(), train, batch_size=16, precision=slots) for train in (few, many))
    assert small.row == (4 * 27 + 4 + 144 * 2 + 2) * 4
    assert large.device - small.device == 990 * small.row * 3
    assert small.largest(large.device) == 1000
    assert small.data == few.x.numel() * 4 * 2, "images lie there in two layouts"
    assert not small.stacked
    stacked = plan_memory(make_net(), few, batch_size=16)
    assert (stacked.stacked, stacked.lanes) == (True, 10)
    assert stacked.lane > 16 * 4 * 36 * 27, "there is room for the patches of a batch"
    heavy = plan_memory(make_net(), few, batch_size=10**7)
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


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(UserError, match="unknown precision 'fp16'"):
        Precision("fp16")


def test_the_engine_needs_a_gpu() -> None:
    source, shards = Source(1, 2, False), make_shards([2])
    net = split(nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 2)), None, torch.randn(2, 1))
    with pytest.raises(UserError, match="needs a GPU"):
        make_engine("cuda-graphs", Workload(net, shards, (0,), source, cross_entropy, cross_entropy))
