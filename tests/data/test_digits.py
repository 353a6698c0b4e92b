import torch

from manyheads.data import load


def test_the_whole_data_set_is_inside_the_package() -> None:
    data = load("digits")
    assert data.x_train.shape == (1438, 1, 8, 8)
    assert data.x_test.shape == (359, 1, 8, 8)
    assert data.x_train.dtype == torch.float32 and data.y_train.dtype == torch.int64
    assert data.x_train.min() == 0 and data.x_train.max() == 1
    counts = torch.bincount(data.y_train) + torch.bincount(data.y_test)
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_the_test_part_is_a_fifth_of_every_class() -> None:
    data = load("digits")
    part = torch.bincount(data.y_test) / (torch.bincount(data.y_train) + torch.bincount(data.y_test))
    assert ((part - 0.2).abs() < 0.01).all()


def test_pixels_and_split_stay_as_they_are() -> None:
    # A changed test part would make every published number incomparable.
    assert load("digits").digest() == "9f00bf822a4d471c88deeef95d44581a8d939c82a922221e91be1fe44c786528"
