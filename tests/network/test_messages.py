import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyheads.network.base import message_bytes
from manyheads.network.messages import pack, pack_bits, unpack, unpack_bits


@given(st.lists(st.booleans(), max_size=40))
def test_bits_come_back(bits: list[bool]) -> None:
    packed = pack_bits(torch.tensor(bits, dtype=torch.bool))
    assert packed.dtype == torch.uint8 and len(packed) == -(-len(bits) // 8)
    assert unpack_bits(packed, len(bits)).tolist() == bits


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 4), max_size=3), st.booleans(), st.booleans()), min_size=1, max_size=4),
    st.integers(0, 2**32),
)
def test_a_row_comes_back_from_its_message(leaves: list[tuple[list[int], bool, bool]], seed: int) -> None:
    """Leaves of any shape and width, some under a mask, several messages end to end in one buffer."""
    generator = torch.Generator().manual_seed(seed)
    params, mask = {}, {}
    for number, (shape, double, masked) in enumerate(leaves):
        name = f"representation.{number}"
        leaf = torch.randn(3, *shape, generator=generator, dtype=torch.float64 if double else torch.float32)
        if masked:
            mask[name] = torch.randint(2, leaf.shape, generator=generator, dtype=torch.uint8)
            leaf = leaf * mask[name]
        params[name] = leaf
    messages = [pack(params, mask, row) for row in range(3)]
    sizes = message_bytes(params, mask).tolist()
    assert [len(message) for message in messages] == sizes
    for row, message in enumerate(torch.cat(messages).split(sizes)):
        values, kept = unpack(message, params, mask)
        assert list(values) == list(params) and list(kept) == list(mask)
        assert all(torch.equal(values[name], params[name][row]) for name in params)
        assert all(torch.equal(kept[name], mask[name][row].bool()) for name in mask)


def test_a_masked_row_is_short() -> None:
    mask = {"a": torch.zeros(1, 80, dtype=torch.uint8)}
    mask["a"][0, :3] = 1
    assert len(pack({"a": torch.randn(1, 80)}, mask, 0)) == 10 + 3 * 4


def test_the_numbers_of_a_row_may_lie_apart() -> None:
    """Mixing in one process takes such leaves, so that sending them must work too."""
    leaves = {
        "transposed": torch.randn(4, 3).T,
        "expanded": torch.randn(3, 1).expand(3, 4),
        "one number for all": torch.randn(()).expand(3, 1),
    }
    for row in range(3):
        found, _ = unpack(pack(leaves, {}, row), leaves, {})
        assert all(torch.equal(found[name], leaf[row]) for name, leaf in leaves.items())


def test_a_message_is_a_copy() -> None:
    leaf = torch.ones(1, 2)
    message = pack({"a": leaf}, {}, 0)
    leaf.zero_()
    assert unpack(message, {"a": leaf}, {})[0]["a"].tolist() == pytest.approx([1, 1])
