import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from manyheads.algorithms import DPSGD, REGISTRY, DePRL, FedAvg, Local
from manyheads.algorithms.base import Work
from manyheads.errors import UserError
from manyheads.experiment import Experiment
from manyheads.metrics.clock import Clock, Speed, measure_step_seconds
from manyheads.models import build
from manyheads.network.in_process import InProcess
from manyheads.recipes import RECIPES, is_guess, step_seconds
from manyheads.rounds import run, train
from manyheads.topology import build_mixing

SPEED = Speed(step_seconds=0.5, latency=0.25, bandwidth=100.0, server=False)
NOTHING = np.zeros(3, dtype=np.int64)
STEPS = np.array([2, 6, 4])


def test_the_slowest_worker_and_the_busiest_link() -> None:
    sent, received = np.array([100, 300, 0]), np.array([200, 0, 400])
    assert SPEED.round_seconds(STEPS, sent, received) == 6 * 0.5 + 0.25 + 400 / 100


def test_a_servers_link_is_shared_by_all_uploads_and_then_by_all_downloads() -> None:
    sent, received = np.array([100, 300, 0]), np.array([200, 200, 0])
    expected = 6 * 0.5 + 2 * 0.25 + 400 / 100 + 400 / 100
    assert replace(SPEED, server=True).round_seconds(STEPS, sent, received) == expected


@pytest.mark.parametrize("server", [True, False])
def test_who_says_nothing_waits_for_no_message(server: bool) -> None:
    assert replace(SPEED, server=server).round_seconds(STEPS, NOTHING, NOTHING) == 3.0


def test_a_clock_counts_what_each_round_added() -> None:
    network = InProcess(build_mixing("ring", 3), frozenset())
    network.traffic.sent += 1000  # before this start of the run
    clock = Clock(SPEED, network, 10.0)
    head, body = (torch.tensor(steps) for steps in ([4, 8, 0], [3, 0, 0]))
    clock.tick({"head": Work(torch.zeros(3), head, share=0.25), "body": Work(torch.zeros(3), body)})
    assert clock.seconds == 10 + 4 * 0.5, "the first worker's steps: four of a quarter, three whole ones"
    network.traffic.received += 100
    clock.tick({})
    assert clock.seconds == 12 + 0.25 + 1


def seconds(experiment: Experiment, lab: SimpleNamespace) -> list[float]:
    return [record.simulated_seconds for record in train(experiment, lab.cpu)]


def test_a_run_by_hand(lab: SimpleNamespace) -> None:
    """9, 5, 8 and 7 samples in batches of 4 are 3, 2, 2 and 2 mini-batches a pass; phi of mlp:5 is 35 doubles.

    While phi is frozen, a mini-batch takes a third of its time.
    """
    given = {"step_seconds": 1.0, "link_latency": 0.1, "link_bandwidth": 1000.0}
    ring = lab.tiny(DePRL(head_epochs=2, body_epochs=1), **given)
    assert seconds(ring, lab) == pytest.approx([5 + 0.1 + 2 * 35 * 8 / 1000, 2 * (5 + 0.1 + 0.56)])
    by_steps = lab.tiny(DePRL(head_steps=3, body_steps=1), **given)
    assert seconds(by_steps, lab)[0] == pytest.approx(2 + 0.1 + 0.56)
    nothing_shared = lab.tiny(DePRL(head_epochs=2), head="all", **given)
    assert seconds(nothing_shared, lab)[0] == pytest.approx(6), "the whole net"
    full = lab.tiny(DPSGD(epochs=1), graph="full", **given)
    assert seconds(full, lab)[0] == pytest.approx(3 + 0.1 + 3 * (35 + 18) * 8 / 1000)
    server = lab.tiny(FedAvg(epochs=1), **given)
    assert seconds(server, lab)[0] == pytest.approx(3 + 0.2 + 2 * 4 * (35 + 18) * 8 / 1000)
    assert seconds(lab.tiny(Local(epochs=2), **given), lab) == [6.0, 12.0]


def test_an_absent_worker_costs_nothing(lab: SimpleNamespace) -> None:
    session = lab.opened(lab.tiny(FedAvg(epochs=1, participation=0.25)))
    state, sizes = session.ctx.initial, session.ctx.sizes
    _, log = session.experiment.algorithm.local(state, 0, session.ctx)
    steps = log["body"].steps
    (present,) = np.flatnonzero(session.ctx.participants(0, 0.25))
    assert steps.nonzero().flatten().tolist() == [present]
    assert steps[present] == -(-sizes[present] // 4)


@pytest.mark.parametrize("name", REGISTRY)
def test_the_steps_of_a_round_are_those_the_engine_takes(name: str, lab: SimpleNamespace) -> None:
    """A loss is there exactly where a worker has taken a step."""
    session = lab.opened(lab.tiny(REGISTRY[name](), worker_failure=0.4))
    algorithm, ctx = session.experiment.algorithm, session.ctx
    _, log = algorithm.local(algorithm.init(ctx), 0, ctx)
    assert log
    for work in log.values():
        assert work.steps.dtype == torch.int64
        assert torch.equal(work.steps > 0, ~work.loss.isnan())


def test_a_resumed_run_shows_the_same_time(tmp_path: Path, lab: SimpleNamespace) -> None:
    """To the last bit, and also where the checkpoint's round was not evaluated."""
    experiment = lab.tiny(DePRL(), rounds=5, step_seconds=0.1, link_latency=0.3, link_bandwidth=777.0)
    whole = seconds(experiment, lab)
    session = lab.opened(experiment)
    runtime = replace(session.runtime, out=tmp_path / "run", checkpoint_every=3, eval_every=4)
    steps = run(replace(session, runtime=runtime))
    for _ in range(3):
        next(steps)
    steps.close()
    list(train(experiment, replace(runtime, eval_every=1)))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["simulated_seconds"] for line in lines] == whole[3:]


def test_every_net_of_a_recipe_has_its_speed() -> None:
    for name, recipe in RECIPES.items():
        full = Experiment(data=name).complete(recipe)
        assert full.step_seconds == step_seconds(recipe.model, recipe.batch_size) > 0
        assert not is_guess(full.step_seconds, recipe.model, recipe.batch_size)
    assert step_seconds("mlp:200,100", 32) == 2 * step_seconds("mlp", 16)
    for own in ("package.module:factory", nn.Linear(1, 1)):
        assert is_guess(step_seconds(own, 16), own, 16) and not is_guess(0.5, own, 16)
    assert Experiment(step_seconds=0.5).complete(RECIPES["digits"]).step_seconds == 0.5


def test_a_guess_is_said_and_a_measurement_is_not(lab: SimpleNamespace) -> None:
    own = lab.tiny(DePRL(), model=nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)))
    session = lab.opened(own)
    assert any("guess" in note for note in session.notes)
    # A comparison, and what is begun from another run, come with every value filled in.
    assert any("guess" in note for note in lab.opened(session.experiment).notes)
    assert not any("guess" in note for note in lab.opened(replace(own, step_seconds=0.1)).notes)
    assert not any("guess" in note for note in lab.opened(lab.tiny(DePRL())).notes)


@pytest.mark.parametrize(
    "wrong", [{"step_seconds": -1.0}, {"link_latency": -0.1}, {"link_bandwidth": 0.0}, {"step_seconds": float("inf")}]
)
def test_impossible_speeds_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong)).replace("_", "-")):
        Experiment(**wrong)  # pyright: ignore[reportArgumentType]


def test_measuring_leaves_the_net_and_torch_alone() -> None:
    net = build("mlp:8", (6,), 3)
    before, threads = {name: leaf.clone() for name, leaf in net.state_dict().items()}, torch.get_num_threads()
    small, large = (measure_step_seconds(net, torch.rand(size, 6)) for size in (1, 4000))
    assert 0 < small < large < 10
    assert torch.get_num_threads() == threads
    assert all(torch.equal(leaf, before[name]) for name, leaf in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
