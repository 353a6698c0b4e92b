"""Clip, decay, momentum, pull and mask in the order that is promised, on numbers small enough for pencil and paper."""

import pytest
import torch

from manyheads.engine.phase import SGD, Phase, Steps, cross_entropy, single_head
from manyheads.engine.sgd import Descent, clip_, clip_factors


def descent(weight: list[list[float]], sgd: SGD, **extra) -> Descent:
    phase = Phase("body", frozenset({"head"}), Steps(1), sgd, single_head(cross_entropy), **extra)
    return Descent(phase, {"head.w": torch.tensor(weight, dtype=torch.float64)})


def test_clip_is_over_all_leaves_of_each_worker():
    gradients = {
        "a": torch.tensor([3.0, 0.3, 0.0], dtype=torch.float64),
        "b": torch.tensor([[[4.0]], [[0.4]], [[0.0]]], dtype=torch.float64),
    }
    clip_(gradients, 1.0)
    torch.testing.assert_close(gradients["a"], torch.tensor([0.6, 0.3, 0.0], dtype=torch.float64), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        gradients["b"][:, 0, 0], torch.tensor([0.8, 0.4, 0.0], dtype=torch.float64), rtol=1e-6, atol=0
    )


def test_a_squared_norm_that_is_rounded_below_zero_clips_nothing():
    assert clip_factors(torch.tensor([-1e-9, 0.0, 4.0]), 1.0).tolist() == pytest.approx([1.0, 1.0, 0.5])
    assert clip_factors(torch.tensor([torch.nan]), 1.0).isnan().all(), "what is not a number is not hidden"


def test_decay_comes_after_the_clip_and_enters_momentum():
    d = descent([[10.0]], SGD(0.1, momentum=0.5, weight_decay=0.1, clip=1.0))
    d.step({"head.w": torch.tensor([[4.0]], dtype=torch.float64)})
    # direction = clip(4) + 0.1 * 10 = 2; w = 10 - 0.2
    assert float(d.params["head.w"]) == pytest.approx(9.8, rel=1e-6)
    d.step({"head.w": torch.tensor([[0.0]], dtype=torch.float64)})
    # direction = 0.5 * 2 + 0.1 * 9.8 = 1.98
    assert float(d.params["head.w"]) == pytest.approx(9.8 - 0.198, rel=1e-6)


def test_the_pull_stays_out_of_clip_and_momentum():
    anchor = {"head.w": torch.tensor([[0.0]], dtype=torch.float64)}
    d = descent([[10.0]], SGD(0.1, momentum=0.5, clip=1.0), proximal=(anchor, 2.0))
    zero = torch.zeros(1, 1, dtype=torch.float64)
    d.step({"head.w": zero.clone()})
    assert float(d.params["head.w"]) == pytest.approx(8.0)
    d.step({"head.w": zero.clone()})
    assert float(d.params["head.w"]) == pytest.approx(6.4)


def test_a_mask_puts_weights_to_zero_after_every_step():
    mask = {"head.w": torch.tensor([[1, 0]], dtype=torch.uint8)}
    d = descent([[1.0, 1.0]], SGD(0.1), mask=mask)
    d.step({"head.w": torch.tensor([[1.0, 1.0]], dtype=torch.float64)})
    assert d.params["head.w"].tolist() == [[0.9, 0.0]]


def test_only_the_first_rows_move():
    d = descent([[1.0], [1.0], [1.0]], SGD(0.1, momentum=0.9, weight_decay=0.1))
    d.step({"head.w": torch.ones(3, 1, dtype=torch.float64)})
    before = d.params["head.w"].clone()
    d.step({"head.w": torch.ones(2, 1, dtype=torch.float64)})
    assert torch.equal(d.params["head.w"][2], before[2])
    assert not torch.equal(d.params["head.w"][:2], before[:2])


def test_gradients_that_share_memory_are_changed_one_by_one():
    """As autograd gives them to leaves that are added to each other, and to those of a mean: one number, expanded."""
    phase = Phase("body", frozenset({"head"}), Steps(1), SGD(1.0, weight_decay=0.1), single_head(cross_entropy))
    params = {f"head.{n}": torch.full((1, 2), float(n), dtype=torch.float64) for n in (1, 2, 3)}
    one = torch.full((1, 2), 0.5, dtype=torch.float64)
    gradients = {"head.1": one, "head.2": one, "head.3": torch.tensor(0.5, dtype=torch.float64).expand(1, 2)}
    Descent(phase, params).step(gradients)
    for name, expected in (("head.1", 0.4), ("head.2", 1.3), ("head.3", 2.2)):
        assert params[name].flatten().tolist() == pytest.approx([expected] * 2)
