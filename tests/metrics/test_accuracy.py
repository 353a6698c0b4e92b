"""Mean, spread and worst tenth of the workers' scores."""

from math import ceil, isnan

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from manyheads.metrics.accuracy import summarise


def test_by_hand():
    mean, deviation, worst = summarise(torch.tensor([0.2, 0.4, 0.9]), torch.tensor([3, 1, 2]))
    assert (mean, deviation, worst) == pytest.approx((0.5, (0.26 / 3) ** 0.5, 0.2))


def test_workers_without_samples_are_left_out():
    scores = torch.tensor([0.5, float("nan"), 1.0])
    assert summarise(scores, torch.tensor([4, 0, 1]))[0] == 0.75
    assert all(isnan(value) for value in summarise(scores, torch.zeros(3)))


def test_the_worst_tenth_is_one_of_all_workers():
    """Of 21 workers three, though only 20 have samples; where fewer have any, those."""
    scores, counts = torch.linspace(0, 1, 21), torch.tensor([1] * 20 + [0])
    assert summarise(scores, counts)[2] == pytest.approx(0.05)
    assert summarise(scores, torch.tensor([0] * 19 + [1, 1]))[2] == pytest.approx(0.975)


@hypothesis.given(st.lists(st.floats(0, 1), min_size=1, max_size=45))
def test_the_worst_tenth_is_rounded_up(scores):
    given = torch.tensor(scores, dtype=torch.float64)
    _, _, worst = summarise(given, torch.ones(len(scores)))
    lowest = sorted(scores)[: ceil(len(scores) / 10)]
    assert worst == pytest.approx(sum(lowest) / len(lowest))
