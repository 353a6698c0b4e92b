"""Blocks of host memory: lent, given back, used again; rows in them are rows like any other."""

import gc

import pytest
import torch

from manyheads import host_memory
from manyheads.network.in_process import InProcess
from manyheads.topology import build_mixing


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    gc.collect()
    host_memory.release()
    assert not host_memory._blocks, "a block was not given back"


def test_a_block_is_used_again_when_the_last_view_is_gone() -> None:
    first = host_memory.empty((3, 5), torch.float64)
    address, row = first.data_ptr(), first[1]
    row.fill_(7)
    del first
    other = host_memory.empty((3, 5), torch.float64)
    assert other.data_ptr() != address, "a view still reads the block"
    assert (row == 7).all()
    del row
    assert host_memory.empty((15,), torch.float64).data_ptr() == address


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_rooms_of_every_type_and_shape(dtype: torch.dtype) -> None:
    for shape in ((4,), (2, 3, 1), (0, 3)):
        room = host_memory.empty(shape, dtype).fill_(1)
        assert room.shape == shape and room.dtype == dtype and room.is_contiguous()


def test_room_is_made_where_the_leaf_lies() -> None:
    plain, own = torch.ones(2, 3), host_memory.pinned({"w": torch.ones(1, 3)})["w"].expand(2, 3)
    assert host_memory.empty_like(plain).untyped_storage().data_ptr() not in host_memory._blocks
    assert host_memory.empty_like(own).untyped_storage().data_ptr() in host_memory._blocks


def test_mixing_and_averaging_keep_rows_in_pinned_memory() -> None:
    network = InProcess(build_mixing("ring", 5), frozenset())
    rows = {"representation.w": torch.randn(5, 4)}
    own = host_memory.pinned(rows)
    for expected, result in (
        (network.mix(rows, 0), network.mix(own, 0)),
        (network.average(rows, torch.ones(5).numpy()), network.average(own, torch.ones(5).numpy())),
    ):
        assert torch.equal(result["representation.w"], expected["representation.w"])
        assert result["representation.w"].untyped_storage().data_ptr() in host_memory._blocks


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_the_memory_is_pinned() -> None:
    room = host_memory.empty((1 << 20,), torch.float32)
    assert room.is_pinned()
    room.copy_(torch.arange(1 << 20, device="cuda"), non_blocking=True)
    torch.cuda.synchronize()
    assert room[-1] == (1 << 20) - 1


def test_a_single_number_has_room() -> None:
    """As BatchNorm's counter of batches, of which the first state holds one for all workers."""
    (counter,) = host_memory.pinned({"n": torch.tensor(7)}).values()
    assert counter.shape == () and int(counter) == 7
