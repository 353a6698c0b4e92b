"""Passes: every sample once, and draws that depend on seed, worker, round and stream alone."""

import hypothesis
import numpy as np
import torch
from hypothesis import strategies as st

from manyheads.engine.batches import Passes, Source, dropout_base, dropout_key, num_batches
from manyheads.engine.phase import SGD, Epochs, Phase, Steps, cross_entropy, single_head
from manyheads.randomness import generator

SIZES = st.integers(0, 40)
SOURCES = st.builds(Source, st.integers(0, 5), st.integers(1, 12), st.booleans())
AMOUNTS = st.one_of(st.builds(Epochs, st.integers(0, 3)), st.builds(Steps, st.integers(0, 9)))


def phase_of(amount: Epochs | Steps, stream: str = "body") -> Phase:
    return Phase(stream, frozenset({"head"}), amount, SGD(0.1), single_head(cross_entropy))


def passes_of(
    size: int, amount: Epochs | Steps, source: Source, *, stream: str = "body", worker: int = 0, round: int = 0
) -> list[list[int]]:
    return [order.tolist() for order in Passes(phase_of(amount, stream), source, round)(size, worker)]


@hypothesis.given(SIZES, AMOUNTS, SOURCES)
def test_the_number_of_batches(size, amount, source):
    hypothesis.assume(source.batch_size > 1 or not source.skip_single)
    whole, rest = divmod(size, source.batch_size)
    usable = whole + (rest > (1 if source.skip_single else 0))
    expected = 0 if usable == 0 else amount.count * (usable if isinstance(amount, Epochs) else 1)
    assert num_batches(size, amount, source) == expected


@hypothesis.given(SIZES, AMOUNTS, SOURCES)
def test_passes_hold_the_samples_of_that_many_batches(size, amount, source):
    hypothesis.assume(source.batch_size > 1 or not source.skip_single)
    lengths = [len(order) for order in passes_of(size, amount, source, worker=3, round=2)]
    assert sum(-(-length // source.batch_size) for length in lengths) == num_batches(size, amount, source)
    whole = size - 1 if source.skip_single and size % source.batch_size == 1 else size
    assert lengths[:-1] == [whole] * len(lengths[:-1])
    # Steps may end within a pass, but only where a batch does.
    assert not lengths or lengths[-1] == whole or lengths[-1] % source.batch_size == 0


@hypothesis.given(st.integers(2, 40), st.integers(1, 3), st.integers(1, 12))
def test_a_pass_holds_every_sample_once_in_an_order_of_its_own(size, epochs, batch_size):
    orders = passes_of(size, Epochs(epochs), Source(1, batch_size, False))
    assert [sorted(order) for order in orders] == [list(range(size))] * epochs
    if size > 15:
        assert len(set(map(tuple, orders))) == epochs


def test_steps_are_the_first_batches_of_as_many_passes_as_it_takes():
    source = Source(1, 4, False)
    first, second, _ = passes_of(10, Epochs(3), source, worker=2, round=1)
    assert passes_of(10, Steps(5), source, worker=2, round=1) == [first, second[:8]]


def test_every_pass_is_drawn_by_a_generator_of_its_own():
    passes = Passes(phase_of(Epochs(2)), Source(3, 4, False), round=5)
    # Of two workers in turn: they are drawn apart all the same.
    for epoch, orders in enumerate(zip(passes(9, worker=0), passes(10, worker=7), strict=True)):
        for worker, order in zip((0, 7), orders, strict=True):
            rng = generator(3, "body", worker=worker, round=5, epoch=epoch)
            assert np.array_equal(order, rng.permutation(len(order)))


def test_every_name_of_a_draw_counts():
    def order(seed=1, batch_size=30, **names) -> tuple[int, ...]:
        (only,) = passes_of(30, Epochs(1), Source(seed, batch_size, False), **names)
        return tuple(only)

    others = [order(seed=2), order(stream="head"), order(worker=1), order(round=1)]
    assert len({order(), *others}) == 5
    assert order() == order()
    # The order is of positions: another batch size cuts the same order elsewhere.
    assert order(batch_size=7) == order()


def test_no_pass_of_a_worker_repeats_another():
    orders = {
        tuple(order)
        for worker in range(3)
        for round in range(3)
        for order in passes_of(30, Epochs(3), Source(1, 30, False), worker=worker, round=round)
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
