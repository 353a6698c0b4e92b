from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from manyheads.data import arrays, load
from manyheads.errors import UserError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 4))
Y = np.arange(50) % 5


def save(folder: Path, **content: object) -> Path:
    path = folder / "mine.npz"
    np.savez(path, **content)  # pyright: ignore[reportArgumentType]
    return path


def test_masked_values_are_refused() -> None:
    x = np.ma.masked_array(np.ones((4, 2)), mask=False)
    assert len(arrays.from_arrays(x, [0, 1, 0, 1], x, [0, 1, 0, 1]).x_train) == 4, "nothing is masked"
    x[1, 1] = np.ma.masked
    y = [0, 1, 0, 1]
    told = "values are masked, but all are used: give arrays without masks, or fill them.$"
    with pytest.raises(UserError, match=f"^arrays: {told}"):
        arrays.from_arrays(x, y, x, y)
    for rows in (x, list(x)):
        with pytest.raises(UserError, match=f"^arrays: worker 0: {told}"):
            arrays.from_workers([(rows, y)])

    class Masked(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
            return x[index], y[index]

    with pytest.raises(UserError, match=f"^arrays: worker 0: {told}"):
        arrays.from_workers([Masked()])


@pytest.mark.parametrize("kind", ["U", "S"])
def test_npz_with_split_and_users(tmp_path: Path, kind: str) -> None:
    split = np.where(np.arange(50) < 40, "train", "test").astype(kind)
    user = np.array(["eve", "bob"])[np.arange(50) % 2]
    data = load(save(tmp_path, x=X, y=Y, user=user, split=split))
    assert np.allclose(data.x_train.numpy(), X[:40]) and np.allclose(data.x_test.numpy(), X[40:])
    assert data.x_train.dtype == torch.float32 and data.y_train.dtype == torch.int64
    assert data.num_classes == 5
    assert data.user_train is not None and data.user_train.tolist() == [1, 0] * 20
    assert data.users == ("bob", "eve")
    assert data.name == str(tmp_path / "mine.npz")


def test_without_a_split_a_fifth_of_each_class_is_for_test(tmp_path: Path) -> None:
    data = load(str(save(tmp_path, x=X, y=Y)))
    assert torch.bincount(data.y_test).tolist() == [2] * 5
    assert torch.equal(data.x_test, load(tmp_path / "mine.npz").x_test)


def test_bytes_are_pixels_and_floats_are_targets(tmp_path: Path) -> None:
    images = RNG.integers(0, 256, (50, 1, 4, 4), np.uint8)
    data = load(save(tmp_path, x=images, y=Y.astype(np.float64)))
    assert data.num_classes is None and data.y_train.dtype == torch.float32
    pool = torch.cat([data.x_train, data.x_test])
    assert torch.isclose(pool.sum(), torch.from_numpy(images / 255).sum().float())


def test_npz_with_a_test_part_is_what_the_same_arrays_are_in_memory(tmp_path: Path) -> None:
    content = {"x": X[:40], "y": Y[:40], "x_test": X[40:], "y_test": Y[40:], "user": Y[:40], "user_test": Y[40:]}
    file, memory = load(save(tmp_path, **content)), arrays.from_arrays(**content)
    assert np.allclose(file.x_train.numpy(), X[:40]) and np.allclose(file.x_test.numpy(), X[40:])
    assert file.digest() == memory.digest() and not file.notes


def test_arrays_that_nobody_reads_are_noted(tmp_path: Path) -> None:
    data = load(save(tmp_path, x=X, y=Y, users=Y, **{"cl\x1basses": list("abcde")}))
    (note,) = data.notes
    assert note.startswith(f"{tmp_path / 'mine.npz'}: not read: users, cl?asses; an npz can have x, y, x_test, ")
    assert data.user_train is None


@pytest.mark.parametrize("kind", [np.float32, np.int64])
def test_images_that_look_like_bytes_but_are_not_scaled_are_noted(tmp_path: Path, kind: type) -> None:
    images = RNG.integers(0, 256, (50, 3, 4, 4), np.uint8)
    (note,) = load(save(tmp_path, x=images.astype(kind), y=Y)).notes
    assert note.endswith(
        f"x looks like bytes but is {np.dtype(kind)}, which is not scaled: give x.astype('uint8') or x / 255"
    )
    assert arrays.from_arrays(images.astype(kind), Y).notes == (note.replace(str(tmp_path / "mine.npz"), "arrays"),)


@pytest.mark.parametrize("x", ["bytes", "scaled", "standardised", "far beyond", "a table", "of sixteen shades"])
def test_other_inputs_are_not_taken_for_unscaled_bytes(x: str) -> None:
    images = RNG.integers(0, 256, (50, 3, 4, 4), np.uint8)
    given = {
        "bytes": images,
        "scaled": images / 255,
        "standardised": images - 128.0,
        "far beyond": images * 10.0,
        "a table": images.reshape(50, -1).astype(float),
        "of sixteen shades": images.astype(float) // 16,
    }
    assert "looks like bytes" not in "".join(arrays.from_arrays(given[x], Y).notes)


@pytest.mark.parametrize(
    ("x", "told"),
    [
        (2000 + 600 * np.sign(X), "mean 2000 and deviation 600"),
        (1e-5 * np.ones((50, 4)), "mean 1e-05 and deviation 0"),
        (np.full((50, 4), 50.0), "mean 50 and deviation 0"),
        (np.c_[X, 90 + X], "mean 45 and deviation 45"),
    ],
    ids=["in units of their own", "in small units", "constant", "one of several columns"],
)
def test_measurements_far_from_one_are_noted_once(tmp_path: Path, x: np.ndarray, told: str) -> None:
    torch_set = TensorDataset(torch.tensor(x), torch.tensor(Y))
    for data in (load(save(tmp_path, x=x, y=Y)), arrays.from_arrays(x, Y), arrays.from_workers([(x, Y), torch_set])):
        (note,) = data.notes
        assert note.startswith(f"{data.name}: x has {told}")
        assert note.endswith(": standardise its columns, (x - x.mean(0)) / (x.std(0) + 1e-6), or little is learned")


@pytest.mark.parametrize(
    "x",
    [9 * X, 0.02 * X, (2000 + 600 * X).astype(int), RNG.integers(0, 256, (50, 4), np.uint8), X > 0],
    ids=["a little large", "a little small", "whole numbers", "bytes", "bits"],
)
def test_inputs_near_one_and_numbers_that_may_name_words_are_not_noted(x: np.ndarray) -> None:
    assert not arrays.from_arrays(x, Y).notes
    assert not arrays.from_workers([(x, Y), (x.tolist(), Y) if x.dtype == int else (x, Y)]).notes


def test_the_scale_that_counts_is_that_of_the_train_samples() -> None:
    assert not arrays.from_arrays(X, Y, 100 * X, Y).notes
    assert arrays.from_arrays(100 * X, Y, X, Y).notes


@pytest.mark.parametrize("kind", [np.float64, np.int64])
def test_columns_that_float32_makes_the_same_are_noted(tmp_path: Path, kind: type) -> None:
    x = (9 * X).astype(kind)
    offset = np.array([0, 1e10, 1e10, 0], kind)
    noted = "2 of 4 columns of x vary too little for float32, in which samples are kept: centre and scale them first"
    for data in (load(save(tmp_path, x=x + offset, y=Y)), arrays.from_arrays(x + offset, Y)):
        assert data.notes == (f"{data.name}: {noted}",)
    assert not arrays.from_arrays(x, Y).notes


def test_bits_are_numbers_that_vary_enough() -> None:
    assert not arrays.from_arrays(X > 0, Y).notes


def test_columns_of_one_number_but_for_rounding_are_not_noted() -> None:
    x = X.copy()
    x[:, 0], x[:, 1], x[:, 2] = -7, 7, np.where(Y > 2, 0.3, 0.1 + 0.2)
    assert len(np.unique(x[:, 2])) == 2 and not arrays.from_arrays(x, Y).notes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"x": X}, "lacks y"),
        ({"y": Y}, "lacks x"),
        ({"x": X, "y": Y[:7]}, "50 samples but 7 targets"),
        ({"x": np.full((50, 4), np.nan), "y": Y}, "holds NaN"),
        ({"x": np.where(np.arange(50)[:, None] < 7, X, np.nan), "y": Y}, "holds NaN.*first in sample 7"),
        ({"x": X, "y": np.where(np.arange(50) < 7, 0.5, np.nan)}, ": y holds NaN.*first in sample 7"),
        ({"x": np.full((50, 4), 1e200), "y": Y}, "or too large numbers .first in sample 0"),
        ({"x": X, "y": Y - 1}, "has label -1"),
        ({"x": X, "y": Y * 1000}, "label 4000 in 50 samples"),
        ({"x": X, "y": Y[:, None]}, r"y is int64 \[50, 1\]"),
        ({"x": X, "y": np.zeros((50, 0))}, r"y is float64 \[50, 0\]: give whole numbers"),
        ({"x": X[:, 0], "y": Y}, r"x is float64 \[50\]: give numbers \[samples, features\], such as x\[:, None\]\."),
        ({"x": X.astype(str), "y": Y}, "x is <U"),
        ({"x": X.astype(complex), "y": Y}, r"x is complex.*: give numbers \[samples, \.\.\.\]\."),
        ({"x": X, "y": Y, "user": np.arange(3)}, "user is int64"),
        ({"x": X, "y": Y, "user": Y / 2}, r"user is float64 \[50\]: give one whole number or name for each sample"),
        ({"x": X, "y": Y, "split": np.full(50, "val")}, "split must say 'train' or 'test'"),
        ({"x": X, "y": Y, "split": np.full(50, b"\xff")}, "split must say 'train' or 'test'"),
        ({"x": X, "y": Y, "split": np.full(7, "train")}, "split must say .* once for each of the 50 samples"),
        ({"x": X, "y": Y, "split": np.zeros(50, int)}, "split must say 'train' or 'test'"),
        ({"x": X, "y": Y, "split": np.full(50, "train")}, "test part is empty"),
        ({"x": X, "y": Y, "x_test": X, "split": Y}, r"has split, and a test part .* beside it: leave one out\."),
        ({"x": X, "y": Y, "x_test": X}, "the test part lacks y"),
        ({"x": X, "y": Y, "user_test": Y}, "the test part lacks x"),
        ({"x": X, "y": Y, "x_test": X[:, :2], "y_test": Y}, r"samples are \[4\] for training and \[2\] for test"),
        ({"x": X, "y": Y, "x_test": X, "y_test": Y, "user_test": Y}, "names users in one part only"),
        (
            {"x": X, "y": Y, "x_test": X, "y_test": Y, "user": Y, "user_test": Y[:, None]},
            r"user_test is int64 \[50, 1\]: give one",
        ),
        (
            {"x": X, "y": np.array([object()] * 50)},
            r"y is an array of Python objects: give y\.astype\(int\), or turn words into numbers with numpy\.unique",
        ),
        ({"x": X, "y": Y, "user": Y.astype(object)}, r"user is an .* objects: give user\.astype\(str\)\.$"),
        (
            {"x": X, "y": Y, "x_test": X.astype(object), "y_test": Y},
            r"x_test is an .* objects: give x_test\.astype\(float\)\.$",
        ),
        ({"x": X[:0], "y": Y[:0]}, "train part is empty"),
    ],
)
def test_a_wrong_npz_is_refused_by_name(tmp_path: Path, content: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=rf"mine\.npz.*{message}") as caught:
        load(save(tmp_path, **content))
    assert "\n" not in str(caught.value)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=80),
)
def test_hold_out_takes_a_fifth_of_every_user_and_class(samples: list[tuple[int, int]]) -> None:
    user, y = (torch.tensor(column) for column in zip(*samples, strict=True))
    test = arrays.hold_out(y, user)
    for one in user.unique():
        own = user == one
        assert int(test[own].sum()) == (int(own.sum()) + 2) // 5
        for label in y.unique():
            both = own & (y == label)
            assert abs(int(test[both].sum()) - int(both.sum()) / 5) < 1
    assert torch.equal(test, arrays.hold_out(y, user))


def test_hold_out_covers_the_range_of_a_regression() -> None:
    y = torch.rand(500, 2, generator=torch.Generator().manual_seed(0))
    test = arrays.hold_out(y)
    assert torch.equal(y[test, 0].sort().values, y[:, 0].sort().values[2::5])


def test_arrays_in_memory() -> None:
    data = arrays.from_arrays(torch.tensor(X), Y.tolist(), X[:10], Y[:10], user=Y, user_test=Y[:10], num_classes=7)
    assert data.num_classes == 7
    assert len(data.x_train) == 50 and len(data.x_test) == 10
    assert data.user_test is not None and data.user_test.tolist() == Y[:10].tolist()
    assert len(arrays.from_arrays(X, Y).x_test) == 10
    data = arrays.from_arrays(X[:2], Y[:2], X[2:4], Y[2:4], user=["bob", "eve"], user_test=["eve", "ann"])
    assert data.user_train is not None and data.user_train.tolist() == [1, 2]
    assert data.user_test is not None and data.user_test.tolist() == [2, 0], "one name is one user in both parts"
    assert data.users == ("ann", "bob", "eve")
    data = arrays.from_arrays(X[:3], [0, 1, 0], X[:3], [0, 1, 0], user=[10, 9, 10], user_test=[9, 9, 9])
    assert data.user_train is not None and [data.named(user) for user in data.user_train.tolist()] == ["10", "9", "10"]
    for train, test in (([0, 1], [2, 0]), ([2, 0], [0, 1])):
        assert arrays.from_arrays(X[:2], train, X[2:4], test).num_classes == 3


def test_numpys_number_of_classes_becomes_one_that_json_can_hold() -> None:
    assert type(arrays.from_arrays(X, Y, num_classes=np.max(Y) + 1).num_classes) is int  # pyright: ignore[reportArgumentType]


def test_arrays_in_memory_are_copied() -> None:
    x = X.astype(np.float32)
    data = arrays.from_arrays(x, Y, x, Y)
    x[:] = 0
    assert data.x_train.abs().sum() > 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x_test": X}, "the test part lacks y: give both"),
        ({"y_test": Y}, "the test part lacks x: give both"),
        ({"x_test": X, "y_test": Y / 2}, "int64 for training and torch.float32 for test"),
        ({"x_test": X.astype(np.uint8), "y_test": Y}, "x is torch.float32 for training and torch.uint8 for test"),
        ({"x_test": X, "y_test": Y, "user": Y}, "names users in one part only"),
        ({"user": Y.astype(object)}, r"user is an array of Python objects: give user\.astype\(str\)\.$"),
        ({"x_test": X.astype(object), "y_test": Y}, r"the test part: x is an .* objects: give x\.astype\(float\)\.$"),
        ({"num_classes": 3}, "has label 4, but num_classes is 3: give at least 5"),
        ({"num_classes": 5.0}, r"num_classes is 5\.0: give one whole number from 1 to 1,000,000"),
        ({"num_classes": "5"}, "num_classes is 5: give one whole number"),
    ],
)
def test_wrong_arrays_in_memory(given: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        arrays.from_arrays(X, Y, **given)  # pyright: ignore[reportArgumentType]


def test_ragged_lists_and_classes_of_a_regression() -> None:
    tracked = [torch.ones(2, requires_grad=True)] * 2
    for x, y, user in (
        ([[1.0], [1.0, 2.0]], [0, 1], None),
        (tracked, [0, 1], None),
        (X[:2], [0, 1], [[1], [1, 2]]),
    ):
        with pytest.raises(UserError, match=r"arrays: (x|user) is not an array \(.*\): give rows of one shape\.$"):
            arrays.from_arrays(x, y, user=user)
    with pytest.raises(UserError, match=r"float targets mean a regression"):
        arrays.from_arrays(X, Y / 2, num_classes=5)


def test_one_part_per_worker() -> None:
    torch_set = TensorDataset(torch.ones(7, 4), torch.ones(7, dtype=torch.int64))
    data = arrays.from_workers([(X, Y), (X[:5], Y[:5], X[:2], Y[:2]), torch_set, (torch_set, torch_set)])
    assert data.user_train is not None and data.user_test is not None
    assert torch.bincount(data.user_train).tolist() == [40, 5, 6, 7]
    assert torch.bincount(data.user_test).tolist() == [10, 2, 1, 7]
    assert data.num_classes == 5
    assert torch.equal(data.x_train[data.user_train == 3], torch.ones(7, 4))


def test_a_worker_whose_test_dataset_is_empty():
    """As one that has nothing to be tested on; in arrays the shape is still known."""
    none = TensorDataset(torch.ones(0, 4), torch.ones(0, dtype=torch.int64))
    torch_set = TensorDataset(torch.ones(7, 4), torch.ones(7, dtype=torch.int64))
    for empty in ((torch_set, none), (X, Y, none)):
        data = arrays.from_workers([(torch_set, torch_set), empty])
        assert data.user_test is not None and data.user_test.tolist() == [0] * 7
        assert len(data.x_train) == 7 + len(empty[0])


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield from zip(X, Y, strict=True)


class InWords(Dataset):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"x": X[index], "y": Y[index]}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "no worker has data"),
        ([(X, Y), (X[:, :2], Y)], r"worker 1 has .* samples \[2\] with torch.int64 targets \[\], .* samples \[4\]"),
        ([(X, Y), (X, Y / 2)], "worker 1 has .* torch.float32 targets"),
        ([(X, X), (X, X[:, :2])], r"worker 1 has .* targets \[2\], worker 0 .* targets \[4\]"),
        ([(X, Y), (X.astype(np.uint8), Y)], "worker 1 has torch.uint8 samples .*, worker 0 has torch.float32 samples"),
        ([(X, Y, X.astype(np.uint8), Y)], "worker 0 has torch.uint8 samples"),
        ([(X, Y), (X[:0], Y[:0])], "worker 1 has no train sample"),
        ([(X, Y, X)], "worker 0 has 3 arrays"),
        ([(X, Y), (X, Y[:3])], "worker 1 has 50 samples but 3 targets"),
        ([(X, Y), TensorDataset(torch.ones(7, 4))], r"worker 1 cannot be read \(.*\): give a Dataset with a length"),
        ([InWords()], r"worker 0 cannot be read \(a sample is a dict\): give a Dataset .*, whose samples are \(x, y\)"),
        ([(X, Y), TensorDataset(torch.ones(0, 4), torch.ones(0))], "worker 1 has no train sample: give it one"),
        ([Stream()], r"worker 0 cannot be read \(.*\): give a Dataset with a length"),
    ],
)
def test_a_wrong_worker_is_named(parts: list[arrays.WorkerPart], message: str) -> None:
    with pytest.raises(UserError, match=message):
        arrays.from_workers(parts)


def test_an_npz_may_say_how_many_classes_there_are(tmp_path: Path) -> None:
    assert load(save(tmp_path, x=X, y=Y, num_classes=9)).num_classes == 9
    with pytest.raises(UserError, match=r"mine\.npz.* label 4, but num_classes is 3: give at least 5\."):
        load(save(tmp_path, x=X, y=Y, num_classes=3))
    for wrong in (0, 2.5, [5], 2**63 - 1, np.uint64(2**64 - 1)):
        with pytest.raises(UserError, match=r"mine\.npz: num_classes is .*: give one whole number from 1 to 1,000,000"):
            load(save(tmp_path, x=X, y=Y, num_classes=wrong))


def test_split_is_made_of_plain_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="split must say 'train' or 'test'"):
        load(save(tmp_path, x=X, y=Y, split=np.zeros(50, dtype=[("part", "U5")])))


def test_labels_of_another_kind_are_told_what_to_become() -> None:
    x = np.zeros((4, 2))
    for y, says in (
        (np.array(list("abab")), "turn words into numbers with numpy.unique"),
        # As a column of words is that comes from pandas.
        (np.array(list("abab"), dtype=object), "turn words into numbers with numpy.unique"),
        (np.eye(4, dtype=int), r"turn one-hot rows into classes with y\.argmax\(1\)"),
        (np.eye(4) > 0, r"turn one-hot rows into classes with y\.argmax\(1\)"),
        (np.array([[0], [1], [1], [1]]), r"take its only column, y\[:, 0\]"),
        (np.ones((4, 3), dtype=int), "in Python, floats"),
    ):
        with pytest.raises(UserError, match=says):
            arrays.from_arrays(x, y)
