from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.data import Dataset
from manyheads.data.evaluation_split import split_test
from manyheads.data.partition import Natural, draw_partition, parse_split

Make = Callable[..., Dataset]


def mixture(label: np.ndarray, worker: np.ndarray, weight: np.ndarray | None, shape: tuple[int, int]) -> np.ndarray:
    """Class shares of every worker, [W, C]."""
    counts = np.bincount(worker * shape[1] + label, weight, minlength=shape[0] * shape[1]).reshape(shape)
    return counts / counts.sum(1, keepdims=True)


@pytest.mark.parametrize("kind", ["shared", "overlap", "reweighted"])
@pytest.mark.parametrize("spec", ["dirichlet:0.3", "shards:3", "dirichlet:0.1"])
def test_test_mixtures_follow_train_mixtures(toy: Make, kind: str, spec: str) -> None:
    data = toy([2000] * 5, [4000] * 5)
    partition = draw_partition(data, parse_split(spec), 8, seed=1)
    test = split_test(kind, data, partition, seed=1)
    train = mixture(data.y_train.numpy(), partition.owner, None, (8, 5))
    worker = np.repeat(np.arange(8), test.sizes)
    tested = mixture(data.y_test.numpy()[test.rows], worker, test.weight, (8, 5))
    off_by_samples = np.abs(tested - train) * np.bincount(partition.owner)[:, None]
    assert off_by_samples.max() < {"shared": 3, "overlap": 6, "reweighted": 1e-3}[kind]


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=5),
    workers=st.integers(1, 12),
    spec=st.sampled_from(["iid", "shards:1", "dirichlet:0.1", "natural"]),
)
def test_shared_deals_every_sample_once(toy: Make, sizes: list[tuple[int, int]], workers: int, spec: str) -> None:
    train, test = [list(column) for column in zip(*sizes, strict=True)]
    train[0], test[0] = train[0] + 12, test[0] + 1
    data = toy(train, test, users=12)
    partition = draw_partition(data, parse_split(spec), workers, seed=2)
    dealt = split_test("shared", data, partition, seed=2)
    known = (
        np.array(train)[data.y_test.numpy()] > 0 if spec in ("shards:1", "dirichlet:0.1") else np.full(sum(test), True)
    )
    assert sorted(dealt.rows) == np.flatnonzero(known).tolist()
    assert dealt.sizes.sum() == len(dealt.rows) and len(dealt.sizes) == workers
    assert dealt.weight is None


def test_iid_deals_equal_parts(toy: Make, regression: Dataset) -> None:
    for data, expected in ((toy([50, 70], [11, 14]), [7, 6, 6, 6]), (regression, [3, 3, 2, 2])):
        partition = draw_partition(data, parse_split("iid"), 4, seed=1)
        assert split_test("shared", data, partition, seed=1).sizes.tolist() == expected


def test_natural_tests_on_the_own_users_and_leaves_strangers_out(toy: Make) -> None:
    data = toy([30, 30], [20, 20], users=10)
    assert data.user_train is not None and data.user_test is not None
    known = data.user_train != 3
    data = Dataset(
        "toy",
        data.x_train[known],
        data.y_train[known],
        data.x_test,
        data.y_test,
        2,
        data.user_train[known],
        data.user_test,
    )
    assert data.user_train is not None and data.user_test is not None
    partition = draw_partition(data, Natural(), 4, seed=1)
    test = split_test("shared", data, partition, seed=1)
    assert len(test.rows) == 36
    for worker, rows in enumerate(np.split(test.rows, test.sizes.cumsum()[:-1])):
        own = set(data.user_train.numpy()[partition.owner == worker])
        assert set(data.user_test.numpy()[rows]) == own


def test_overlap_gives_everyone_about_an_even_part_without_repetition(toy: Make) -> None:
    data = toy([500] * 10, [100] * 10)
    partition = draw_partition(data, parse_split("dirichlet:0.1"), 20, seed=1)
    test = split_test("overlap", data, partition, seed=1)
    assert test.sizes.min() >= 50 and test.sizes.max() <= 60
    for rows in np.split(test.rows, test.sizes.cumsum()[:-1]):
        assert len(set(rows)) == len(rows)
    assert len(set(test.rows)) < len(test.rows)


def test_overlap_takes_a_whole_class_when_it_is_too_small(toy: Make) -> None:
    data = toy([100, 100], [2, 100])
    partition = draw_partition(data, parse_split("iid"), 2, seed=1)
    test = split_test("overlap", data, partition, seed=1)
    for rows in np.split(test.rows, test.sizes.cumsum()[:-1]):
        assert (data.y_test.numpy()[rows] == 0).sum() == 2


def test_reweighted_weights_have_mean_one_and_the_mixture_of_the_train_samples(toy: Make) -> None:
    data = toy([100] * 4, [1, 20, 30, 40])
    partition = draw_partition(data, parse_split("shards:1"), 4, seed=1)
    test = split_test("reweighted", data, partition, seed=1)
    assert sorted(test.sizes.tolist()) == [1, 20, 30, 40]
    assert test.weight is not None and np.allclose(test.weight, 1)
    partition = draw_partition(data, parse_split("dirichlet:1"), 4, seed=1)
    test = split_test("reweighted", data, partition, seed=1)
    assert test.weight is not None and test.weight.dtype == np.float32
    for weight in np.split(test.weight, test.sizes.cumsum()[:-1]):
        assert weight.mean() == pytest.approx(1, abs=1e-5)
    train = mixture(data.y_train.numpy(), partition.owner, None, (4, 4))
    tested = mixture(data.y_test.numpy()[test.rows], np.repeat(np.arange(4), test.sizes), test.weight, (4, 4))
    np.testing.assert_allclose(tested, train, atol=1e-6)


def test_reweighted_worker_without_a_testable_class_has_no_entries(toy: Make) -> None:
    data = toy([50, 50], [0, 10])
    partition = draw_partition(data, parse_split("shards:1"), 2, seed=1)
    test = split_test("reweighted", data, partition, seed=1)
    assert sorted(test.sizes.tolist()) == [0, 10]


@pytest.mark.parametrize(("kind", "sizes"), [("overlap", [3] * 4), ("reweighted", [10] * 4)])
def test_a_regression_counts_as_one_class(regression: Dataset, kind: str, sizes: list[int]) -> None:
    partition = draw_partition(regression, parse_split("iid"), 4, seed=1)
    assert split_test(kind, regression, partition, seed=1).sizes.tolist() == sizes
