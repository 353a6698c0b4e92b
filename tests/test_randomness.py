"""Draws are functions of their names, and look random."""

import random
import threading

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from manyheads.randomness import every_seed, generator, hashed, key, stream_id, torch_seed

NAMES = st.tuples(
    st.integers(0, 2**64 - 1), st.sampled_from(["head", "body", "mask/3"]), st.integers(0, 10**6), st.integers(0, 10**6)
)


def draw(name: tuple[int, str, int, int], epoch: int = 0) -> list[int]:
    seed, stream, worker, round = name
    return generator(seed, stream, worker=worker, round=round, epoch=epoch).integers(2**63, size=4).tolist()


@hypothesis.given(NAMES, NAMES)
def test_a_name_has_its_own_numbers(a, b):
    assert draw(a) == draw(a)
    assert (draw(a) == draw(b)) == (a == b)
    assert draw(a) != draw(a, epoch=1)
    keys = [key(seed, stream, worker=worker, round=round) for seed, stream, worker, round in (a, b)]
    assert (keys[0] == keys[1]) == (a == b)
    assert all(0 <= one < 2**63 for one in keys)


def test_long_draws_of_neighbouring_names_do_not_overlap():
    first = generator(1, "body", worker=0).random(10_000)
    second = generator(1, "body", worker=1).random(10_000)
    assert len(set(first) & set(second)) == 0
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


def test_fixed_points():
    """The same in every process and version, or the numbers of old runs could not be had again."""
    assert stream_id("head") == 16752952609621225119
    assert generator(1, "body", worker=2, round=3, epoch=4).permutation(6).tolist() == [3, 0, 2, 4, 1, 5]
    assert key(1, "body", worker=2, round=3) == 8200039051432601404
    assert hashed(torch.tensor(42), 2).tolist() == [2018095565760914391, 2720084924047977155]


def test_torchs_generator_is_put_back():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with torch_seed(3):
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with torch_seed(3):
        assert torch.equal(torch.rand(3), first)
    with pytest.raises(RuntimeError), torch_seed(4):
        raise RuntimeError
    assert torch.equal(torch.get_rng_state(), before)


def test_the_generators_of_gpus_are_put_back(monkeypatch):
    states = {0: 7, 1: 8}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(states))
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, gpu: states.update({gpu: state}))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: states.update(dict.fromkeys(states, seed)))
    with torch_seed(3):
        assert states == {0: 3, 1: 3}
    assert states == {0: 7, 1: 8}


def test_every_generator_is_seeded_and_put_back():
    """numpy's, too, which takes no seed as long as ours are."""

    def draw() -> list[float]:
        return [random.random(), np.random.random(), torch.rand(()).item()]  # noqa: NPY002 (a factory may do so)

    def places() -> list[object]:
        return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]  # noqa: NPY002

    before = places()
    with every_seed(2**63 - 1):
        first = draw()
    with pytest.raises(RuntimeError), every_seed(2**63 - 1):
        assert draw() == first
        raise RuntimeError
    assert places() == before
    with every_seed(1):
        assert not set(draw()) & set(first)
    with every_seed(3), torch_seed(3):
        ours = torch.rand(3)
    with torch_seed(3):
        assert torch.equal(torch.rand(3), ours)


def test_a_thread_that_seeds_torch_waits_for_another_that_has():
    """Or runs in two threads of a process would draw each other's first weights."""
    drawn = {}
    inside, drawn_outside = threading.Event(), threading.Event()

    def draw_second():
        with torch_seed(4):
            inside.set()
            drawn_outside.wait(10)
            drawn[4] = torch.rand(3)

    other = threading.Thread(target=draw_second)
    with torch_seed(3):
        other.start()
        inside.wait(0.1)
        drawn[3] = torch.rand(3)
        drawn_outside.set()
    other.join()
    for seed, numbers in drawn.items():
        with torch_seed(seed):
            assert torch.equal(torch.rand(3), numbers)


@hypothesis.given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4), st.integers(1, 40))
def test_hashes_of_a_stack_are_the_hashes_of_each(keys, count):
    stacked = hashed(torch.tensor(keys), count)
    assert stacked.shape == (len(keys), count) and stacked.dtype == torch.int64
    for one, row in zip(keys, stacked, strict=True):
        assert torch.equal(hashed(torch.tensor(one), count + 5)[:count], row)


def test_hashes_look_random():
    bits = hashed(torch.arange(100), 1000)
    assert len(bits.unique()) == bits.numel() and bool((bits >= 0).all())
    ones = torch.stack([(bits >> k) & 1 for k in range(63)]).double().mean((1, 2))
    assert float((ones - 0.5).abs().max()) < 0.01
    # Neighbouring keys and neighbouring places go their own ways.
    halves = (bits >= 2**62).double() - 0.5
    assert abs(float((halves[1:] * halves[:-1]).mean())) < 0.005
    assert abs(float((halves[:, 1:] * halves[:, :-1]).mean())) < 0.005
