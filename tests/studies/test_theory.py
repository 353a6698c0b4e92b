"""The smooth problem: its constants are what they are said to be, and M(k) falls."""

import csv
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from manyheads.algorithms import DePRL
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


def test_workers_share_a_representation_and_differ_in_centre_and_head() -> None:
    truths = []
    for seed in (1, 2):
        data = problem(64, seed)
        x, y = (values.double().view(64, 64, -1) for values in (data.x_train, data.y_train))
        around = x - x.mean(1, keepdim=True)
        truth = torch.linalg.lstsq(around.flatten(0, 1), (y - y.mean(1, keepdim=True)).flatten(0, 1)).solution
        heads = (y - x @ truth).mean(1)
        noise = y - x @ truth - heads.unsqueeze(1)
        for values, deviation in ((around, 0.5), (x.mean(1), 0.2), (heads, 0.5), (noise, 0.5)):
            assert float(values.std()) == pytest.approx(deviation, rel=0.15)
        assert not (data.x_test.unsqueeze(1) == data.x_train).all(2).any(), "test samples are others"
        truths.append(truth)
    assert (truths[0] - truths[1]).abs().max() > 0.5


def test_the_net_is_a_sum_of_representation_and_head() -> None:
    module = net((6,), 2)
    x = torch.randn(5, 6)
    assert torch.equal(module(x), torch.zeros(5, 2))
    weight, theta = torch.randn(2, 6), torch.randn(2)
    module.load_state_dict({"linear.weight": weight, "shift.theta": theta})
    torch.testing.assert_close(module(x), x @ weight.T + theta)
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


def test_trials_are_as_corollary_1_assumes() -> None:
    """Plain gradient descent on mini-batches, tau steps of the head and one of the representation, all samples used."""
    trials = get_study("theory").grid(PAPER)
    assert len({trial.experiment.run_id for trial in trials}) == len(trials) == 2 * 4 * 4 * len(PAPER.seeds)
    for trial in trials:
        made, place = trial.experiment, trial.place
        assert made.algorithm == DePRL(head_steps=2, body_steps=1) and made.schedule == "corollary"
        assert made.momentum == made.weight_decay == made.clip == made.validation == 0
        assert made.batch_size is not None and made.batch_size < 64 and made.split == "natural"
        assert (made.workers, made.rounds, made.seed) == (place["workers"], place["rounds"], place["seed"])
        assert made.data is problem(made.workers, made.seed) and made.precision == PAPER.precision
        assert str(made.graph).startswith(str(place["graph"]))
        assert made.loss is half_squared_distance and trial.every == 1 and trial.theory


def test_powers_are_found() -> None:
    points = [(n, k, 3.0 * n**-0.5 * k**-0.75) for n, k in product((2, 4, 8), (16, 32))]
    np.testing.assert_allclose(exponents(points), (-0.5, -0.75, 0), atol=1e-12)
    # 1, 2, 1 for N = 1, 2, 4 falls and rises by as much: no power of N, and the best product misses it.
    bent = [(n, k, (2.0 if n == 2 else 1.0) / k) for n, k in product((1, 2, 4), (16, 32))]
    np.testing.assert_allclose(exponents(bent), (0, -1, 2 ** (2 / 3) - 1), atol=1e-12)


def test_report(tmp_path: Path, records_lab) -> None:
    records = Records(tmp_path)
    for trial in get_study("theory").grid(QUICK):
        m = (trial.experiment.workers * trial.source.rounds) ** -0.5
        records_lab.write(records, trial, mean_theory_m=m, mean_theory_consensus=m - 0.1 * m**2)
    page = get_study("theory").write(QUICK, records, tmp_path).read_text()
    assert "| full | M | −0.50 | −0.50 | 0 % |" in page
    assert "| full | M without its consensus term | −1.00 | −1.00 | 0 % |" in page
    assert "theory-ring.svg" in page
    largest, gap = max(smoothness(4, seed) for seed in QUICK.seeds), np.mean([excess(4, seed) for seed in QUICK.seeds])
    assert f"L = {largest:.3g}; f at the start lies {gap:.3g} above its minimum" in page
    assert f"β is 0.71, where 1/L = {1 / largest:.2f}" in page
    with (tmp_path / "theory.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 2
    assert [float(row["mean_m_times_sqrt_nk"]) for row in rows] == pytest.approx([1] * 8)


@pytest.mark.parametrize(("name", "value"), [("workers", 2), ("rounds", 8)])
def test_no_power_is_fitted_to_a_single_number(tmp_path: Path, records_lab, name: str, value: int) -> None:
    records = Records(tmp_path)
    for trial in get_study("theory").grid(QUICK):
        if trial.place[name] == value:
            records_lab.write(records, trial, mean_theory_m=0.5, mean_theory_consensus=0.1)
    page = get_study("theory").write(QUICK, records, tmp_path).read_text()
    assert "| M |" not in page and ".svg" not in page
