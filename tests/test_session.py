"""A run made ready: what is left open is filled in, and every mistake shows before anything is written."""

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manyheads import memory
from manyheads.algorithms import DPSGD, DePRL, DisPFL, FedAvg, Local
from manyheads.errors import UserError
from manyheads.experiment import Experiment, Runtime
from manyheads.rounds import train
from manyheads.session import _sizes, open_session


def test_nothing_is_left_open(lab):
    session = open_session(Experiment(workers=4), lab.cpu)
    values = session.experiment.describe()
    assert [name for name, value in values.items() if value is None] == ["head", "loss", "metric", "transform"]
    # What a run writes down opens the same run.
    again = open_session(Experiment.from_json(session.experiment.to_json()), lab.cpu)
    assert again.experiment == session.experiment


def test_a_process_forked_from_one_that_has_trained_is_refused(lab, monkeypatch):
    lab.opened(lab.tiny(Local()))
    monkeypatch.setattr("manyheads.session._USED", {os.getpid()})
    lab.opened(lab.tiny(Local()))
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(UserError, match=r"forked from one that has trained.*get_context\('spawn'\)"):
        lab.opened(lab.tiny(Local()))


def test_all_algorithms_share_partition_graph_and_first_weights(lab):
    sessions = [lab.opened(lab.tiny(algorithm)) for algorithm in (DePRL(), DPSGD(), FedAvg(), Local())]
    first = sessions[0]
    for other in sessions[1:]:
        assert lab.held(other.federation) == lab.held(first.federation)
        for name, leaf in first.ctx.initial.params.items():
            assert torch.equal(other.ctx.initial.params[name], leaf)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"graph": "rong"}, "ring"),
        ({"model": "mpl"}, "Did you mean 'mlp'"),
        ({"split": "natura"}, "natural"),
        ({"head": "fc7"}, "fc"),
        ({"workers": 50}, "50"),
        ({"graph": "in-neighbours:2"}, "row-stochastic"),
        ({"graph": "server"}, "server"),
        ({"redraw": True}, "redraw"),
    ],
)
def test_mistakes_show_before_anything_runs(lab, changes, said):
    with pytest.raises(UserError) as error:
        lab.opened(lab.tiny(DePRL(), **changes))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_unknown_data_is_named_with_the_nearest(lab):
    with pytest.raises(UserError, match="Did you mean 'digits'"):
        open_session(Experiment(data="digit"), lab.cpu)


def test_a_regression_is_scored_by_its_loss_or_a_metric(lab):
    data = lab.blobs()
    numbers = replace(data, y_train=data.x_train[:, :2], y_test=data.x_test[:, :2], num_classes=None)

    def squares(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (output - y).square().mean(1)

    experiment = lab.tiny(DePRL(), data=numbers, loss=squares, rounds=6)
    records = list(train(experiment, lab.cpu))
    assert records[-1].train_loss < records[0].train_loss
    assert records[0].accuracy_mean < records[-1].accuracy_mean < 0
    assert records[0].majority_floor is None

    def error(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (output - y).abs().amax(1)

    measured = list(train(replace(experiment, metric=error), lab.cpu))[-1]
    assert measured.accuracy_mean > 0
    assert measured.train_loss == records[-1].train_loss


def test_a_transform_changes_training_alone(lab):
    def noisy(x: torch.Tensor, rng) -> torch.Tensor:
        return x + torch.from_numpy(rng.standard_normal(tuple(x.shape)))

    plain, changed = (list(train(lab.tiny(DePRL(), transform=t), lab.cpu)) for t in (None, noisy))
    assert plain[0].train_loss != changed[0].train_loss
    again = list(train(lab.tiny(DePRL(), transform=noisy), lab.cpu))
    assert [record.train_loss for record in again] == [record.train_loss for record in changed]


def test_workers_that_the_machine_can_never_hold_are_refused(lab, monkeypatch):
    experiment = lab.tiny(DePRL())
    room = 2 * 4 * 8 * (6 * 5 + 5 + 5 * 3 + 3)
    monkeypatch.setattr(memory, "total", lambda: room)
    lab.opened(experiment)
    monkeypatch.setattr(memory, "total", lambda: room - 1)
    with pytest.raises(UserError, match=r"4 workers of this model need .* enough for about 2: lower --workers"):
        lab.opened(experiment)
    with pytest.raises(UserError, match="4 workers of this model"):
        list(train(replace(experiment, rounds=1), lab.cpu))
    # New workers train heads alone, on what they are given.
    open_session(experiment, lab.cpu, constants={})


def test_samples_of_no_numbers_are_refused(lab):
    data = lab.blobs()
    empty = replace(data, x_train=data.x_train[:, :0], x_test=data.x_test[:, :0])
    with pytest.raises(UserError, match=r"samples of shape \[0\] hold no numbers"):
        lab.opened(lab.tiny(DePRL(), data=empty))


def test_experiment_and_runtime_are_told_apart(lab):
    with pytest.raises(UserError, match=r"expected Experiment, not Runtime: give manyheads\.Experiment"):
        next(train(Runtime()))  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"expected Runtime, not str: give manyheads\.Runtime"):
        next(train(lab.tiny(DePRL()), "runs/mine"))  # pyright: ignore[reportArgumentType]


def test_statistics_travel_under_the_shared_policy_alone(lab):
    def normed() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 3)
        )

    for norm in ("shared", "local"):
        session = lab.opened(lab.tiny(DePRL(), model=normed, norm=norm))
        kind, ctx = DePRL(), session.ctx
        state, _ = kind.local(kind.init(ctx), 0, ctx)
        mixed = kind.mix(state, 0, ctx)
        for name, leaf in state.buffers.items():
            travelled = not torch.equal(mixed.buffers[name], leaf)
            assert travelled == (norm == "shared" and leaf.is_floating_point()), name
    session = lab.opened(lab.tiny(DePRL(), model=normed, norm="group"))
    assert not session.ctx.initial.buffers


def test_what_the_user_should_know_is_noted(lab):
    session = lab.opened(lab.tiny(DisPFL(), graph="in-neighbours:2"))
    assert any("row-stochastic" in note for note in session.notes)

    def noisy() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.RReLU(), torch.nn.Linear(4, 3))

    session = lab.opened(lab.tiny(DePRL(), model=noisy))
    assert session.ctx.engine.name == "loop" and any("random numbers" in note for note in session.notes)


def test_a_softmax_before_the_loss_that_has_one_is_noted(lab):
    def net() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3), torch.nn.Softmax(1))

    def likelihood(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.nll_loss(output.log(), y, reduction="none")

    for loss in (None, likelihood):
        notes = lab.opened(lab.tiny(DePRL(), model=net, loss=loss)).notes
        assert any("ends in a Softmax" in note for note in notes) == (loss is None)
    inside = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Softmax(1), torch.nn.Linear(4, 3))
    for model in ("mlp:5", inside):
        assert not any("Softmax" in note for note in lab.opened(lab.tiny(DePRL(), model=model)).notes)


def test_weights_that_leave_nothing_to_share_are_noted(lab):
    def net(*trained: int) -> torch.nn.Module:
        layers = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in ((6, 4), (4, 4), (4, 3))))
        for number in range(3):
            layers[number].requires_grad_(number in trained)
        return layers

    said = "deprl has no weights to share: each worker trains its head alone."
    for algorithm, trained, noted in ((DePRL(), (2,), True), (DePRL(), (1, 2), False), (Local(), (2,), False)):
        assert (said in lab.opened(lab.tiny(algorithm, model=net(*trained))).notes) == noted
    assert not any("no weights to share" in note for note in lab.opened(lab.tiny(DPSGD(), model=net(2))).notes)


def test_where_a_run_was_computed_is_described(lab):
    described = open_session(lab.tiny(DePRL()), Runtime(device="cpu", threads=3, engine="loop")).describe_runtime()
    assert described["engine"] == "loop" and described["device"] == "cpu" and described["torch"] == torch.__version__
    assert described["threads"] == 3


def test_the_samples_of_all_are_counted_where_all_may_know(lab):
    """Each of two processes hosts two workers; a site learns of the others only what a server weighs by."""
    half = lab.opened(lab.tiny(DePRL())).everyone.take(range(2))

    def network(*, open_to_all: bool) -> Any:
        return SimpleNamespace(
            may_gather_private=open_to_all, num_workers=4, workers=range(2), gather=lambda own: torch.cat([own, own])
        )

    everywhere, at_sites = network(open_to_all=True), network(open_to_all=False)
    assert _sizes(half, DePRL(), everywhere).tolist() == [9, 5, 9, 5]
    assert _sizes(half, DePRL(), at_sites).tolist() == [9, 5, 0, 0]
    assert _sizes(half, FedAvg(), at_sites).tolist() == [9, 5, 9, 5]
    assert _sizes(half, FedAvg(weighting="uniform"), at_sites).tolist() == [9, 5, 0, 0]
