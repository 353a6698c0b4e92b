"""Ditto by hand: two models, one of them pulled to what was received."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.algorithms import Ditto
from manyheads.tree import select, strip_prefix

WHOLE = frozenset({"representation", "head"})


def gradient(session, values: dict[str, Tensor], worker: int) -> dict[str, Tensor]:
    """Of one worker's loss over all its samples."""
    net = copy.deepcopy(session.ctx.model).train()
    net.load_state_dict(values)
    shards = session.federation.train
    here = shards.rows(worker)
    F.cross_entropy(net(shards.x[shards.index[here]]), shards.y[here]).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def test_two_rounds_by_hand(lab):
    """Full batches, two steps a round. The pull is towards the model as it was received, not as it was trained."""
    lam, lr, momentum, decay, weight_decay, steps = 0.7, 0.2, 0.5, 0.9, 0.01, 2
    experiment = lab.tiny(
        Ditto(lam=lam, steps=steps, weighting="samples"),
        batch_size=64,
        lr=lr,
        momentum=momentum,
        decay=decay,
        weight_decay=weight_decay,
        clip=0.0,
    )
    session = lab.opened(experiment)
    history = lab.states(session)
    server = {name: leaf[0] for name, leaf in select(history[0].params, WHOLE).items()}
    personal = [dict(server) for _ in range(4)]
    share = torch.tensor(session.federation.train.sizes, dtype=torch.float64)
    share = share / share.sum()
    for round, state in enumerate(history[1:]):
        rate = lr * decay**round
        copies = []
        for worker in range(4):
            u, v, speed = dict(server), personal[worker], {n: torch.zeros_like(w) for n, w in server.items()}
            for _ in range(steps):
                g = gradient(session, u, worker)
                speed = {n: momentum * speed[n] + g[n] + weight_decay * u[n] for n in u}
                u = {n: u[n] - rate * speed[n] for n in u}
                g = gradient(session, v, worker)
                v = {n: v[n] - rate * (g[n] + weight_decay * v[n] + lam * (v[n] - server[n])) for n in v}
            copies.append(u)
            personal[worker] = v
        server = {n: sum(s * u[n] for s, u in zip(share, copies, strict=True)) for n in server}
        for name in server:
            found = strip_prefix(state.params, "personal")[name]
            torch.testing.assert_close(state.params[name], server[name].expand_as(found), rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(found, torch.stack([v[name] for v in personal]), rtol=1e-10, atol=1e-10)


def test_workers_deploy_their_personal_models(lab):
    session = lab.opened(lab.tiny(Ditto()))
    state = lab.states(session)[-1]
    models = session.experiment.algorithm.models(state, session.ctx)
    assert models.params.keys() == select(state.params, WHOLE).keys()
    for name, leaf in models.params.items():
        assert leaf is state.params[f"personal.{name}"]
        assert not torch.allclose(leaf[0], leaf[1])


def test_a_stronger_pull_keeps_personal_models_nearer(lab):
    def distance(lam: float) -> float:
        state = lab.states(lab.opened(lab.tiny(Ditto(lam=lam), rounds=2)))[-1]
        own = strip_prefix(state.params, "personal")
        return sum(float((own[name] - state.params[name]).square().sum()) for name in own)

    distances = [distance(lam) for lam in (0.0, 1.0, 5.0)]
    assert distances[0] > distances[1] > distances[2]


def test_personal_models_of_those_who_take_no_part_stay(lab):
    kind = Ditto(participation=0.5)
    session = lab.opened(lab.tiny(kind))
    start = kind.init(session.ctx)
    after, log = kind.local(start, 0, session.ctx)
    rested = ~torch.from_numpy(session.ctx.participants(0, 0.5))
    assert int(rested.sum()) == 2
    for name, leaf in strip_prefix(after.params, "personal").items():
        moved = (leaf != start.params[f"personal.{name}"]).flatten(1).any(1)
        assert not moved[rested].any() and moved[~rested].all(), name
    assert list(log) == ["body", "personal"]
    for work in log.values():
        assert work.loss.isnan().tolist() == rested.tolist()
