from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from manyheads.algorithms import DPSGD
from manyheads.algorithms.base import Context
from manyheads.data import Dataset
from manyheads.metrics.estimate import gradient_noise, smoothness, variability

HEAD, BODY = frozenset({"head"}), frozenset({"representation"})


def half_square(output: Tensor, y: Tensor) -> Tensor:
    return (output.flatten() - y).square() / 2


@pytest.fixture
def quadratic(lab: SimpleNamespace) -> Callable[..., Context]:
    """F_i = mean over samples of (w x - y)^2 / 2: the Hessian is the mean of x x^T, whatever w."""

    def make(x: list[list[list[float]]], y: list[list[float]], **changes: object) -> Context:
        inputs = torch.tensor([sample for worker in x for sample in worker])
        targets = torch.tensor([target for worker in y for target in worker])
        user = torch.tensor([k for k, worker in enumerate(x) for _ in worker])
        data = Dataset("quadratic", inputs, targets, inputs, targets, None, user, user)
        net = nn.Linear(inputs.shape[1], 1, bias=False)
        small = {"data": data, "model": net, "loss": half_square, "workers": len(x), "batch_size": 1, **changes}
        return lab.opened(lab.tiny(DPSGD(), **small)).ctx

    return make


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_smoothness_is_the_largest_eigenvalue(quadratic: Callable[..., Context], precision: str) -> None:
    """Hessians diag(8, 2) / 2 and [[5, 4], [4, 5]] / 2, whose eigenvalues are 4, 1 and 9/2, 1/2."""
    x = [[[8**0.5, 0.0], [0.0, 2**0.5]], [[2.0, 1.0], [1.0, 2.0]]]
    ctx = quadratic(x, [[0.0, 1.0], [2.0, 3.0]], head="all", precision=precision)
    found = smoothness(ctx.initial, HEAD, ctx)
    assert found.tolist() == pytest.approx([4.0, 4.5], rel=1e-6 if precision == "float64" else 1e-2)


def test_smoothness_never_exceeds_the_constant(quadratic: Callable[..., Context]) -> None:
    """However few iterations there are, |H v| stays below the largest eigenvalue."""
    ctx = quadratic([[[8**0.5, 0.0], [0.0, 2**0.5]]] * 2, [[0.0, 1.0]] * 2, head="all")
    for iterations in (1, 2, 3):
        assert (smoothness(ctx.initial, HEAD, ctx, iterations=iterations) <= 4 + 1e-6).all()


def test_a_flat_loss_has_none(quadratic: Callable[..., Context]) -> None:
    ctx = quadratic([[[0.0, 0.0]], [[1.0, 0.0]]], [[1.0], [1.0]], head="all")
    assert smoothness(ctx.initial, HEAD, ctx).tolist() == pytest.approx([0, 1], abs=1e-9)


def test_noise_of_two_samples_is_known(quadratic: Callable[..., Context]) -> None:
    """Two samples drawn one by one lie equally far from their mean: sigma^2 is that distance, whatever is drawn."""
    ctx = quadratic([[[1.0], [3.0]], [[2.0], [2.0]]], [[0.0, 0.0], [1.0, 1.0]], head="all")
    weight = float(next(iter(ctx.initial.params.values()))[0, 0, 0])
    gradients = weight, 9 * weight
    expected = ((gradients[0] - gradients[1]) / 2) ** 2
    assert gradient_noise(ctx.initial, HEAD, ctx, draws=3).tolist() == pytest.approx([expected, 0.0], rel=1e-10)


def test_noise_is_an_unbiased_estimate(quadratic: Callable[..., Context]) -> None:
    """One of four samples at a time: the mean over many draws comes close to the variance over samples."""
    ctx = quadratic([[[1.0]] * 4] * 2, [[0.0, 1.0, 2.0, 3.0]] * 2, head="all")
    found = gradient_noise(ctx.initial, HEAD, ctx, draws=200)
    assert found.tolist() == pytest.approx([1.25, 1.25], rel=0.25)


def test_full_batches_have_no_noise(quadratic: Callable[..., Context]) -> None:
    ctx = quadratic([[[1.0], [3.0]], [[2.0], [5.0]]], [[0.0, 0.0], [1.0, 1.0]], head="all", batch_size=2)
    assert gradient_noise(ctx.initial, HEAD, ctx).tolist() == pytest.approx([0.0, 0.0], abs=1e-20)


def test_variability_between_workers(quadratic: Callable[..., Context]) -> None:
    """Gradients w - y for y = 0, 1 and 5 differ by the targets alone: their variance is 14/3."""
    ctx = quadratic([[[1.0]]] * 3, [[0.0], [1.0], [5.0]], head="none")
    assert variability(ctx.initial, ctx) == pytest.approx(14 / 3, rel=1e-10)
    same = quadratic([[[1.0]]] * 3, [[2.0]] * 3, head="none")
    assert variability(same.initial, same) == pytest.approx(0, abs=1e-20)
    assert smoothness(same.initial, BODY, same).tolist() == pytest.approx([1.0] * 3, rel=1e-6)
