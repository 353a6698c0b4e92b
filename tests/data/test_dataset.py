from dataclasses import replace

import pytest
import torch

from manyheads.data.dataset import Dataset, standardise
from manyheads.errors import UserError


def good() -> Dataset:
    x, y = torch.rand(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])
    return Dataset("good", x, y, x[:3], y[:3], 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_train": torch.tensor([[0.0, 1.0]] * 5 + [[0.0, torch.nan]])}, "train part of x holds NaN, .*sample 5"),
        ({"x_test": torch.full((3, 2), torch.inf)}, "test part of x holds NaN, infinite"),
        (
            {"y_train": torch.tensor([0, 1, 2, 0, 1, 3])},
            "train part has label 3, but num_classes is 3: give at least 4",
        ),
        ({"y_test": torch.tensor([0, -1, 2])}, "test part has label -1"),
        ({"y_train": torch.tensor([0, 1])}, "6 samples but 2 targets"),
        ({"user_test": torch.tensor([0])}, "3 samples but 1 user"),
        ({"x_train": torch.empty(0, 2), "y_train": torch.empty(0, dtype=torch.int64)}, "train part is empty"),
        ({"x_test": torch.rand(3, 4)}, r"\[2\] for training and \[4\] for test"),
        ({"classes": ("a", "b")}, "2 class names for 3 classes"),
    ],
)
def test_wrong_data_are_refused_and_the_source_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=f"^some/file.npz.*{message}"):
        replace(good(), **change, source="some/file.npz")


def test_large_finite_numbers_pass() -> None:
    x = torch.full((6, 2), 3e38)
    assert replace(good(), x_train=x).x_train.equal(x)


def test_regression_targets_must_be_finite() -> None:
    x = torch.rand(3, 2)
    Dataset("line", x, x.sum(1), x, x, None)
    with pytest.raises(UserError, match=r"part of y holds NaN"):
        Dataset("line", x, torch.tensor([0.0, torch.nan, 1.0]), x, x.sum(1), None)


def test_digest_tells_contents_apart() -> None:
    data = good()
    assert data.digest() == replace(data, name="other").digest()
    changed = data.x_test.clone()
    changed[0, 0] += 1
    others = [
        replace(data, x_test=changed),
        replace(data, y_train=data.y_train.flip(0)),
        replace(data, user_train=torch.zeros(6, dtype=torch.int64)),
        replace(data, user_test=torch.zeros(3, dtype=torch.int64)),
        # Classes that nobody has a sample of: the net has an output for each.
        replace(data, num_classes=7),
        replace(data, num_classes=8),
    ]
    assert len({data.digest(), *(other.digest() for other in others)}) == 7


def test_standardise_uses_the_train_part_alone() -> None:
    train = torch.randn(50, 12) * 3 + 5
    train.view(50, 4, 3)[:, :, 2] = 7.0
    train_scaled, test_scaled = standardise(train, train[:5] + 1, 3)
    by_channel = train_scaled.view(-1, 3)
    assert torch.allclose(by_channel.mean(0), torch.zeros(3), atol=1e-5)
    assert torch.allclose(by_channel.std(0, correction=0), torch.tensor([1.0, 1.0, 0.0]), atol=1e-5)
    shift = (test_scaled - train_scaled[:5]).view(-1, 3)
    std = train.view(-1, 3).std(0, correction=0)
    assert torch.allclose(shift[:, :2], (1 / std[:2]).expand_as(shift[:, :2]), atol=1e-4)
    assert torch.equal(shift[:, 2], torch.ones(20)), "a channel that never changes keeps its scale"
    assert train_scaled.dtype == torch.float32


def test_standardise_is_exact_far_from_zero() -> None:
    train = torch.randn(2000, 3) + 1e5
    scaled, _ = standardise(train, train, 3)
    assert torch.allclose(scaled.double().mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-6)
