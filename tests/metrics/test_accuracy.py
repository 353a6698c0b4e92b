"""Mean, spread and worst tenth of the workers' scores, and their mean over samples."""

from math import ceil, isnan

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from manyheads.metrics.accuracy import by_samples, summarise


def test_by_hand():
    mean, deviation, worst = summarise(torch.tensor([0.2, 0.4, 0.9]), torch.ones(3, dtype=torch.bool))
    assert (mean, deviation, worst) == pytest.approx((0.5, (0.26 / 3) ** 0.5, 0.2))


def test_workers_without_samples_are_left_out():
    scores = torch.tensor([0.5, float("nan"), 1.0])
    assert summarise(scores, torch.tensor([True, False, True]))[0] == 0.75
    assert all(isnan(value) for value in summarise(scores, torch.zeros(3, dtype=torch.bool)))


def test_the_worst_tenth_is_one_of_all_workers():
    """Of 21 workers three, though only 20 have samples; where fewer have any, those."""
    scores, there = torch.linspace(0, 1, 21), torch.arange(21) < 20
    assert summarise(scores, there)[2] == pytest.approx(0.05)
    assert summarise(scores, torch.arange(21) >= 19)[2] == pytest.approx(0.975)


@hypothesis.given(st.lists(st.floats(0, 1), min_size=1, max_size=45))
def test_the_worst_tenth_is_rounded_up(scores):
    given = torch.tensor(scores, dtype=torch.float64)
    _, _, worst = summarise(given, torch.ones(len(scores), dtype=torch.bool))
    lowest = sorted(scores)[: ceil(len(scores) / 10)]
    assert worst == pytest.approx(sum(lowest) / len(lowest))


def test_the_mean_over_samples_is_what_all_of_them_together_score():
    """Of 2 samples one right, of 8 six, and a worker without any: 7 of 10."""
    scores, counts = torch.tensor([0.5, float("nan"), 0.75]), torch.tensor([2, 0, 8])
    assert by_samples(scores, counts) == pytest.approx(0.7)
    assert isnan(by_samples(scores, torch.zeros(3, dtype=torch.int64)))
