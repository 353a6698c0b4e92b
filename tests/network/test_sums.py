import numpy as np
import pytest
import torch

from manyheads import threads
from manyheads.network.sums import LeafRows, _Mixer, add_hosted, common_row, for_all, mix_rows
from manyheads.topology import build_mixing


def whole(leaf: torch.Tensor) -> LeafRows:
    return LeafRows(leaf, range(len(leaf)))


def parted(leaf: torch.Tensor, workers: range) -> LeafRows:
    """What a process has that hosts some workers and was sent the rows of all others."""
    received = {worker: row for worker, row in enumerate(leaf) if worker not in workers}
    return LeafRows(leaf[workers.start : workers.stop], workers, received)


@pytest.mark.parametrize("graph", ["ring", "random:0.5", "full", "star"])
def test_mixing_is_the_product_with_p(graph: str) -> None:
    matrix = build_mixing(graph, 7, seed=2).rows(0)
    leaf = torch.randn(7, 3, 2, dtype=torch.float64)
    mixed = mix_rows({"a": whole(leaf)}, {}, matrix)["a"]
    expected = torch.einsum("ij,jkl->ikl", torch.from_numpy(matrix.dense()), leaf)
    torch.testing.assert_close(mixed, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
def test_each_part_of_the_rows_is_mixed_to_the_same_bits(masked: bool) -> None:
    matrix = build_mixing("random:0.5", 7, seed=2).rows(0)
    leaf = torch.randn(7, 1001)
    mask = torch.randint(2, leaf.shape, dtype=torch.uint8)
    all_at_once = mix_rows({"a": whole(leaf)}, {"a": whole(mask)} if masked else {}, matrix)["a"]
    for workers in (range(3), range(3, 4), range(4, 7)):
        masks = {"a": parted(mask, workers)} if masked else {}
        part = mix_rows({"a": parted(leaf, workers)}, masks, matrix)["a"]
        assert torch.equal(part, all_at_once[workers.start : workers.stop])


@pytest.mark.parametrize("graph", ["ring", "full", "star"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (1001,)])
@pytest.mark.parametrize("hosted", [range(7), range(2, 6)])
def test_threads_that_share_the_sums_change_no_bit(
    graph: str, shape: tuple[int, ...], hosted: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_LARGE", 1)
    matrix, leaf, mask = build_mixing(graph, 7).rows(0), torch.randn(7, *shape), torch.randint(2, (7, *shape))
    rows, masks = {"a": parted(leaf, hosted)}, {"a": parted(mask, hosted)}

    def results() -> list[torch.Tensor]:
        plain, masked = mix_rows(rows, {}, matrix)["a"], mix_rows(rows, masks, matrix)["a"]
        return [plain, masked, add_hosted(torch.zeros(shape), whole(leaf), None), for_all(leaf[1], leaf)]

    alone = results()
    with threads.Threads(3).shared():
        shared = results()
    assert all(map(torch.equal, alone, shared))
    torch.testing.assert_close(alone[2], leaf.sum(0))
    assert torch.equal(alone[3], leaf[1].expand_as(leaf))


def test_a_weight_that_nobody_has_is_zero() -> None:
    matrix = build_mixing("full", 3).rows(0)
    leaf, mask = torch.tensor([[2.0, 0.0], [4.0, 0.0], [0.0, 0.0]]), torch.tensor([[1, 0], [1, 0], [0, 0]])
    mixed = mix_rows({"a": whole(leaf)}, {"a": whole(mask)}, matrix)["a"]
    torch.testing.assert_close(mixed, torch.tensor([[3.0, 0.0]] * 3))


def test_a_running_sum_is_the_sum_at_once_to_the_bit() -> None:
    leaf, weights = torch.randn(6, 1001), np.array([0.1, 0.0, 0.3, 0.2, 0.15, 0.25])
    at_once = add_hosted(torch.zeros(1001), whole(leaf), weights)
    running = torch.zeros(1001)
    for workers in (range(2), range(2, 3), range(3, 6)):
        add_hosted(running, LeafRows(leaf[workers.start : workers.stop], workers), weights)
    assert torch.equal(running, at_once)
    torch.testing.assert_close(at_once, torch.from_numpy(weights).float() @ leaf)


def test_a_weight_of_zero_keeps_out_what_is_no_number() -> None:
    leaf = torch.tensor([[torch.nan], [2.0]])
    assert add_hosted(torch.zeros(1), whole(leaf), np.array([0.0, 1.0])).tolist() == [2.0]


def test_a_weight_of_zero_on_the_diagonal_keeps_out_what_is_no_number(lab) -> None:
    leaf = torch.tensor([[torch.nan], [2.0]])
    mixed = mix_rows({"a": whole(leaf)}, {}, lab.mixing_of([[0, 1], [1, 0]]).rows(0))["a"]
    assert mixed[0].tolist() == [2.0] and mixed[1].isnan().all()


def test_mixing_under_a_mask_hides_nothing_that_is_no_number() -> None:
    """A weight of somebody who keeps it may not turn into 0, as one that nobody keeps does."""
    leaf, mask = torch.tensor([[torch.nan, 0.0], [1.0, 0.0]]), torch.tensor([[1, 0], [1, 0]])
    mixed = mix_rows({"a": whole(leaf)}, {"a": whole(mask)}, build_mixing("full", 2).rows(0))["a"]
    assert mixed[:, 0].isnan().all() and mixed[:, 1].tolist() == [0, 0]


def test_the_full_graph_has_one_row(lab) -> None:
    assert common_row(build_mixing("full", 5).rows(0)) is not None
    assert common_row(build_mixing("ring", 5).rows(0)) is None
    assert common_row(build_mixing("full", 5, weights="lazy").rows(0)) is None
    by_sender = np.tile([0.5, 0.2, 0.3], (3, 1))
    assert common_row(lab.mixing_of(by_sender).rows(0)).tolist() == [0.5, 0.2, 0.3]  # pyright: ignore[reportOptionalMemberAccess]


def test_a_device_that_multiplies_gets_the_same_within_rounding() -> None:
    matrix = build_mixing("random:0.5", 7, seed=2).rows(0)
    leaf = torch.randn(7, 3, 2, dtype=torch.float64)
    expected = mix_rows({"a": whole(leaf)}, {}, matrix)["a"]
    for workers in (range(7), range(3), range(3, 4), range(4, 7)):
        part = _Mixer(matrix)._product(parted(leaf, workers))
        torch.testing.assert_close(part, expected[workers.start : workers.stop], rtol=1e-12, atol=1e-12)
    single = _Mixer(matrix)._product(parted(leaf[:, 0, 0], range(2, 5)))
    torch.testing.assert_close(single, expected[2:5, 0, 0], rtol=1e-12, atol=1e-12)
