import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cosine_similarity

from manyheads.metrics import similarity as module
from manyheads.metrics.similarity import mean_cosine, mean_cosines, similarities


def test_by_hand() -> None:
    models = [
        ("representation.a", torch.tensor([[[1.0]], [[0.0]], [[-2.0]]])),
        ("head.a", torch.tensor([[3.0], [3.0], [0.0]])),
        ("representation.b", torch.tensor([[1.0], [5.0], [-2.0]])),
        ("head.b", torch.tensor([[4.0], [0.0], [0.0]])),
    ]
    counts = torch.tensor([[2, 0], [0, 7], [1, 1]])
    maps = similarities(models, counts)
    r = 1 / math.sqrt(2)
    expected = {
        "data": [[1, 0, r], [0, 1, r], [r, r, 1]],
        "heads": [[1, 3 / 5, 0], [3 / 5, 1, 0], [0, 0, 0]],
        "representations": [[1, r, -1], [r, 1, -r], [-1, -r, 1]],
    }
    assert list(maps) == list(expected)
    for kind, matrix in maps.items():
        assert matrix.dtype == torch.float32
        torch.testing.assert_close(matrix, torch.tensor(expected[kind], dtype=torch.float32))


def test_what_is_not_there_is_left_out() -> None:
    assert list(similarities([("head.a", torch.ones(2, 1))], None)) == ["heads"]
    assert list(similarities([("generic.a", torch.ones(2, 1))], torch.ones(2, 3))) == ["data"]


@given(st.integers(2, 6), st.integers(1, 40), st.integers(1, 64))
def test_as_torch_has_it_whatever_the_blocks(num_workers: int, width: int, block: int) -> None:
    rows = torch.randn(num_workers, width, generator=torch.Generator().manual_seed(width))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK_NUMBERS", block)
        found = similarities([("head.a", rows)], None)["heads"]
    torch.testing.assert_close(found, cosine_similarity(rows.unsqueeze(0), rows.unsqueeze(1), dim=2))


@pytest.mark.parametrize("num_workers", [2, 3, 5, 8])
@pytest.mark.parametrize("width", [3, 5, 8, 10])
def test_no_mean_cosine_is_above_one(num_workers: int, width: int) -> None:
    """As after every average by a server, when all models are one."""
    row = torch.randn(1, width, generator=torch.Generator().manual_seed(width))
    found = mean_cosine([row.expand(num_workers, width)])
    assert found is not None and 1 - 1e-15 < found <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_products_have_the_same_bits_however_rows_lie_in_memory(dtype: torch.dtype) -> None:
    """Leaves of a run may lie otherwise than those that are read from its files."""
    rows = torch.randn(300, 7, generator=torch.Generator().manual_seed(1)).to(dtype).T
    assert not rows.is_contiguous()
    assert torch.equal(module._products(rows), module._products(rows.contiguous()))


def test_the_mean_cosine_needs_no_map() -> None:
    """Rows of zeros, as a masked layer may have, are like nobody."""
    draw = torch.Generator().manual_seed(1)
    params = {
        "representation.a": torch.randn(5, 3, 2, generator=draw),
        "representation.b": torch.randn(5, generator=draw),
        "head.a": torch.randn(5, 4, generator=draw) * torch.tensor([1, 0, 3, 0.1, 1]).unsqueeze(1),
        "generic.a": torch.randn(5, 4, generator=draw),
    }
    maps = similarities(params.items(), None)
    found = mean_cosines(params)
    pairs = ~torch.eye(5, dtype=torch.bool)
    expected = {f"similarity_{kind}": pytest.approx(float(matrix[pairs].mean())) for kind, matrix in maps.items()}
    assert found == expected and len(found) == 2
    assert mean_cosines({"head.a": torch.randn(1, 4)}) == {}
    (same,) = mean_cosines({"head.a": torch.full((3, 4), 1e-42)}).values()
    assert same == pytest.approx(1)
    (broken,) = mean_cosines({"head.a": torch.tensor([[1.0], [math.nan]])}).values()
    assert math.isnan(broken)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_looking_changes_no_leaf(dtype: torch.dtype) -> None:
    """In double precision nothing needs to be converted, and so nothing is copied by itself."""
    params = {f"{part}.a": torch.randn(3, 4).to(dtype) for part in ("representation", "head")}
    before = {name: leaf.clone() for name, leaf in params.items()}
    mean_cosines(params)
    similarities(params.items(), None)
    assert all(torch.equal(leaf, before[name]) for name, leaf in params.items())


def test_a_mean_cosine_has_the_same_bits_on_any_number_of_threads() -> None:
    leaf, threads = torch.randn(3, 300_000, generator=torch.Generator().manual_seed(1)), torch.get_num_threads()
    try:
        found = {torch.set_num_threads(count) or mean_cosine([leaf]) for count in (1, 2, 3, 5)}
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1
