from pathlib import Path

import numpy as np
import pytest
import torch

from manyheads.data import harbox
from manyheads.errors import UserError


def record(path: Path, num_windows: int, *, start: float = 0.0) -> None:
    """The published format: windows of 100 rows that overlap by half; channel c holds c + 1 times the sample number."""
    samples = start + np.arange(50 * (num_windows + 1))
    stream = np.column_stack([1.6e12 + 20 * samples, *[samples * (1 + channel) for channel in range(9)]])
    rows = np.concatenate([stream[50 * k : 50 * k + 100] for k in range(num_windows)])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savetxt(path, rows)


def root(tmp_path: Path) -> Path:
    return tmp_path / "large_scale_HARBox"


def test_layout_labels_and_users(tmp_path: Path) -> None:
    record(root(tmp_path) / "1" / "Call_train.txt", 10)
    record(root(tmp_path) / "1" / "Wave_train.txt", 5)
    record(root(tmp_path) / "10" / "typing_train.txt", 10, start=7)
    record(root(tmp_path) / "2" / "Hop_train.txt", 2)
    (root(tmp_path) / "readme").mkdir()
    data = harbox.load(tmp_path, standardised=False)
    assert data.user_train is not None and data.user_test is not None
    assert list(zip(data.user_train.tolist(), data.y_train.tolist(), strict=True)) == (
        [(1, 0)] * 7 + [(1, 4)] * 3 + [(2, 1)] * 2 + [(10, 2)] * 7
    )
    assert (
        list(zip(data.user_test.tolist(), data.y_test.tolist(), strict=True)) == [(1, 0)] * 2 + [(1, 4)] + [(10, 2)] * 2
    )
    first = data.x_train[0].view(100, 9)
    assert torch.equal(first[:, 0], torch.arange(100.0))
    assert torch.equal(first[:, 8], torch.arange(100.0) * 9)


@pytest.mark.parametrize("num_windows", [3, 4, 5, 12, 33])
def test_no_sample_is_in_both_parts(tmp_path: Path, num_windows: int) -> None:
    record(root(tmp_path) / "1" / "Walk_train.txt", num_windows)
    data = harbox.load(root(tmp_path), standardised=False)
    train, test = (x.view(-1, 100, 9)[:, :, 0] for x in (data.x_train, data.x_test))
    assert train.max() < test.min()
    assert len(train) + len(test) == num_windows - 1
    assert len(test) == max(1, round(num_windows / 5))


def test_windows_are_put_in_the_order_of_time(tmp_path: Path) -> None:
    path = root(tmp_path) / "1" / "Walk_train.txt"
    record(path, 5)
    rows = np.loadtxt(path).reshape(5, 100, 10)
    np.savetxt(path, rows[[3, 0, 4, 2, 1]].reshape(-1, 10))
    assert harbox.read_windows(path)[:, 0].tolist() == [0, 50, 100, 150, 200]


def test_users_that_repeat_another_are_left_out(tmp_path: Path) -> None:
    for user, start in (("1", 0), ("2", 5), ("117", 0)):
        record(root(tmp_path) / user / "Call_train.txt", 5, start=start)
    data = harbox.load(tmp_path)
    assert data.user_train is not None
    assert data.user_train.unique().tolist() == [1, 2]


def test_channels_are_standardised_on_the_train_part(tmp_path: Path) -> None:
    record(root(tmp_path) / "1" / "Call_train.txt", 20)
    by_channel = harbox.load(tmp_path).x_train.view(-1, 9)
    assert torch.allclose(by_channel.mean(0), torch.zeros(9), atol=1e-5)
    assert torch.allclose(by_channel.std(0, correction=0), torch.ones(9), atol=1e-5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "0 rows of 0 numbers"),
        ("1 2 3\n" * 100, "100 rows of 3 numbers"),
        ("1 2 3 4 5 6 7 8 9 10\n" * 99, "99 rows of 10 numbers"),
        ("1 2 3 4 5 6 7 8 9 10\n" * 99 + "1 2 3 4 5 6 7 8 9 nan\n", "NaN or infinite"),
        ("1 2 3 4 5 6 7 8 9 10\n" * 99 + "1 2 3\n", "cannot be read as numbers"),
        ("<html>\n" * 100, "cannot be read as numbers"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = root(tmp_path) / "1" / "Hop_train.txt"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(UserError, match=f"Hop_train.txt.*{message}"):
        harbox.load(tmp_path)


def test_one_line_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"user folders.*into {root(tmp_path)}"):
        harbox.load(tmp_path)


def test_too_little_for_a_test_part(tmp_path: Path) -> None:
    record(root(tmp_path) / "1" / "Hop_train.txt", 2)
    with pytest.raises(UserError, match=r"no activity with three windows"):
        harbox.load(tmp_path)
