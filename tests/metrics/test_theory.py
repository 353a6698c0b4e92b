import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from manyheads.algorithms import DPSGD, DePRL, FedRep, FedRoD, State
from manyheads.algorithms.base import Work
from manyheads.data import Dataset
from manyheads.errors import UserError
from manyheads.experiment import Experiment
from manyheads.metrics.theory import at_mean, head_term_factor, theory_terms
from manyheads.rounds import train
from manyheads.session import Session, open_session

FIELDS = {"theory_grad_phi", "theory_grad_theta", "theory_grad_theta_mean", "theory_consensus", "theory_m"}


def square(output: Tensor, y: Tensor) -> Tensor:
    return (output.flatten() - y).square()


@pytest.fixture
def two(lab: SimpleNamespace) -> Session:
    """F_i = (theta phi x - y)^2 in two numbers, with x = 1, and y = 1 for one worker, 3 for the other."""
    x, y, user = torch.ones(2, 1), torch.tensor([1.0, 3.0]), torch.arange(2)
    data = Dataset("two", x, y, x, y, None, user, user)
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    return lab.opened(
        lab.tiny(DePRL(head_steps=3, body_steps=1), data=data, model=net, loss=square, workers=2, lr=0.1, head_lr=0.05)
    )


def state(phi: tuple[float, float], theta: tuple[float, float]) -> State:
    def leaf(values: tuple[float, float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).view(2, 1, 1)

    return State({"representation.0.weight": leaf(phi), "head.1.weight": leaf(theta)}, {})


def renamed(given: State, session: Session) -> State:
    """The state under the names of the session's net."""
    return State(dict(zip(session.ctx.initial.params, given.params.values(), strict=True)), {})


def terms(session: Session, start: State, trained: State) -> dict[str, float]:
    steps = {"head": 3, "body": 1}
    log = {name: Work(torch.zeros(2), torch.tensor([n, n])) for name, n in steps.items()}
    return theory_terms(renamed(start, session), renamed(trained, session), log, session.ctx)


def test_by_hand(two: Session) -> None:
    """phibar = 2. Gradients in phi at theta(k + 1): 0 and -2; in theta at theta(k): 4 and 4. alpha tau / beta = 1.5."""
    found = terms(two, state((1, 3), (1, 2)), state((7, 9), (0.5, 1)))
    expected = {
        "theory_grad_phi": 1.0,
        "theory_grad_theta": 16.0,
        "theory_grad_theta_mean": 16.0,
        "theory_consensus": 1.0,
        "theory_m": 1 + 1.5 * 16 + 1,
    }
    assert found == pytest.approx(expected, rel=1e-12)


def test_heads_that_cancel_are_not_optimal(two: Session) -> None:
    """Gradients 4 and -4 in the heads: their mean is 0, and only the stronger measure sees that neither is done."""
    found = terms(two, state((1, 3), (1, 1)), state((1, 3), (1, 1)))
    assert found["theory_grad_theta"] == 0.0
    assert found["theory_grad_theta_mean"] == pytest.approx(16, rel=1e-12)


def test_nothing_is_left_at_an_optimum(two: Session) -> None:
    best = state((2, 2), (0.5, 1.5))
    assert terms(two, best, best) == dict.fromkeys(FIELDS, 0.0)


def test_as_autograd_has_it(lab: SimpleNamespace) -> None:
    """A net with ragged shards, against gradients of its plain losses at the mean representation."""
    session = lab.opened(lab.tiny(DePRL()))
    ctx, algorithm = session.ctx, session.experiment.algorithm
    start = lab.states(session, 1)[-1]
    trained, log = algorithm.local(start, 1, ctx)
    mean = {name: leaf.mean(0) for name, leaf in start.params.items() if name.startswith("representation")}

    def gradient(worker: int, heads: State, prefix: str) -> Tensor:
        own = {name: leaf[worker] for name, leaf in heads.params.items()} | mean
        leaves = {name: leaf.clone().requires_grad_(name.startswith(prefix)) for name, leaf in own.items()}
        train, rows = session.federation.train, session.federation.train.rows(worker)
        output = functional_call(ctx.model.eval(), leaves, (train.x[train.index[rows]],))
        loss = nn.functional.cross_entropy(output, train.y[rows])
        moving = [leaf for leaf in leaves.values() if leaf.requires_grad]
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, moving)])

    by_phi = torch.stack([gradient(worker, trained, "representation") for worker in range(4)])
    by_theta = torch.stack([gradient(worker, start, "head") for worker in range(4)])
    found = theory_terms(start, trained, log, ctx)
    assert found["theory_grad_phi"] == pytest.approx(float(by_phi.mean(0).square().sum()), rel=1e-10)
    assert found["theory_grad_theta"] == pytest.approx(float(by_theta.mean(0).square().sum()), rel=1e-10)
    assert found["theory_grad_theta_mean"] == pytest.approx(float(by_theta.square().sum() / 4), rel=1e-10)


def test_statistics_follow_the_representation(lab: SimpleNamespace) -> None:
    """Shared BatchNorm statistics are averaged with the representation, local ones are each worker's own."""
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    for norm, equal in (("shared", True), ("local", False)):
        session = lab.opened(lab.tiny(DPSGD(), model=net, norm=norm))
        ctx = session.ctx
        trained, _ = session.experiment.algorithm.local(ctx.initial, 0, ctx)
        point = at_mean(trained, ctx)
        (statistics,) = (leaf for name, leaf in point.buffers.items() if name.endswith("running_mean"))
        assert torch.allclose(statistics, statistics[0], rtol=1e-12) is equal
        heads = {name: leaf for name, leaf in point.params.items() if name.startswith("head")}
        assert heads
        assert all(leaf is trained.params[name] for name, leaf in heads.items())


@pytest.mark.parametrize(
    ("algorithm", "factor"),
    [
        (DePRL(head_epochs=2, body_epochs=1), 2 * 0.05 / 0.1),
        (DePRL(head_steps=6, body_steps=1), 6 * 0.05 / 0.1),
        (FedRep(head_epochs=3, body_epochs=2), 3 / 2 * 0.05 / 0.1),
        (DePRL(head_steps=6, body_epochs=0), 6 * 0.05 / 0.1),
        (DePRL(head_epochs=0), 0.0),
        (DPSGD(epochs=3), 1.0),
    ],
)
def test_factor_of_the_heads_term(algorithm: DePRL | FedRep | DPSGD, factor: float, lab: SimpleNamespace) -> None:
    session = lab.opened(lab.tiny(algorithm))
    start = session.ctx.initial
    trained, log = algorithm.local(start, 0, session.ctx)
    assert head_term_factor(start, trained, log, session.ctx) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(("steps", "factor"), [([6, 0], 6 * 0.05 / 0.1), ([0, 0], 0.0)])
def test_heads_of_workers_that_are_away_do_not_move(steps: list[int], factor: float, two: Session) -> None:
    start, log = two.ctx.initial, {"head": Work(torch.zeros(2), torch.tensor(steps))}
    assert head_term_factor(start, start, log, two.ctx) == pytest.approx(factor, rel=1e-12)


def measured(experiment: Experiment, lab: SimpleNamespace, path: Path, **runtime: int) -> list[dict[str, float]]:
    list(train(experiment, replace(lab.cpu, out=path, **runtime)))
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("order", ["train-mix", "mix-train"])
def test_runs_measure_where_local_training_starts(order: str, lab: SimpleNamespace, tmp_path: Path) -> None:
    lines = measured(lab.tiny(DePRL(order=order), rounds=4), lab, tmp_path / "run", theory_every=1)
    for before, after in pairwise(lines):
        start = before if order == "train-mix" else after
        assert after["theory_consensus"] == start["consensus_error"] > 0


def test_runs_measure_as_often_as_asked(lab: SimpleNamespace, tmp_path: Path) -> None:
    experiment = lab.tiny(DePRL(), rounds=7)
    lines = measured(experiment, lab, tmp_path / "run", theory_every=3, eval_every=2)
    assert [line["round"] for line in lines] == [2, 3, 4, 6, 7]
    assert [line["round"] for line in lines if line.keys() >= FIELDS] == [3, 6, 7]
    assert not any(line.keys() & FIELDS for line in lines if line["round"] in (2, 4))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {name: summary[name] for name in FIELDS} == {name: lines[-1][name] for name in FIELDS}


def test_rates_that_have_fallen_to_nothing_leave_heads_their_weight(lab: SimpleNamespace, tmp_path: Path) -> None:
    lines = measured(lab.tiny(DePRL(), rounds=3, decay=1e-200), lab, tmp_path / "run", theory_every=1)
    last = {name: lines[-1][f"theory_{name}"] for name in ("grad_phi", "grad_theta", "consensus", "m")}
    assert last["m"] == pytest.approx(last["grad_phi"] + 2 * 0.05 / 0.1 * last["grad_theta"] + last["consensus"])


def test_looking_changes_nothing(lab: SimpleNamespace, tmp_path: Path) -> None:
    experiment = lab.tiny(DePRL(), rounds=3)
    plain, watched = (measured(experiment, lab, tmp_path / name, theory_every=k) for name, k in (("a", 0), ("b", 1)))
    changing = {"seconds", "peak_memory_bytes", *FIELDS}
    for a, b in zip(plain, watched, strict=True):
        assert {k: v for k, v in a.items() if k not in changing} == {k: v for k, v in b.items() if k not in changing}


def test_gradients_vanish_where_training_ends(lab: SimpleNamespace) -> None:
    """On a problem that each full step improves, M(k) of the literal algorithm falls by orders of magnitude."""
    plain = {"momentum": 0.0, "clip": 0.0, "decay": 1.0, "batch_size": 16, "lr": 0.3, "head_lr": 0.3}
    experiment = lab.tiny(DePRL(head_steps=2, body_steps=1), graph="full", rounds=100, **plain)
    values = [record.theory_m for record in train(experiment, replace(lab.cpu, eval_every=100, theory_every=99))]
    early = next(train(experiment, replace(lab.cpu, theory_every=1))).theory_m
    assert values[-1] < 0.05 * early


def test_two_heads_are_refused(lab: SimpleNamespace) -> None:
    with pytest.raises(UserError, match="--theory-every"):
        open_session(lab.tiny(FedRoD()), replace(lab.cpu, theory_every=1))
    with pytest.raises(UserError, match="--theory-every -1"):
        replace(lab.cpu, theory_every=-1)
