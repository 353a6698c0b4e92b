"""What processes compare before they begin; how those that differ end is in ``test_failures``."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from manyheads.algorithms import DePRL
from manyheads.errors import UserError
from manyheads.network.agreement import compare_weights


@pytest.mark.parametrize("value", ["NaN", "Infinity", "0.0"])
def test_weights_are_compared_whatever_numbers_they_are(lab, value):
    held = nn.Linear(6, 5).requires_grad_(False)
    held.bias.fill_(float(value))
    model = lab.opened(lab.tiny(DePRL(), model=nn.Sequential(held, nn.ReLU(), nn.Linear(5, 3)))).ctx.model
    alike: Any = SimpleNamespace(texts=lambda own: [own, own])
    compare_weights(alike, model)
    differing: Any = SimpleNamespace(texts=lambda own: [own, own.replace(value, "1.0")])
    with pytest.raises(UserError, match=r"process 1's net .* \(representation.0.bias differs\)"):
        compare_weights(differing, model)
