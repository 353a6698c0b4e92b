"""DePRL: what a round asks for, how heads start, and the theorem it stands for: a shared subspace is found."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from manyheads.algorithms import DePRL, FedRep, Local
from manyheads.data import Dataset
from manyheads.engine.phase import Epochs, Steps


@pytest.mark.parametrize("kind", [DePRL, FedRep])
def test_a_round_is_the_head_and_then_the_representation(lab, kind):
    session = lab.opened(lab.tiny(kind(head_epochs=3, frozen="eval"), rounds=2, lr=0.1, head_lr=0.05, decay=0.9))
    recorder = lab.Recorder(session.ctx.engine)
    lab.states(replace(session, ctx=replace(session.ctx, engine=recorder)))
    found = [
        (round, phase.stream, set(phase.update), phase.amount, phase.frozen, phase.optimizer.lr)
        for round, phase in recorder.asked
    ]
    assert found == [
        (0, "head", {"head"}, Epochs(3), "eval", 0.05),
        (0, "body", {"representation"}, Epochs(1), "train", 0.1),
        (1, "head", {"head"}, Epochs(3), "eval", pytest.approx(0.045)),
        (1, "body", {"representation"}, Epochs(1), "train", pytest.approx(0.09)),
    ]
    for _, phase in recorder.asked:
        assert (phase.optimizer.momentum, phase.optimizer.weight_decay, phase.optimizer.clip) == (0.5, 0.001, 1.0)


@pytest.mark.parametrize("kind", [DePRL, FedRep])
def test_steps_take_the_place_of_epochs(lab, kind):
    """Sizes 9, 5, 8, 7 in batches of 4: 3, 2, 2, 2 mini-batches a pass."""
    session = lab.opened(lab.tiny(kind(head_epochs=2, body_epochs=3)))
    _, log = session.experiment.algorithm.local(session.experiment.algorithm.init(session.ctx), 0, session.ctx)
    assert {name: work.steps.tolist() for name, work in log.items()} == {"head": [6, 4, 4, 4], "body": [9, 6, 6, 6]}
    session = lab.opened(lab.tiny(kind(head_steps=2, body_steps=1)))
    recorder = lab.Recorder(session.ctx.engine)
    ctx = replace(session.ctx, engine=recorder)
    _, log = session.experiment.algorithm.local(session.experiment.algorithm.init(ctx), 0, ctx)
    assert {name: work.steps.tolist() for name, work in log.items()} == {"head": [2] * 4, "body": [1] * 4}
    assert [phase.amount for _, phase in recorder.asked] == [Steps(2), Steps(1)]


@pytest.mark.parametrize("kind", [DePRL, FedRep])
def test_representations_start_equal_and_heads_as_asked(lab, kind):
    for heads in ("same", "random"):
        session = lab.opened(lab.tiny(kind(heads=heads)))
        state = session.experiment.algorithm.init(session.ctx)
        assert (state.params["representation.fc1.weight"] == state.params["representation.fc1.weight"][0]).all()
        rows = {tuple(row.flatten().tolist()) for row in state.params["head.fc2.weight"]}
        assert len(rows) == (1 if heads == "same" else 4)


@pytest.mark.parametrize("kind", [DePRL, FedRep])
def test_tau_is_what_moves_the_head_in_a_round(kind):
    """Corollary 1 divides the head's rate by it."""
    assert (kind(head_epochs=3).head_passes, kind(head_epochs=3, head_steps=7).head_passes) == (3, 7)
    assert Local().head_passes == 0


def test_the_head_never_moves_with_the_representation(lab):
    kind = DePRL(head_epochs=0)
    session = lab.opened(lab.tiny(kind))
    start, *_, end = lab.states(session)
    for name, leaf in end.params.items():
        assert torch.equal(leaf, start.params[name]) == name.startswith("head."), name


def principal_angle(rows: Tensor, basis: Tensor) -> float:
    """The sine of the largest angle between the row space of [k, d] and the span of orthonormal columns [d, k]."""
    q = torch.linalg.qr(rows.T).Q
    return float(torch.linalg.matrix_norm(q - basis @ (basis.T @ q), ord=2))


def linear_problem(workers: int, samples: int, inputs: int) -> tuple[Dataset, Tensor]:
    """y = <h_i, B^T x> with one basis B [inputs, 2] for all workers and a head h_i of its own for each."""
    generator = torch.Generator().manual_seed(4)

    def orthonormal(*shape: int) -> Tensor:
        return torch.linalg.qr(torch.randn(*shape, generator=generator, dtype=torch.float64)).Q

    basis = orthonormal(inputs, 2)
    angle = 2 * torch.pi * torch.arange(workers) / workers
    heads = torch.stack([angle.cos(), angle.sin()], dim=1).double()
    x = (orthonormal(workers, samples, inputs) * samples**0.5).float()
    y = torch.einsum("wsi,ik,wk->ws", x.double(), basis, heads).float()
    user = torch.arange(workers).repeat_interleave(samples)
    pool = (x.flatten(0, 1), y.flatten())
    return Dataset("linear", *pool, *pool, None, user, user), basis


def linear_net() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 2, bias=False), nn.Linear(2, 1, bias=False))


def squares(output: Tensor, y: Tensor) -> Tensor:
    return (output[:, 0] - y).square()


@pytest.mark.parametrize(
    ("kind", "graph"),
    [
        (DePRL(head_steps=2, body_steps=1), "ring"),
        (DePRL(head_steps=2, body_steps=1), "full"),
        (Local(steps=1), "none"),
    ],
)
def test_a_shared_subspace_is_recovered_together_and_never_alone(lab, kind, graph):
    """A worker's own samples show one direction of the plane that all live in; together they find the plane."""
    data, basis = linear_problem(workers=8, samples=12, inputs=10)
    shared = {"data": data, "model": linear_net, "workers": 8, "batch_size": 12, "graph": graph, "loss": squares}
    rates = {"lr": 0.3, "head_lr": 0.5, "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0, "decay": 1.0, "rounds": 130}
    history = lab.states(lab.opened(lab.tiny(kind, **shared, **rates)))
    start, end = (
        [principal_angle(rows, basis) for rows in state.params["representation.0.weight"]]
        for state in (history[0], history[-1])
    )
    assert min(start) > 0.5
    if graph != "none":
        assert max(end) < 1e-5
    else:
        assert min(end) > 0.1
