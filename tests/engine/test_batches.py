"""Mini-batches: every sample once a pass, true sizes, and draws that depend on seed, worker, round and stream alone."""

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from manyheads.engine.batches import Passes, Source, dropout_base, dropout_key, num_batches, plan
from manyheads.engine.phase import SGD, Epochs, Phase, Steps, cross_entropy, single_head
from manyheads.randomness import generator

SIZES = st.integers(0, 40)
SOURCES = st.builds(Source, st.integers(0, 5), st.integers(1, 12), st.booleans())
AMOUNTS = st.one_of(st.builds(Epochs, st.integers(0, 3)), st.builds(Steps, st.integers(0, 9)))


def phase_of(amount: Epochs | Steps, stream: str = "body") -> Phase:
    return Phase(stream, frozenset({"head"}), amount, SGD(0.1), single_head(cross_entropy))


@hypothesis.given(SIZES, AMOUNTS, SOURCES)
def test_the_number_of_batches(size, amount, source):
    whole, rest = divmod(size, source.batch_size)
    usable = whole + (rest > 0)
    if source.skip_single:
        usable = (whole if source.batch_size > 1 else 0) + (rest > 1)
    expected = 0 if usable == 0 else amount.count * (usable if isinstance(amount, Epochs) else 1)
    assert num_batches(size, amount, source) == expected


@hypothesis.given(SIZES, AMOUNTS, SOURCES)
def test_a_plan_has_that_many_batches_of_true_sizes(size, amount, source):
    hypothesis.assume(source.batch_size > 1 or not source.skip_single)
    batches = plan(size, phase_of(amount), source, worker=3, round=2)
    assert len(batches) == num_batches(size, amount, source)
    passes = -(-len(batches) // max(1, num_batches(size, Epochs(1), source)))
    one_pass = [source.batch_size] * (size // source.batch_size) + [size % source.batch_size] * (
        size % source.batch_size > 0
    )
    if source.skip_single and one_pass and one_pass[-1] == 1:
        one_pass.pop()
    assert [len(batch) for batch in batches] == (one_pass * passes)[: len(batches)]


@hypothesis.given(st.integers(2, 40), st.integers(1, 3), st.integers(1, 12))
def test_a_pass_holds_every_sample_once_in_an_order_of_its_own(size, epochs, batch_size):
    batches = plan(size, phase_of(Epochs(epochs)), Source(1, batch_size, False), worker=0, round=0)
    order = np.concatenate(batches).reshape(epochs, size)
    for passed in order:
        assert sorted(passed) == list(range(size))
    if size > 15:
        assert len({tuple(passed) for passed in order}) == epochs


def test_steps_are_the_first_batches_of_as_many_passes_as_it_takes():
    source = Source(1, 4, False)
    long = plan(10, phase_of(Epochs(3)), source, worker=2, round=1)
    short = plan(10, phase_of(Steps(5)), source, worker=2, round=1)
    assert len(short) == 5
    for a, b in zip(short, long, strict=False):
        assert np.array_equal(a, b)


def test_every_pass_is_drawn_by_a_generator_of_its_own():
    passes = Passes(phase_of(Epochs(2)), Source(3, 4, False), round=5)
    # Of two workers in turn: they are drawn apart all the same.
    for epoch, orders in enumerate(zip(passes(9, worker=0), passes(10, worker=7), strict=True)):
        for worker, order in zip((0, 7), orders, strict=True):
            rng = generator(3, "body", worker=worker, round=5, epoch=epoch)
            assert np.array_equal(order, rng.permutation(len(order)))


def test_every_name_of_a_draw_counts():
    def order(seed=1, stream="body", worker=0, round=0) -> tuple[int, ...]:
        batches = plan(30, phase_of(Epochs(1), stream), Source(seed, 30, False), worker=worker, round=round)
        return tuple(batches[0].tolist())

    others = [order(seed=2), order(stream="head"), order(worker=1), order(round=1)]
    assert len({order(), *others}) == 5
    assert order() == order()
    # The order is of positions: another batch size cuts the same order elsewhere.
    cut = plan(30, phase_of(Epochs(1)), Source(1, 7, False), worker=0, round=0)
    assert tuple(np.concatenate(cut).tolist()) == order()


def test_no_pass_of_a_worker_repeats_another():
    orders = {
        tuple(order.tolist())
        for worker in range(3)
        for round in range(3)
        for order in plan(30, phase_of(Epochs(3)), Source(1, 30, False), worker=worker, round=round)
    }
    assert len(orders) == 3**3


def test_dropout_keys_differ_between_seeds_workers_rounds_streams_steps_and_layers():
    bases = [
        dropout_base(Source(seed, 4, False), phase_of(Epochs(1), stream), worker=worker, round=round)
        for seed in (1, 2)
        for stream in ("head", "body")
        for worker in range(3)
        for round in range(3)
    ]
    bases.append(2**63 - 1)
    layers = (0, 1, 128, 255)
    keys = torch.stack([dropout_key(torch.tensor(bases), step, layer) for step in range(40) for layer in layers])
    assert keys.shape == (160, 37) and bool((keys >= 0).all())
    assert len(keys.unique()) == keys.numel()


def test_many_passes_can_be_stopped_on_the_way():
    asked = 0

    def go_on() -> None:
        nonlocal asked
        asked += 1
        if asked == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan(9, phase_of(Steps(10**9)), Source(1, 4, False), worker=0, round=0, go_on=go_on)
