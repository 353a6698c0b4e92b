import math

import pytest
import torch

from manyheads.metrics import spread as module
from manyheads.metrics.spread import consensus, spread, square_norms
from manyheads.network.in_process import InProcess
from manyheads.topology import build_mixing


def network(num_workers: int) -> InProcess:
    return InProcess(build_mixing("full", num_workers), frozenset({"head"}))


def test_by_hand() -> None:
    rows = {"head.a": torch.tensor([[1.0, 0.0], [3.0, 0.0]]), "head.b": torch.tensor([[0.0], [4.0]])}
    found = spread(rows, network(2))  # mean (2, 0, 2), distances 1 + 4 each
    assert found == (8.0, 5.0)
    assert found.mean_square == (1 + 9 + 16) / 2


def test_nothing_has_no_spread() -> None:
    assert spread({}, network(3)) == (0.0, 0.0)


def test_workers_that_nobody_hosts_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a site that is away: what is gathered of its workers is no number."""
    rows, here = {"head.a": torch.tensor([[1.0], [3.0]])}, network(2)
    monkeypatch.setattr(here, "gather", lambda values: torch.cat([values, values.new_full((1,), math.nan)]))
    assert spread(rows, here) == (4.0, 1.0)


def test_wide_leaves_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"head.a": torch.randn(3, 7, 5, dtype=torch.float64)}
    whole = spread(rows, network(3))
    monkeypatch.setattr(module, "COLUMNS", 4)
    assert spread(rows, network(3)) == pytest.approx(whole, rel=1e-14)
    mean = rows["head.a"].mean(0)
    assert whole.variance == pytest.approx(float((rows["head.a"] - mean).square().sum() / 3), rel=1e-14)


def test_single_precision_is_summed_in_double() -> None:
    """2^24 + 1 is no float32: a mean taken in single precision would be 2^24."""
    rows = torch.tensor([[2.0**24], [2.0**24 + 2]])
    assert spread({"head.a": rows}, network(2)) == ((2.0**24 + 1) ** 2, 1.0)


def test_consensus_is_about_representations_alone() -> None:
    params = {
        "representation.a": torch.tensor([[1.0, 0.0], [3.0, 0.0], [5.0, 3.0]]),
        "representation.b": torch.tensor([[0.0], [0.0], [3.0]]),
        "head.w": torch.tensor([[100.0], [0.0], [-100.0]]),
    }
    # phibar = (3, 1, 1): squared distances 4+1+1, 0+1+1, 4+4+4.
    found = consensus(params, network(3))
    assert (found.variance, found.relative) == pytest.approx((20 / 3, 20 / 3 / 11))
    agreed = consensus({"representation.a": torch.ones(3, 4), "head.w": torch.randn(3, 2)}, network(3))
    assert (agreed.variance, agreed.relative) == (0.0, 0.0)


def test_relative_consensus_error_has_no_scale() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 2.0]])  # mean (2, 2), distances 1 and 1
    small, large = (consensus({"representation.a": scale * rows}, network(2)) for scale in (1, 4))
    assert (small.variance, small.relative) == (1.0, 1 / 8)
    assert (large.variance, large.relative) == (16.0, 1 / 8)


@pytest.mark.parametrize(
    ("params", "variance"),
    [({"representation.a": torch.tensor([[1.0], [-1.0]])}, 1.0), ({"head.w": torch.ones(2, 3)}, 0.0)],
    ids=["around zero", "no representation"],
)
def test_around_zero_nothing_is_relative(params: dict[str, torch.Tensor], variance: float) -> None:
    found = consensus(params, network(2))
    assert found.variance == variance
    assert math.isnan(found.relative)


@pytest.mark.parametrize("size", [5, 40_000, 100_003])
def test_a_row_has_the_same_bits_beside_any_others_and_on_any_number_of_threads(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, size, generator=generator)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found += [square_norms(rows), torch.cat([square_norms(row[None]) for row in rows])]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found)
