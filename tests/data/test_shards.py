from dataclasses import replace

import torch

from manyheads.data import Shards


def make() -> Shards:
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return Shards(
        torch.arange(5.0).view(5, 1), torch.tensor([4, 0, 2, 3]), torch.tensor([1, 0, 1, 1]), (0, 2, 2, 4), weight
    )


def test_sizes_and_rows() -> None:
    shards = make()
    assert shards.num_workers == 3
    assert shards.sizes == (2, 0, 2)
    assert shards.index[shards.rows(2)].tolist() == [2, 3]


def test_take_keeps_the_order_given_and_shares_the_pool() -> None:
    shards = make()
    taken = shards.take([2, 1, 0])
    assert taken.sizes == (2, 0, 2)
    assert taken.index.tolist() == [2, 3, 4, 0]
    assert taken.y.tolist() == [1, 1, 1, 0]
    assert taken.weight is not None and taken.weight.tolist() == [3, 4, 1, 2]
    assert taken.x is shards.x
    assert shards.take([]).sizes == ()


def test_targets_that_are_numbers_and_samples_without_weights() -> None:
    plain = replace(make(), y=torch.rand(4), weight=None)
    moved = plain.take([2, 0]).to("cpu", torch.float64)
    assert moved.weight is None
    assert torch.equal(moved.y, plain.y[[2, 3, 0, 1]].double())


def test_to_changes_floats_only() -> None:
    moved = make().to("cpu", torch.float64)
    assert moved.x.dtype == torch.float64
    assert moved.weight is not None and moved.weight.dtype == torch.float64
    assert moved.index.dtype == moved.y.dtype == torch.int64
