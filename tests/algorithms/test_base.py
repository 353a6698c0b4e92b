"""What algorithms share: the rates of a round, who takes part, and what travels with a group of parameters."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from manyheads.algorithms import DPSGD, Algorithm, FedAvg, Local
from manyheads.algorithms.base import Rates, State, amount, run_phases
from manyheads.algorithms.phases import WHOLE
from manyheads.engine.phase import SGD, Epochs, Phase, Steps
from manyheads.errors import UserError
from manyheads.experiment import Experiment, Runtime
from manyheads.rounds import run
from manyheads.session import open_session
from manyheads.tree import add_prefix, strip_prefix


class Masked(nn.Module):
    """Attention over the rows of a digit, each looking at those before it; and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.top = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)
        self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))
        self.register_buffer("places", torch.linspace(0, 1, 8)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x.flatten(1).unflatten(1, (8, 8))) + self.get_buffer("places")
        weights = (h @ h.mT + self.get_buffer("mask")).softmax(-1)
        return self.top(self.norm((weights @ h).mean(1)))


def test_rates_fall_and_nothing_else_does() -> None:
    rates = Rates(0.4, 0.8, 0.9, 0.01, 5.0, decay=0.5)
    assert [rates.sgd(round) for round in (0, 1, 3)] == [SGD(lr, 0.9, 0.01, 5.0) for lr in (0.4, 0.2, 0.05)]
    assert [rates.sgd(round, head=True) for round in (0, 3)] == [SGD(lr, 0.9, 0.01, 5.0) for lr in (0.8, 0.1)]


def test_steps_go_before_passes_even_when_there_are_none() -> None:
    assert (amount(3, None), amount(3, 2), amount(3, 0)) == (Epochs(3), Steps(2), Steps(0))


def test_rows_are_of_the_hosted_workers(lab) -> None:
    ctx = replace(lab.opened(lab.tiny(DPSGD())).ctx, ids=(3, 0))
    assert ctx.rows(np.array([True, False, False, True])) is None
    rows = ctx.rows(np.array([True, True, True, False]))
    assert rows is not None and rows.tolist() == [1]
    # Four samples a batch: worker 3 has 7, worker 0 has 9.
    assert ctx.steps(Epochs(2), None).tolist() == [4, 6] and ctx.steps(Epochs(2), rows).tolist() == [0, 6]


def test_masks_stay_and_statistics_travel() -> None:
    algorithm = DPSGD(evaluate="mean-model")
    experiment = Experiment(algorithm=algorithm, model=Masked, head="top", workers=4, rounds=2)
    session = open_session(experiment, Runtime(device="cpu", threads=1))
    sent = session.ctx.statistics(session.ctx.initial, {"representation"})
    assert sent.keys() == {"representation.norm.running_mean", "representation.norm.running_var"}
    assert not session.ctx.statistics(session.ctx.initial, {"head"})
    *_, last = run(session)
    assert last.record is not None and last.record.accuracy_mean > 0.3
    numbers = sum(p.numel() for p in session.ctx.model.parameters()) + 2 * 8
    assert last.record.bytes_sent_per_worker == 2 * 2 * 4 * numbers, "two rounds to two neighbours, four bytes each"


class Peak(nn.Module):
    """Keeps the largest value that it has seen, of which there is none at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.tensor([-torch.inf]))

    def forward(self, x: Tensor) -> Tensor:
        largest = self.get_buffer("largest")
        if self.training:
            largest.copy_(torch.maximum(largest, x.detach().max()))
        return x


@pytest.mark.parametrize(("norm", "travels"), [("shared", True), ("local", False)])
def test_statistics_travel_only_where_they_are_shared(lab: SimpleNamespace, norm: str, travels: bool) -> None:
    """And an infinity never does: times a weight of 0 it would be no number."""
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), Peak(), nn.Linear(5, 3)).double()
    ctx = lab.opened(lab.tiny(DPSGD(), model=net, head="3", norm=norm)).ctx
    means = {"representation.1.running_mean", "representation.1.running_var"}
    assert ctx.statistics(ctx.initial, WHOLE).keys() == (means if travels else set())
    own = torch.arange(4.0).double()[:, None]
    buffers = {name: leaf + own if name in means else leaf for name, leaf in ctx.initial.buffers.items()}
    mixed = ctx.mix(State(ctx.initial.params, buffers), WHOLE, 0).buffers
    for name in means:
        assert torch.equal(mixed[name], buffers[name]) != travels


def test_the_mean_model_is_as_exact_as_the_models(lab: SimpleNamespace) -> None:
    ctx = lab.opened(lab.tiny(DPSGD())).ctx
    params = {name: torch.randn_like(leaf) for name, leaf in ctx.initial.params.items()}
    for name, leaf in ctx.mean_model(State(params, {})).params.items():
        assert leaf.dtype == torch.float64
        torch.testing.assert_close(leaf, params[name].mean(0).expand_as(leaf), rtol=1e-13, atol=1e-13)


def test_a_phase_of_nothing_leaves_no_trace(lab: SimpleNamespace) -> None:
    """Its loss, of no sample, would be the round's."""
    ctx = lab.opened(lab.tiny(DPSGD())).ctx
    phases = [Phase(name, WHOLE, count, SGD(0.1), ctx.objective) for name, count in (("a", Steps(1)), ("b", Epochs(0)))]
    _, log = run_phases(ctx.initial, phases, 0, ctx, None)
    assert list(log) == ["a"]


def test_a_phase_is_checked_against_the_workers(lab: SimpleNamespace) -> None:
    """A mask of one row would be everybody's."""
    ctx = lab.opened(lab.tiny(DPSGD())).ctx
    mask = {name: torch.ones_like(leaf[:1], dtype=torch.uint8) for name, leaf in ctx.initial.params.items()}
    phase = Phase("body", WHOLE, Steps(1), SGD(0.1), ctx.objective, mask=mask)
    with pytest.raises(UserError, match=r"mask of a phase has \[1, 5, 6\] for .*, but the workers have \[4, 5, 6\]"):
        run_phases(ctx.initial, [phase], 0, ctx, None)


def test_phases_of_a_round_are_told_apart_by_their_names(lab: SimpleNamespace) -> None:
    """Or the log would hold one of two, and simulated time run half as fast."""
    ctx = lab.opened(lab.tiny(DPSGD())).ctx
    phase = Phase("body", WHOLE, Steps(2), ctx.rates.sgd(0), ctx.objective)
    with pytest.raises(UserError, match="two phases of a round are called 'body': give each its own name"):
        run_phases(ctx.initial, [phase, phase], 0, ctx, None)
    _, log = run_phases(ctx.initial, [phase, replace(phase, name="again")], 0, ctx, None)
    assert {name: work.steps.tolist() for name, work in log.items()} == {"body": [2] * 4, "again": [2] * 4}


def test_a_copy_of_the_net_is_trained_as_a_state_of_its_own(lab: SimpleNamespace) -> None:
    """In a group of the state it would stay as it is, and its loss would be that of the net."""
    session = lab.opened(lab.tiny(DPSGD()))
    ctx, personal = session.ctx, add_prefix(session.ctx.initial.params, "personal")
    state = State({**ctx.initial.params, **personal}, ctx.initial.buffers)
    phase = Phase("body", frozenset({"personal"}), Steps(1), SGD(0.1), ctx.objective)
    with pytest.raises(
        UserError, match=r"groups of the net \(head, representation\), and 'personal' is not one of them: .*strip_"
    ):
        run_phases(state, [phase], 0, ctx, None)
    moved, _ = run_phases(State(strip_prefix(personal, "personal"), {}), [replace(phase, update=WHOLE)], 0, ctx, None)
    assert not any(torch.equal(leaf, ctx.initial.params[name]) for name, leaf in moved.params.items())


@pytest.mark.parametrize("rows", [[0, 1], np.array([True] * 4), torch.tensor([True, False, True, True])])
def test_rows_are_numbers(lab: SimpleNamespace, rows: Any) -> None:
    """Yes and no for every worker would be the rows 0 and 1, each trained again and again."""
    ctx = lab.opened(lab.tiny(DPSGD())).ctx
    with pytest.raises(UserError, match=r"rows \(.*\) are not row numbers: give what ctx\.present\(round\) returns"):
        run_phases(ctx.initial, [], 0, ctx, rows)


@pytest.mark.parametrize("algorithm", [DPSGD(), FedAvg(), Local()], ids=lambda algorithm: algorithm.exchange)
def test_who_is_absent_does_not_train(lab: SimpleNamespace, algorithm: Algorithm) -> None:
    """Or every number of a run with --worker-failure would be of another one."""
    ctx = lab.opened(lab.tiny(algorithm, worker_failure=0.3)).ctx
    phase = Phase("body", WHOLE, Steps(1), ctx.rates.sgd(0), ctx.objective)
    there = {round: ctx.present(round) for round in range(20)}
    whole = next(round for round, rows in there.items() if rows is None)
    assert run_phases(ctx.initial, [phase], whole, ctx, None)[1]["body"].steps.tolist() == [1, 1, 1, 1]
    round, present = next((round, rows) for round, rows in there.items() if rows is not None)
    for rows in (present, present[1:], present[:0]):
        assert run_phases(ctx.initial, [phase], round, ctx, rows)[1]["body"].steps.sum() == len(rows)
    away = next(row for row in range(4) if row not in present)
    for rows, row in ((None, away), (torch.tensor([*present, away]), away), (torch.tensor([4]), 4)):
        says = rf"take in row {row}, whose worker is absent from round {round + 1}: give what ctx\.present\(round\)"
        with pytest.raises(UserError, match=says):
            run_phases(ctx.initial, [phase], round, ctx, rows)


@pytest.mark.parametrize("exchange", ["server", "none"])
def test_who_has_no_neighbours_does_not_mix(lab: SimpleNamespace, exchange: str) -> None:
    """The ring that says who is present would be mixed over, and every output would say that there is no graph."""
    ctx = lab.opened(lab.tiny(FedAvg() if exchange == "server" else Local())).ctx
    assert ctx.exchange == exchange
    with pytest.raises(UserError, match=rf"exchange is '{exchange}', so there are no neighbours: .*average"):
        ctx.mix(ctx.initial, WHOLE, 0)


@pytest.mark.parametrize("weights", [[1, 1, 1], [1, 1, -1, 1], [0, 0, 0, 0], [1, 1, float("nan"), 1], None])
def test_a_server_averages_by_shares_of_all_workers(lab: SimpleNamespace, weights: Any) -> None:
    ctx = lab.opened(lab.tiny(FedAvg())).ctx
    with pytest.raises(
        UserError, match=r"average: weights .* do not fit 4 workers: give each of them a number of at le"
    ):
        ctx.average(ctx.initial, WHOLE, weights)
    assert ctx.average(ctx.initial, WHOLE, [1, 0, 0, 1]).params.keys() == ctx.initial.params.keys()
    with pytest.raises(UserError, match=r"average: weights \[1, 1, 1, 997 more\] do not fit 4 workers"):
        ctx.average(ctx.initial, WHOLE, np.ones(1000, dtype=int))
