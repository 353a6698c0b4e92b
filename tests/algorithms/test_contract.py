"""What every algorithm of the registry promises, whatever it does."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from manyheads.algorithms import REGISTRY, Algorithm, State
from manyheads.checkpoint import Checkpoints
from manyheads.data import federate
from manyheads.experiment import Experiment
from manyheads.network.in_process import InProcess
from manyheads.rounds import train
from manyheads.tree import clone, group


def changed(kind: type[Algorithm]) -> Algorithm:
    """The algorithm with every option away from its default: other words, steps for passes, half of a share."""
    options: dict[str, Any] = {}
    hints = get_type_hints(kind)
    for spec in dataclasses.fields(kind):  # pyright: ignore[reportArgumentType]
        hint, default = hints[spec.name], spec.default
        if get_origin(hint) is Literal:
            options[spec.name] = next(word for word in get_args(hint) if word != default)
        elif default is None:
            options[spec.name] = 2
        elif isinstance(default, float):
            options[spec.name] = default / 2
    return kind(**options)


DEFAULT = {name: kind() for name, kind in REGISTRY.items()}
CHANGED = {f"{name}-changed": changed(kind) for name, kind in REGISTRY.items()}
VARIANTS = DEFAULT | CHANGED


def normed(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(input_shape[0], 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, num_outputs)
    )


class Shifted(nn.Module):
    """Adds a number that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


@pytest.fixture(params=VARIANTS)
def algorithm(request) -> Algorithm:
    return VARIANTS[request.param]


@pytest.fixture(params=VARIANTS)
def experiment(request, lab) -> Experiment:
    """The defaults on a plain net, everything changed on one with statistics and dropout."""
    model = normed if request.param in CHANGED else "mlp:5"
    return lab.tiny(VARIANTS[request.param], model=model)


def leaves(state: State) -> dict[str, Tensor]:
    return {
        **{f"params.{n}": v for n, v in state.params.items()},
        **{f"buffers.{n}": v for n, v in state.buffers.items()},
    }


def assert_same_bits(a: State, b: State) -> None:
    assert list(leaves(a)) == list(leaves(b))
    for name, leaf in leaves(a).items():
        assert torch.equal(leaf, leaves(b)[name]), name


def copy(state: State) -> State:
    return State(clone(state.params), clone(state.buffers))


def test_every_option_can_be_changed():
    for name, kind in REGISTRY.items():
        default, other = dataclasses.asdict(DEFAULT[name]), dataclasses.asdict(CHANGED[f"{name}-changed"])
        same = {option for option in default if default[option] == other[option]}
        assert all(option.endswith("epochs") for option in same), name
        assert kind.name == name and kind.title and kind.__module__.startswith("manyheads.algorithms.")


@pytest.mark.parametrize("name", REGISTRY)
def test_a_parameter_may_be_a_single_number(name, lab):
    net = nn.Sequential(nn.Linear(6, 5), Shifted(), nn.ReLU(), nn.Linear(5, 3))
    start, *_, end = lab.states(lab.opened(lab.tiny(DEFAULT[name], model=net)), 1)
    singles = [leaf for leaf in start.params if leaf.endswith(".by") and "mask" not in leaf]
    assert len(singles) == (2 if name == "ditto" else 1)
    for leaf in singles:
        assert (start.params[leaf] == 1).all() and not torch.equal(end.params[leaf], start.params[leaf]), leaf


def test_deterministic(experiment, lab):
    first, second = (lab.states(lab.opened(experiment))[-1] for _ in range(2))
    assert_same_bits(first, second)


def test_the_seed_matters(experiment, lab):
    first, second = (lab.states(lab.opened(dataclasses.replace(experiment, seed=seed)), 1)[-1] for seed in (1, 2))
    assert any(not torch.equal(leaf, second.params[name]) for name, leaf in first.params.items())


def test_no_state_is_changed(experiment, lab):
    session = lab.opened(experiment)
    kind, ctx = experiment.algorithm, session.ctx
    initial = copy(ctx.initial)
    state = kind.init(ctx)
    for round in range(2):
        for move in (
            lambda s, r=round: kind.local(s, r, ctx)[0],
            lambda s, r=round: kind.mix(s, r, ctx),
            lambda s: (kind.models(s, ctx), s)[1],
        ):
            before = copy(state)
            after = move(state)
            assert_same_bits(state, before)
            assert_same_bits(ctx.initial, initial)
            state = after


def test_training_and_mixing_move_something(experiment, lab):
    session = lab.opened(experiment)
    kind, ctx = experiment.algorithm, session.ctx
    state = kind.init(ctx)
    trained, log = kind.local(state, 0, ctx)
    assert any(not torch.equal(leaf, state.params[name]) for name, leaf in trained.params.items())
    assert log
    for work in log.values():
        assert work.loss.shape == work.steps.shape == (4,)
        assert (work.steps > 0).tolist() == (~work.loss.isnan()).tolist()
    mixed = kind.mix(trained, 0, ctx)
    moved = {group(name) for name, leaf in mixed.params.items() if not torch.equal(leaf, trained.params[name])}
    assert bool(moved) == (kind.name != "local")


@pytest.mark.parametrize("name", REGISTRY)
def test_a_net_makes_three_passes_a_round_unless_told_otherwise(name, lab):
    """So that comparisons are of equal work; Ditto has a second net, which makes as many."""
    kind, ctx = DEFAULT[name], lab.opened(lab.tiny(DEFAULT[name])).ctx
    _, log = kind.local(kind.init(ctx), 0, ctx)
    steps = torch.stack([work.steps for work in log.values()]).sum(0)
    assert steps.tolist() == [3 * passed * (1 + (name == "ditto")) for passed in (3, 2, 2, 2)]


@pytest.mark.parametrize("name", CHANGED)
def test_steps_are_taken_instead_of_passes(name, lab):
    kind, ctx = CHANGED[name], lab.opened(lab.tiny(CHANGED[name])).ctx
    _, log = kind.local(kind.init(ctx), 0, ctx)
    for work in log.values():
        assert set(work.steps[work.steps > 0].tolist()) == {2}


def test_shapes_and_types_stay(experiment, lab):
    session = lab.opened(experiment)
    first, *later = lab.states(session, 2)
    for state in later:
        assert [(n, v.shape, v.dtype) for n, v in leaves(state).items()] == [
            (n, v.shape, v.dtype) for n, v in leaves(first).items()
        ]
    assert all(len(leaf) == 4 for leaf in leaves(first).values())
    weights = [leaf for leaf in first.params.values() if leaf.is_floating_point()]
    assert weights and all(leaf.dtype == torch.float64 for leaf in weights)


def test_every_worker_deploys_a_whole_net(experiment, lab):
    session = lab.opened(experiment)
    state = lab.states(session, 1)[-1]
    models = experiment.algorithm.models(state, session.ctx)
    net = session.ctx.model
    for worker in range(4):
        net.load_state_dict({n: v[worker] for n, v in {**models.params, **models.buffers}.items()}, strict=True)
    assert list(models.params) == [name for name, _ in net.named_parameters()]


def test_relabelling_the_workers_relabels_the_result(experiment, lab, monkeypatch):
    """The id travels with the shard: in another order of rows every worker draws and computes the same."""
    if getattr(experiment.algorithm, "participation", 1.0) < 1:
        changed = dataclasses.replace(experiment.algorithm, participation=1.0)  # pyright: ignore[reportArgumentType, reportCallIssue]
        experiment = dataclasses.replace(experiment, algorithm=changed)
    session = lab.opened(experiment)
    expected = lab.states(session)[-1]
    order = [2, 0, 3, 1]
    matrix = session.mixing.rows(0).dense()[np.ix_(order, order)]
    mixing = lab.mixing_of(matrix)
    monkeypatch.setattr("manyheads.derived.federate", lambda *a, **k: federate(*a, **k).take(order))
    monkeypatch.setattr("manyheads.derived.build_mixing", lambda *a, **k: mixing)
    relabelled = lab.opened(experiment)
    assert relabelled.ctx.ids == tuple(order)
    state = lab.states(relabelled)[-1]
    for name, leaf in leaves(state).items():
        torch.testing.assert_close(leaf, leaves(expected)[name][order], rtol=1e-10, atol=1e-10, msg=name)


class Alone:
    """A process that hosts one worker, whom nobody hears and who hears nobody."""

    def __init__(self, worker: int, num_workers: int) -> None:
        self.num_workers, self.workers = num_workers, range(worker, worker + 1)

    def mix(self, params: dict[str, Tensor], round: int, mask: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        return params if mask is None else {n: v * (mask[n] > 0) if n in mask else v for n, v in params.items()}

    def present(self, round: int) -> np.ndarray:
        return np.ones(self.num_workers, dtype=bool)


def test_identity_mixing_is_independent_training(experiment, lab, monkeypatch):
    kind = experiment.algorithm
    if kind.exchange == "server":
        return  # a server's average is never the identity
    session = lab.opened(experiment, network=InProcess(lab.mixing_of(np.eye(4)), kind.private))
    sizes, together = session.ctx.sizes, lab.states(session)[-1]
    for worker in range(4):
        with monkeypatch.context() as patch:
            patch.setattr("manyheads.derived.federate", lambda *a, w=worker, **k: federate(*a, **k).take([w]))
            session = lab.opened(experiment, network=Alone(worker, 4), sizes=sizes)
            alone = lab.states(session)[-1]
        for name, leaf in leaves(alone).items():
            assert torch.equal(leaf[0], leaves(together)[name][worker]), name


class Spy(InProcess):
    """Writes down what is sent."""

    sent: set[str]

    def mix(self, params, round, mask=None):
        self.sent |= params.keys()
        return super().mix(params, round, mask)

    def average(self, params, weights):
        self.sent |= params.keys()
        return super().average(params, weights)


def test_private_leaves_never_reach_the_network(experiment, lab):
    session = lab.opened(experiment)
    kind = experiment.algorithm
    spy = Spy(session.mixing, kind.private)
    spy.sent = set()
    state = lab.states(lab.opened(experiment, network=spy), 2)[-1]
    # The declaration leaves nothing out: all weights that are not private are sent.
    groups = {group(name) for name in state.params}
    assert kind.private <= groups
    assert {group(name) for name in spy.sent} == groups - kind.private - {"mask", "shared_mask"}
    if kind.private:
        with pytest.raises(RuntimeError, match="private"):
            spy.mix({n: v for n, v in state.params.items() if group(n) in kind.private}, 0)
        with pytest.raises(RuntimeError, match="private"):
            spy.average({n: v for n, v in state.params.items() if group(n) in kind.private}, np.ones(4))


def test_nobody_learns_what_is_private(experiment, lab):
    """Whatever worker 0 holds in private, the others come out of mixing the same."""
    session = lab.opened(experiment)
    kind, ctx = experiment.algorithm, session.ctx
    state, _ = kind.local(kind.init(ctx), 0, ctx)
    secret = copy(state)
    for name, leaf in [*secret.params.items(), *secret.buffers.items()]:
        if group(name) in kind.private:
            leaf[0] = 1 - leaf[0] if leaf.dtype == torch.uint8 else leaf[0] * 3 + 1
    for name, leaf in leaves(kind.mix(secret, 0, ctx)).items():
        assert torch.equal(leaf[1:], leaves(kind.mix(state, 0, ctx))[name][1:]), name


def test_json_round_trip(algorithm):
    experiment = Experiment(algorithm=algorithm, split="iid", graph="full", seed=7, clip=0.0, relabel=True)
    again = Experiment.from_json(experiment.to_json())
    assert again == experiment
    assert type(again.algorithm) is type(algorithm)
    assert again.to_json() == experiment.to_json() and again.run_id == experiment.run_id


def test_every_option_is_part_of_the_run_id(algorithm):
    run_id = Experiment(algorithm=algorithm).run_id
    default = type(algorithm)()
    for option in dataclasses.fields(default):  # pyright: ignore[reportArgumentType]
        value = getattr(default, option.name)
        if value != getattr(algorithm, option.name):
            one_back = dataclasses.replace(algorithm, **{option.name: value})  # pyright: ignore[reportArgumentType]
            assert Experiment(algorithm=one_back).run_id != run_id, option.name


def test_the_loss_falls(algorithm, lab):
    data = lab.blobs(sizes=(17, 13, 16, 15))
    records = list(train(lab.tiny(algorithm, data=data, model="mlp:16", rounds=10, decay=1.0), lab.cpu))
    assert records[-1].train_loss < 0.9 * records[0].train_loss
    assert records[-1].loss < 0.9 * records[0].loss


def absent_rounds(session) -> Iterator[tuple[int, list[int]]]:
    for round in range(session.ctx.rounds):
        gone = np.flatnonzero(~session.ctx.network.present(round)).tolist()
        if gone:
            yield round, gone


def test_an_absent_worker_keeps_its_state(experiment, lab):
    session = lab.opened(dataclasses.replace(experiment, worker_failure=0.4, rounds=4))
    kind = experiment.algorithm
    history = lab.states(session)
    rounds = list(absent_rounds(session))
    assert rounds
    for round, gone in rounds:
        before, after = leaves(history[round]), leaves(history[round + 1])
        own = [name for name in before if kind.exchange != "server" or name.split(".")[1] in kind.private]
        for name in own:
            for worker in gone:
                assert torch.equal(before[name][worker], after[name][worker]), (name, round, worker)


def test_absent_workers_cost_nothing(experiment, lab):
    session = lab.opened(dataclasses.replace(experiment, worker_failure=0.4, rounds=4))
    kind, ctx, gone_once = experiment.algorithm, session.ctx, False
    for round, gone in absent_rounds(session):
        before = ctx.network.traffic.sent[gone].copy(), ctx.network.traffic.received[gone].copy()
        _, log = kind.local(kind.init(ctx), round, ctx)
        assert not any(work.steps[gone].any() for work in log.values())
        kind.mix(kind.init(ctx), round, ctx)
        assert np.array_equal(ctx.network.traffic.sent[gone], before[0])
        assert np.array_equal(ctx.network.traffic.received[gone], before[1])
        gone_once = True
    assert gone_once


def snapshot(path, experiment):
    found, notes = Checkpoints(path / "checkpoint", run_id=experiment.run_id, num_workers=4, workers=range(4)).load()
    assert found is not None and not notes
    return found


def numbers(record) -> dict[str, Any]:
    """What must not depend on how often a run was interrupted."""
    return {n: v for n, v in dataclasses.asdict(record).items() if n not in ("seconds", "peak_memory_bytes")}


def test_a_resumed_run_is_the_uninterrupted_one(experiment, lab, tmp_path):
    experiment = dataclasses.replace(experiment, rounds=3)
    whole = dataclasses.replace(lab.cpu, out=tmp_path / "whole", checkpoint_every=1)
    parts = dataclasses.replace(lab.cpu, out=tmp_path / "parts", checkpoint_every=1)
    expected = list(train(experiment, whole))
    first = train(experiment, parts)
    found = [next(first), next(first)]
    first.close()
    found += train(experiment, parts)
    assert [numbers(record) for record in found] == [numbers(record) for record in expected]
    a, b = (snapshot(path, lab.opened(experiment).experiment) for path in (whole.out, parts.out))
    assert_same_bits(State(a.params, a.buffers), State(b.params, b.buffers))
    assert np.array_equal(a.sent, b.sent) and np.array_equal(a.received, b.received)


def test_a_state_holds_as_much_as_memory_is_planned_for(algorithm, lab):
    ctx = lab.opened(lab.tiny(algorithm, precision="float32")).ctx
    state, net = (
        sum(leaf.numel() * leaf.element_size() for leaf in params.values())
        for params in (algorithm.init(ctx).params, ctx.initial.params)
    )
    assert state == net * (1 + algorithm.extra_rows)


def test_a_longer_run_begins_like_a_shorter_one(algorithm, lab, tmp_path):
    """A finished run is extended by a larger number of rounds, unless a schedule depends on it."""
    if algorithm.uses_rounds:
        assert lab.tiny(algorithm, rounds=1).run_id != lab.tiny(algorithm, rounds=2).run_id
        return
    runtime = dataclasses.replace(lab.cpu, out=tmp_path / "run")
    short = list(train(lab.tiny(algorithm, rounds=1), runtime))
    longer = list(train(lab.tiny(algorithm, rounds=3), runtime))
    expected = list(train(lab.tiny(algorithm, rounds=3), lab.cpu))
    assert [record.round for record in longer] == [2, 3]
    assert [numbers(r) for r in short + longer] == [numbers(r) for r in expected]
