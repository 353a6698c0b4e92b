"""How far representations are from agreeing, by hand."""

from math import isnan

import pytest
import torch

from manyheads.metrics.consensus import consensus_error, consensus_errors
from manyheads.network.in_process import InProcess
from manyheads.topology import build_mixing

NETWORK = InProcess(build_mixing("ring", 3), frozenset())


def test_by_hand():
    params = {
        "representation.a": torch.tensor([[1.0, 0.0], [3.0, 0.0], [5.0, 3.0]]),
        "representation.b": torch.tensor([[0.0], [0.0], [3.0]]),
        "head.w": torch.tensor([[100.0], [0.0], [-100.0]]),
    }
    # phibar = (3, 1, 1): squared distances 4+1+1, 0+1+1, 4+4+4.
    assert consensus_error(params, NETWORK) == pytest.approx((6 + 2 + 12) / 3)
    absolute, relative = consensus_errors(params, NETWORK)
    assert (absolute, relative) == pytest.approx((20 / 3, 20 / 3 / 11))


def test_agreement_is_zero():
    params = {"representation.a": torch.ones(3, 4), "head.w": torch.randn(3, 2)}
    assert consensus_errors(params, NETWORK) == (0.0, 0.0)


def test_nothing_to_agree_on():
    absolute, relative = consensus_errors({"head.w": torch.randn(3, 2)}, NETWORK)
    assert absolute == 0.0 and isnan(relative)


def test_double_precision():
    """Nearby rows of large numbers, whose mean single precision cannot tell from them."""
    base = torch.full((3, 1000), 1e4)
    base[0] += 0.01
    exact = base.double()
    expected = float((exact - exact.mean(0)).square().sum() / 3)
    assert consensus_error({"representation.a": base}, NETWORK) == pytest.approx(expected, rel=1e-9)
