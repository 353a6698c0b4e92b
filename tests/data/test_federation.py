import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from manyheads.data import Dataset, Federation, Shards, arrays, federate, load
from manyheads.data.federation import (
    describe,
    mean_floor,
    saved_data_digest,
    saved_other_partition,
    saved_with_other_data,
)
from manyheads.errors import UserError
from manyheads.files import write_tensors
from manyheads.tree import fingerprint

Make = Callable[..., Dataset]


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("digits")


def entries(shards: Shards) -> list[list[int]]:
    return [shards.index[shards.rows(worker)].tolist() for worker in range(shards.num_workers)]


def test_shards_hold_the_targets_of_their_samples(digits: Dataset) -> None:
    federation = federate(digits, workers=16, split="dirichlet:0.3", validation=0.1, seed=1)
    assert federation.ids == tuple(range(16))
    assert federation.input_shape == (1, 8, 8) and federation.num_classes == 10
    for shards, y in (
        (federation.train, digits.y_train),
        (federation.validation, digits.y_train),
        (federation.test, digits.y_test),
    ):
        assert torch.equal(shards.y, y[shards.index])
        assert shards.index.dtype == torch.int64
    assert federation.train.x is federation.validation.x is digits.x_train
    assert federation.test.x is digits.x_test
    held = torch.cat([federation.train.index, federation.validation.index])
    assert sorted(held.tolist()) == list(range(len(digits.x_train)))


def test_a_split_is_a_function_of_the_seed(digits: Dataset, lab: SimpleNamespace) -> None:
    def make(seed: int, **more: bool) -> Federation:
        return federate(digits, workers=8, split="dirichlet:0.3", validation=0.2, seed=seed, **more)

    assert lab.held(make(1)) == lab.held(make(1))
    assert len({lab.held(make(1)), lab.held(make(2)), lab.held(make(1, relabel=True))}) == 3


@pytest.mark.parametrize(
    ("part", "leaf", "options"),
    [
        ("train", "index", {"split": "iid"}),
        ("test", "index", {"split": "iid"}),
        ("test", "index", {"split": "iid", "test_split": "overlap"}),
        ("validation", "index", {"split": "natural", "validation": 0.3}),
        ("train", "y", {"split": "natural", "relabel": True}),
    ],
)
def test_each_draw_is_another_with_another_seed(toy: Make, part: str, leaf: str, options: dict[str, Any]) -> None:
    """Else the deviation over seeds would leave it out."""
    data = toy([40] * 3, [20] * 3, users=4)
    one, same, other = (getattr(federate(data, workers=4, seed=seed, **options), part) for seed in (3, 3, 4))
    assert torch.equal(getattr(one, leaf), getattr(same, leaf))
    assert not torch.equal(getattr(one, leaf), getattr(other, leaf))


@given(part=st.floats(0, 0.999), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5), seed=st.integers(0, 3))
def test_validation_leaves_everyone_a_train_sample(part: float, sizes: list[int], seed: int) -> None:
    y = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    data = Dataset("toy", y.float()[:, None], y, y.float()[:, None], y, len(sizes), y, y)
    federation = federate(data, workers=len(sizes), split="natural", validation=part, seed=seed)
    for size, train, held in zip(sizes, federation.train.sizes, federation.validation.sizes, strict=True):
        assert train >= 1 and train + held == size
        assert held == min(int(part * size + 0.5), size - 1)


def test_validation_that_leaves_next_to_nothing_is_noted() -> None:
    data = arrays.from_workers([(torch.zeros(n, 2), torch.zeros(n)) * 2 for n in (1, 4, 9)])

    def notes(part: float) -> tuple[str, ...]:
        return federate(data, workers=3, split="natural", validation=part, seed=1).notes

    assert notes(0.7) == ("workers left with one train sample by validation 0.7: 1; hold out less",)
    assert notes(0.999) == ("workers left with one train sample by validation 0.999: 2; hold out less",)
    assert not notes(0.1), "who had no more than one is not emptied by it"


def test_validation_does_not_touch_the_test_split(digits: Dataset) -> None:
    plain, held = (federate(digits, workers=8, split="dirichlet:0.3", validation=v, seed=1) for v in (0.0, 0.3))
    assert entries(plain.test) == entries(held.test)
    assert plain.validation.sizes == (0,) * 8
    assert len(held.validation.index) > 0


def test_relabelling_is_one_permutation_per_worker(digits: Dataset) -> None:
    plain, renamed = (
        federate(digits, workers=8, split="iid", validation=0.2, relabel=relabel, seed=1) for relabel in (False, True)
    )
    permutations = []
    for worker in range(8):
        pairs = set()
        for part in ("train", "validation", "test"):
            before, after = getattr(plain, part), getattr(renamed, part)
            assert entries(before) == entries(after)
            rows = before.rows(worker)
            pairs |= set(zip(before.y[rows].tolist(), after.y[rows].tolist(), strict=True))
        names = dict(pairs)
        assert len(pairs) == len(names) == 10 and sorted(names.values()) == list(range(10))
        permutations.append(tuple(names[c] for c in range(10)))
    assert len(set(permutations)) == 8
    floors = [mean_floor(each.majority_floors()) for each in (plain, renamed)]
    assert floors[0] != 0 and floors[1] == pytest.approx(floors[0], abs=0.03)


def test_a_worker_names_the_classes_alike_in_every_split(toy: Make) -> None:
    """The permutation belongs to (seed, worker), whatever else is drawn."""
    data = toy([100, 100, 100], [30, 30, 30])
    few, many = (federate(data, workers=n, split="iid", relabel=True, seed=5) for n in (2, 4))
    names = [
        dict(
            zip(data.y_train[f.train.index[f.train.rows(1)]].tolist(), f.train.y[f.train.rows(1)].tolist(), strict=True)
        )
        for f in (few, many)
    ]
    assert names[0] == names[1]


def test_class_counts(digits: Dataset) -> None:
    federation = federate(digits, workers=8, split="dirichlet:0.3", relabel=True, seed=1)
    counts = federation.class_counts
    assert counts.shape == (8, 10) and counts.dtype == torch.int64
    assert counts.sum(1).tolist() == list(federation.train.sizes)
    assert counts[3].tolist() == torch.bincount(federation.train.y[federation.train.rows(3)], minlength=10).tolist()


def test_majority_floor_by_hand() -> None:
    x = torch.zeros(5, 1)
    train = Shards(x, torch.arange(5), torch.tensor([0, 0, 1, 1, 0]), (0, 3, 4, 5))
    test = Shards(x, torch.arange(5), torch.tensor([0, 0, 1, 1, 1]), (0, 4, 4, 5))
    empty = Shards(x, torch.arange(0), torch.arange(0), (0, 0, 0, 0))
    federation = Federation("hand", (0, 1, 2), train, empty, test, 2, (1,))
    assert mean_floor(federation.majority_floors()) == pytest.approx((0.5 + 0.0) / 2)
    own = replace(federation, test=replace(test, offsets=(0, 1, 4, 5)))
    assert mean_floor(own.majority_floors()) == pytest.approx((1 + 2 / 3 + 0) / 3), (
        "each worker's own most frequent class"
    )
    weighted = replace(federation, test=replace(test, weight=torch.tensor([3.0, 3.0, 1.0, 1.0, 1.0])))
    assert mean_floor(weighted.majority_floors()) == pytest.approx((0.75 + 0.0) / 2)
    assert mean_floor(federation.take([1]).majority_floors()) is None
    assert federation.take([1]).majority_floors().dtype == federation.majority_floors().dtype == torch.float64


@pytest.mark.parametrize("test_split", ["overlap", "reweighted"])
def test_other_test_splits_estimate_the_same_floor(digits: Dataset, test_split: str) -> None:
    shared, other = (
        mean_floor(federate(digits, workers=8, split="dirichlet:0.3", test_split=kind, seed=1).majority_floors())
        for kind in ("shared", test_split)
    )
    assert shared is not None and other == pytest.approx(shared, abs=0.05)


def test_take_moves_whole_workers(digits: Dataset, lab: SimpleNamespace) -> None:
    federation = federate(digits, workers=6, split="dirichlet:0.3", validation=0.2, seed=1)
    taken = federation.take([4, 1])
    assert taken.ids == (4, 1)
    assert entries(taken.train) == [entries(federation.train)[4], entries(federation.train)[1]]
    assert entries(taken.validation) == [entries(federation.validation)[4], entries(federation.validation)[1]]
    assert entries(taken.test)[1] == entries(federation.test)[1]
    assert torch.equal(taken.class_counts, federation.class_counts[[4, 1]])
    assert lab.held(taken) != lab.held(federation)
    assert lab.held(federation.take(range(6))) == lab.held(federation)
    assert taken.take([0]).ids == (4,), "whom a row belongs to, not where it stands"


@pytest.mark.parametrize("test_split", ["shared", "reweighted"])
def test_a_saved_partition_says_who_holds_what(digits: Dataset, tmp_path: Path, test_split: str) -> None:
    made = federate(
        digits, workers=6, split="dirichlet:0.3", test_split=test_split, relabel=True, validation=0.2, seed=1
    )
    made = made.take([2, 5])
    path = tmp_path / "partition.safetensors"
    made.save(path)
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["federation"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    assert about == {"content": None, "partition": fingerprint(made.indices())}
    assert not saved_other_partition(path, made) and saved_other_partition(path, made.take([0]))
    assert tensors["ids"].tolist() == [2, 5]
    for part, shards in (("train", made.train), ("validation", made.validation), ("test", made.test)):
        assert tuple(tensors[f"{part}.offsets"].tolist()) == shards.offsets
        assert torch.equal(tensors[f"{part}.index"], shards.index) and torch.equal(tensors[f"{part}.y"], shards.y)
        assert (f"{part}.weight" in tensors) == (shards.weight is not None)
    made.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("num_classes", [256, 257])
def test_every_class_has_a_name_of_its_own_in_a_saved_partition(toy: Make, num_classes: int) -> None:
    made = federate(toy([2] * num_classes, [1] * num_classes), workers=3, split="iid", seed=1)
    assert torch.equal(made.indices()["train.y"].long(), made.train.y)


def test_the_fingerprint_of_own_data_is_saved_with_them(digits: Dataset, tmp_path: Path) -> None:
    path = tmp_path / "partition.safetensors"
    assert saved_data_digest(path) is None
    made = federate(digits, workers=6, split="iid", seed=1)
    made.save(path)
    assert saved_data_digest(path) is None and not saved_with_other_data(path, "abc"), "nobody knows which they were"
    replace(made, data_digest="abc").save(path)
    assert saved_data_digest(path) == "abc"
    assert saved_with_other_data(path, "xyz") and not saved_with_other_data(path, "abc")
    write_tensors(path, made.indices(), {"federation": "[" * 100_000})
    assert saved_data_digest(path) is None
    path.write_bytes(path.read_bytes()[:50])
    assert saved_data_digest(path) is None


def test_workers_with_parts_of_their_own() -> None:
    parts = [(torch.full((10 + w, 2), float(w)), torch.arange(10 + w) % 3) for w in range(4)]
    federation = federate(arrays.from_workers(parts), workers=4, split="natural", seed=9)
    for worker in range(4):
        for shards in (federation.train, federation.test):
            assert set(shards.x[shards.index[shards.rows(worker)]].flatten().tolist()) == {float(worker)}
    assert [a + b for a, b in zip(federation.train.sizes, federation.test.sizes, strict=True)] == [10, 11, 12, 13]


def test_regression(regression: Dataset) -> None:
    federation = federate(regression, workers=3, split="iid", validation=0.1, seed=1)
    assert federation.class_counts is None
    assert federation.train.y.dtype == torch.float32
    assert federation.indices()["train.y"].dtype == torch.float32
    assert dict(describe(federation))["workers"] == "3"
    with pytest.raises(UserError, match="relabel needs classes"):
        federate(regression, workers=3, split="iid", relabel=True, seed=1)


def test_describe(toy: Make) -> None:
    federation = federate(toy([41, 39], [0, 20]), workers=2, split="shards:1", seed=1)
    lines = dict(describe(federation))
    assert lines["train samples per worker"] == "min 40, median 40, max 40"
    assert lines["test samples per worker"] == "min 0, median 10, max 20"
    assert lines["classes per worker"] == "mean 1.5 of 2"
    assert lines["majority share"].startswith("0.98") and lines["majority floor"].startswith("1.000")
    assert lines["workers without test samples"] == "1"
    assert "validation samples a worker" not in lines


def test_test_samples_nobody_trains_on_are_left_out_and_noted(toy: Make) -> None:
    federation = federate(toy([40, 0], [10, 7]), workers=2, split="dirichlet:0.5", seed=1)
    assert len(federation.test.index) == 10
    assert federation.notes == ("test samples of classes or users that no worker trains on were left out: 7",)
    assert ("note", federation.notes[0]) in describe(federation)


def test_a_part_of_the_workers_holds_out_and_names_classes_as_among_all() -> None:
    """What a worker draws is its id's, whoever is beside it."""
    parts = [(torch.randn(12 + worker, 3), torch.arange(12 + worker) % 4) for worker in range(5)]
    options = {"split": "natural", "relabel": True, "validation": 0.3, "seed": 3}
    whole = federate(arrays.from_workers(parts), workers=5, **options)
    part = federate(arrays.from_workers(parts[2:4]), workers=2, first=2, **options)
    assert part.ids == (2, 3)
    for mine, all_ in ((part.train, whole.train), (part.validation, whole.validation), (part.test, whole.test)):
        for row, worker in enumerate(part.ids):
            assert torch.equal(mine.x[mine.index[mine.rows(row)]], all_.x[all_.index[all_.rows(worker)]])
            assert torch.equal(mine.y[mine.rows(row)], all_.y[all_.rows(worker)])
