from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from manyheads.data import Dataset
from manyheads.data.partition import (
    NOBODY,
    Dirichlet,
    Iid,
    LabelShards,
    Natural,
    SplitRule,
    _top_up,
    by_owner,
    draw_partition,
    largest_remainder,
    parse_split,
)
from manyheads.errors import UserError

Make = Callable[..., Dataset]


@pytest.mark.parametrize(
    ("spec", "split"),
    [
        ("dirichlet:0.3", Dirichlet(0.3)),
        ("dirichlet:1e-2", Dirichlet(0.01)),
        ("dirichlet:0.1:uncapped", Dirichlet(0.1, capped=False)),
        ("iid", Iid()),
        ("shards:2", LabelShards(2)),
        ("natural", Natural()),
    ],
)
def test_specs_are_read_and_written(spec: str, split: SplitRule) -> None:
    assert parse_split(spec) == split
    assert parse_split(str(split)) == split


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dirchlet:0.3", r"unknown split 'dirchlet'\. Did you mean 'dirichlet'"),
        ("", "unknown split ''"),
        ("dirichlet", r"split 'dirichlet' cannot be read: write dirichlet:0\.3"),
        ("dirichlet:x", "cannot be read"),
        ("dirichlet:0.3:capped", "cannot be read"),
        ("dirichlet:0", "concentration must lie above 0"),
        ("dirichlet:-1", "concentration must lie above 0"),
        ("dirichlet:nan", "concentration must lie above 0"),
        ("dirichlet:inf", "concentration must lie above 0"),
        ("iid:2", "write iid"),
        ("natural:2", "write natural"),
        ("shards", "write shards:2"),
        ("shards:1.5", "write shards:2"),
        ("shards:-1", "write shards:2"),
        ("shards:0", "must be 1 or more"),
    ],
)
def test_wrong_specs(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_split(spec)


@settings(deadline=None, max_examples=60)
@given(
    spec=st.sampled_from(
        [
            "iid",
            "natural",
            "shards:1",
            "shards:2",
            "dirichlet:1e-9",
            "dirichlet:0.1",
            "dirichlet:0.1:uncapped",
            "dirichlet:50",
        ]
    ),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any),
    workers=st.integers(1, 25),
    seed=st.integers(0, 5),
)
def test_every_split_ends_and_leaves_no_worker_empty(
    toy: Make, spec: str, sizes: list[int], workers: int, seed: int
) -> None:
    data = toy(sizes, [3] * len(sizes), users=min(sum(sizes), 25))
    limit = {"natural": min(sum(sizes), 25), "shards:2": sum(sizes) // 2}.get(spec, sum(sizes))
    if workers > limit:
        with pytest.raises(UserError):
            draw_partition(data, parse_split(spec), workers, seed)
        return
    partition = draw_partition(data, parse_split(spec), workers, seed)
    held = np.bincount(partition.owner, minlength=workers)
    assert len(held) == workers and held.min() >= 1 and held.sum() == sum(sizes)
    assert partition.share.min() >= 0
    total = partition.share.sum(1)
    assert np.all((np.abs(total - 1) < 1e-9) | (total == 0))
    if spec.startswith("dirichlet"):
        assert held.min() >= min(10, sum(sizes) / (8 * workers))
    again = draw_partition(data, parse_split(spec), workers, seed)
    assert np.array_equal(partition.owner, again.owner)


def test_another_seed_gives_another_split(toy: Make) -> None:
    data = toy([100] * 3, [10] * 3, users=30)
    for spec in ("iid", "natural", "shards:2", "dirichlet:0.5"):
        one, two = (draw_partition(data, parse_split(spec), 10, seed).owner for seed in (1, 2))
        assert not np.array_equal(one, two)


@pytest.mark.parametrize(
    ("concentration", "majority", "num_classes", "smallest_std"),
    [(0.1, 0.71, 4.1, 0.75), (0.3, 0.51, 6.9, 0.38), (0.5, 0.42, 8.1, 0.27)],
)
def test_dirichlet_has_the_known_statistics(
    toy: Make, concentration: float, majority: float, num_classes: float, smallest_std: float
) -> None:
    """CIFAR-10's class sizes and 128 workers, averaged over draws: the figures every comparison rests on."""
    data = toy([5000] * 10, [1000] * 10)
    shares, present, spreads = [], [], []
    for seed in range(6):
        owner = draw_partition(data, Dirichlet(concentration), 128, seed).owner
        counts = np.bincount(data.y_train.numpy() * 128 + owner, minlength=1280).reshape(10, 128)
        shares.append((counts.max(0) / counts.sum(0)).mean())
        present.append((counts > 0).sum(0).mean())
        spreads.append(counts.sum(0).std() / counts.sum(0).mean())
    assert np.mean(shares) == pytest.approx(majority, abs=0.02)
    assert np.mean(present) == pytest.approx(num_classes, abs=0.3)
    assert np.mean(spreads) > smallest_std


def test_a_full_worker_gets_no_further_class(toy: Make) -> None:
    data = toy([400] * 5, [40] * 5)
    owner = draw_partition(data, Dirichlet(0.2), 10, seed=3).owner
    counts = np.bincount(data.y_train.numpy() * 10 + owner, minlength=50).reshape(5, 10)
    before = counts.cumsum(0) - counts
    assert counts[before >= 200].sum() == 0
    uncapped = draw_partition(data, Dirichlet(0.2, capped=False), 10, seed=3).owner
    counts = np.bincount(data.y_train.numpy() * 10 + uncapped, minlength=50).reshape(5, 10)
    assert counts[counts.cumsum(0) - counts >= 200].sum() > 0


def test_a_worker_is_full_with_exactly_its_even_part(toy: Make) -> None:
    """The first class goes to one of the two whole, which is half of all."""
    data = toy([60, 30, 30], [1, 1, 1])
    for seed in range(20):
        owner = draw_partition(data, Dirichlet(1e-6), 2, seed=seed).owner
        assert np.bincount(owner).tolist() == [60, 60]


def test_a_hopeless_draw_is_topped_up_and_says_so(toy: Make) -> None:
    """Five classes over 128 workers at 0.1, the case in which a plain redraw loop never ends."""
    data = toy([5460] * 5, [1000] * 5)
    partition = draw_partition(data, Dirichlet(0.1), 128, seed=1)
    held = np.bincount(partition.owner, minlength=128)
    assert held.min() == 10
    (note,) = partition.notes
    assert "samples moved to them" in note and "dirichlet:0.1" in note
    counts = np.bincount(data.y_train.numpy() * 128 + partition.owner, minlength=640).reshape(5, 128)
    assert (partition.share[counts > 0] > 0).mean() > 0.99
    assert np.abs(partition.share * 5460 - counts).max() < 2


def test_of_hopeless_draws_the_one_that_came_closest_is_topped_up(toy: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    data = toy([200] * 5, [10] * 5)

    def num_moved(redraws: int) -> int:
        monkeypatch.setattr("manyheads.data.partition._REDRAWS", redraws)
        (note,) = draw_partition(data, Dirichlet(0.01), 20, seed=1).notes
        return int(note.split("redraws: ")[1].split()[0])

    assert num_moved(100) < num_moved(0)


def test_a_note_says_what_was_asked_of_a_draw_and_how_often(toy: Make) -> None:
    (note,) = draw_partition(toy([200] * 5, [10] * 5), Dirichlet(0.01), 20, seed=1).notes
    assert "with fewer than 7 samples after 100 redraws" in note, "1000 / (8 * 20), rounded up"


def test_samples_are_moved_from_whoever_is_the_largest_then() -> None:
    owner, label = np.repeat([0, 1, 2], [6, 5, 1]), np.zeros(12, np.int64)
    share = np.array([[6, 5, 1]]) / 12
    moved, after = _top_up(owner, share, label, 4, np.random.default_rng(1))
    assert np.bincount(moved).tolist() == [4, 4, 4]
    np.testing.assert_allclose(after, 1 / 3)
    assert owner.tolist() == [0] * 6 + [1] * 5 + [2] and share[0, 0] == 0.5, "what was given stays"


def test_no_share_falls_below_zero_when_samples_are_moved() -> None:
    """Numbers of samples are rounded, so that a worker may hold more than its share."""
    moved, share = _top_up(np.zeros(4, np.int64), np.array([[0.1, 0.9]]), np.zeros(4, np.int64), 2, _rng())
    assert np.bincount(moved).tolist() == [2, 2]
    np.testing.assert_allclose(share, [[0, 1]], atol=1e-12)


def _rng() -> np.random.Generator:
    return np.random.default_rng(1)


def test_only_an_eighth_of_an_even_part_is_asked_of_a_draw(toy: Make) -> None:
    data = toy([40] * 3, [4] * 3)
    for seed in range(5):
        partition = draw_partition(data, Dirichlet(1.0), 12, seed)
        assert partition.notes == () and 2 <= np.bincount(partition.owner).min() < 10


def test_shards_give_each_worker_few_classes(toy: Make) -> None:
    data = toy([100] * 10, [10] * 10)
    owner = draw_partition(data, LabelShards(2), 50, seed=1).owner
    assert np.bincount(owner).tolist() == [20] * 50
    counts = np.bincount(data.y_train.numpy() * 50 + owner, minlength=500).reshape(10, 50)
    assert (counts > 0).sum(0).max() <= 2
    other = draw_partition(data, LabelShards(2), 50, seed=2).owner
    again = np.bincount(data.y_train.numpy() * 50 + other, minlength=500).reshape(10, 50)
    assert not np.array_equal(counts, again), "which classes a worker has is drawn"


def test_a_shards_samples_are_drawn_from_its_class(toy: Make) -> None:
    """Files are often in some order: by user, by time."""
    owner = draw_partition(toy([100], [10]), LabelShards(1), 4, seed=1).owner
    for worker in range(4):
        assert (np.diff(np.flatnonzero(owner == worker)) > 1).any()


def test_natural_gives_every_user_its_own_worker(toy: Make) -> None:
    data = toy([20] * 3, [5] * 3, users=6)
    assert data.user_train is not None and data.user_test is not None
    partition = draw_partition(data, Natural(), 6, seed=1)
    assert partition.owner.tolist() == data.user_train.tolist()
    assert partition.notes == ()
    grouped = draw_partition(data, Natural(), 4, seed=1)
    for user in range(6):
        assert len(set(grouped.owner[data.user_train.numpy() == user])) == 1
    assert "6 users of toy were grouped into 4 workers" in grouped.notes[0]


def test_without_users_one_worker_has_all_samples(toy: Make) -> None:
    drawn = draw_partition(toy([5, 5], [2, 2]), Natural(), 1, 1)
    assert drawn.owner.tolist() == [0] * 10 and drawn.share.tolist() == [[1]]


def test_splits_that_the_data_cannot_serve(toy: Make, regression: Dataset) -> None:
    data = toy([5, 5], [2, 2])
    with pytest.raises(UserError, match="11 workers for the 10 train samples of toy: ask for at most 10"):
        draw_partition(data, Iid(), 11, 1)
    with pytest.raises(UserError, match="shards:3 needs 12 train samples for 4 workers, but toy has 11"):
        draw_partition(toy([5, 6], [2, 2]), LabelShards(3), 4, 1)
    with pytest.raises(UserError, match="natural needs a data set with users, but toy has none"):
        draw_partition(data, Natural(), 2, 1)
    with pytest.raises(UserError, match="4 workers for the 3 users of toy"):
        draw_partition(toy([5, 5], [2, 2], users=3), Natural(), 4, 1)
    with pytest.raises(UserError, match=r"4 workers for the 1 user of toy: ask for --workers 1\.$"):
        draw_partition(toy([5, 5], [2, 2], users=1), Natural(), 4, 1)
    for split in (Dirichlet(0.3), LabelShards(1)):
        with pytest.raises(
            UserError, match=r"needs classes, but line has float targets: give whole numbers .* a --loss"
        ):
            draw_partition(regression, split, 2, 1)


@given(
    share=hnp.arrays(float, st.tuples(st.integers(1, 4), st.integers(1, 30)), elements=st.floats(0, 1)),
    total=st.integers(0, 1000),
)
def test_largest_remainder_sums_up_and_stays_within_one(share: np.ndarray, total: int) -> None:
    share = np.divide(
        share, share.sum(1, keepdims=True), out=np.zeros_like(share), where=share.sum(1, keepdims=True) > 0
    )
    counts = largest_remainder(share, np.full(len(share), total))
    assert np.array_equal(counts.sum(1), np.where(share.any(1), total, 0))
    assert np.abs(counts - share * total * share.any(1, keepdims=True)).max() <= 1 + 1e-6
    assert counts[share == 0].sum() == 0
    rest = share * total - counts
    for row, given_more in zip(rest, counts > share * total, strict=True):
        if given_more.any() and (~given_more).any():
            assert row[given_more].min() >= row[~given_more].max() - 1 - 1e-6


def test_by_owner_keeps_rows_in_order_and_drops_the_unowned() -> None:
    entries = by_owner(np.array([1, NOBODY, 0, 1, 2, NOBODY, 0]), 4)
    assert entries.rows.tolist() == [2, 6, 0, 3, 4]
    assert entries.sizes.tolist() == [2, 2, 1, 0]
    assert entries.rows.dtype == np.int64
