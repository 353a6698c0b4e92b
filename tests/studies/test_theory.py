"""The smooth problem: its constants are what they are said to be, and M(k) falls."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from manyheads.experiment import Runtime
from manyheads.session import open_session
from manyheads.studies import get_study
from manyheads.studies.records import Records
from manyheads.studies.theory import excess, exponents, half_squared_distance, net, problem, smoothness
from manyheads.studies.trial import PAPER, QUICK


def _loss(flat: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """F_i as a function of W and theta in one vector."""
    weight, theta = flat[:12].view(2, 6), flat[12:]
    return half_squared_distance(x @ weight.T + theta, y).mean()


def test_constants_are_exact() -> None:
    data = problem(3, 1)
    parts = [(x.double(), y.double()) for x, y in zip(data.x_train.split(64), data.y_train.split(64), strict=True)]
    hessians = [
        torch.autograd.functional.hessian(lambda flat, x=x, y=y: _loss(flat, x, y), torch.zeros(14, dtype=x.dtype))
        for x, y in parts
    ]
    largest = max(float(torch.linalg.eigvalsh(hessian)[-1]) for hessian in hessians)  # pyright: ignore[reportArgumentType]
    assert smoothness(3, 1) == pytest.approx(largest)
    # Newton's step from zero on all of it ends at the minimum of a quadratic.
    free = torch.zeros(12 + 3 * 2, dtype=torch.float64, requires_grad=True)

    def whole(flat: torch.Tensor) -> torch.Tensor:
        each = [_loss(torch.cat([flat[:12], flat[12 + 2 * i : 14 + 2 * i]]), *part) for i, part in enumerate(parts)]
        return torch.stack(each).mean()

    hessian = torch.autograd.functional.hessian(whole, free.detach())
    (slope,) = torch.autograd.grad(whole(free), free)
    end = free.detach() - torch.linalg.solve(hessian, slope)  # pyright: ignore[reportArgumentType]
    assert excess(3, 1) == pytest.approx(float(whole(free.detach()) - whole(end)))


def test_workers_hold_the_same_whatever_their_number() -> None:
    assert torch.equal(problem(2, 1).x_train, problem(4, 1).x_train[:128])
    assert not torch.equal(problem(2, 1).x_train, problem(2, 12).x_train)


def test_the_net_is_a_sum_of_representation_and_head() -> None:
    module = net((6,), 2)
    x = torch.randn(5, 6)
    assert torch.equal(module(x), torch.zeros(5, 2))
    trial = get_study("theory").grid(QUICK)[0]
    session = open_session(trial.experiment, Runtime(device="cpu", threads=1))
    assert set(session.ctx.model.state_dict()) == {"representation.linear.weight", "head.shift.theta"}
    workers, rounds = trial.experiment.workers, trial.experiment.rounds
    assert rounds is not None
    assert session.ctx.rates.lr == pytest.approx((workers / rounds) ** 0.5)
    assert session.ctx.rates.head_lr == pytest.approx(1 / (2 * rounds**0.5))


def test_rates_stay_below_one_over_l() -> None:
    rates = [(t.experiment.workers / t.source.rounds) ** 0.5 for t in get_study("theory").grid(PAPER)]
    assert max(rates) * smoothness(16, 1) < 1


def test_powers_are_found() -> None:
    points = [(n, k, 3.0 * n**-0.5 * k**-0.75) for n, k in product((2, 4, 8), (16, 32))]
    np.testing.assert_allclose(exponents(points), (-0.5, -0.75))


def test_report(tmp_path: Path, records_lab) -> None:
    records = Records(tmp_path)
    for trial in get_study("theory").grid(QUICK):
        m = (trial.experiment.workers * trial.source.rounds) ** -0.5
        records_lab.write(records, trial, mean_theory_m=m, mean_theory_consensus=0.0)
    page = get_study("theory").write(QUICK, records, tmp_path).read_text()
    assert "| full | M | −0.50 | −0.50 |" in page
    assert "theory-ring.svg" in page
