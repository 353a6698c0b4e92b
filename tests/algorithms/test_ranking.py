"""The largest scores: those that sorting finds, on every device."""

from math import ceil

import hypothesis
import numpy as np
import torch
from hypothesis import strategies as st

from manyheads.algorithms.ranking import by_selection, largest, mask_of
from manyheads.tree import flatten


@hypothesis.given(
    st.integers(1, 60), st.floats(0, 1), st.integers(1, 5), st.sampled_from(["f4", "f8", "i8"]), st.data()
)
def test_the_largest_scores_on_a_cpu_and_on_a_gpu_are_those_that_sorting_finds(size, share, values, kind, data):
    """Few values, so that many are equal; -1 is what may not be chosen before all others are."""
    numbers = st.sampled_from([-1, 0, *(np.linspace(1e-30, 7, values) if kind != "i8" else range(1, values + 1))])
    scores = np.array([data.draw(st.lists(numbers, min_size=size, max_size=size)) for _ in range(2)], dtype=kind)
    count = ceil(share * size)
    expected = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(expected, np.argsort(-scores, axis=1, kind="stable")[:, :count], True, axis=1)
    for choose in (largest, by_selection) if count else (largest,):
        assert choose(torch.from_numpy(scores), count).tolist() == expected.tolist()


def test_a_mask_is_filled_row_by_row_whatever_the_layout_of_its_leaf():
    rows = torch.arange(24).view(2, 12) % 5 == 0
    mask = mask_of(torch.zeros(2, 3, 4).transpose(1, 2), lambda asked: rows[asked])
    assert mask.shape == (2, 4, 3) and torch.equal(flatten(mask), rows.to(torch.uint8))


def test_of_equal_scores_the_first_count():
    """Devices break ties in their own ways; many gradients are exactly 0."""
    scores = torch.zeros(2, 1000)
    scores[:, 500:503] = 1.0
    mask = largest(scores, 10)
    assert mask[0].nonzero().flatten().tolist() == [*range(7), 500, 501, 502]
    assert torch.equal(mask[0], mask[1])
    assert largest(scores, 0).sum() == 0
