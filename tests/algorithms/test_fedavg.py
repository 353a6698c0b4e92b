"""FedAvg and what the server algorithms share: who takes part, and with which weight."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from manyheads.algorithms import REGISTRY, FedAvg
from manyheads.errors import UserError

SERVERS = [kind for kind in REGISTRY.values() if kind.exchange == "server"]


def test_the_server_averages_by_samples(lab):
    kind = FedAvg(epochs=1)
    session = lab.opened(lab.tiny(kind))
    trained, _ = kind.local(kind.init(session.ctx), 0, session.ctx)
    mixed = kind.mix(trained, 0, session.ctx)
    for name, leaf in trained.params.items():
        expected = (9 * leaf[0] + 5 * leaf[1] + 8 * leaf[2] + 7 * leaf[3]) / 29
        torch.testing.assert_close(mixed.params[name], expected.expand_as(leaf), rtol=1e-12, atol=1e-12)


def test_only_those_who_take_part_train_count_and_pay(lab):
    kind = FedAvg(epochs=1, participation=0.5)
    session = lab.opened(lab.tiny(kind))
    ctx = session.ctx
    start = kind.init(ctx)
    trained, log = kind.local(start, 0, ctx)
    mixed = kind.mix(trained, 0, ctx)
    here = ctx.participants(0, 0.5)
    assert here.sum() == 2
    weights = np.array([9, 5, 8, 7]) * here
    for name, leaf in trained.params.items():
        moved = (leaf != start.params[name]).flatten(1).any(1)
        assert moved.tolist() == here.tolist()
        expected = torch.tensordot(torch.from_numpy(weights / weights.sum()), leaf, 1)
        torch.testing.assert_close(mixed.params[name], expected.expand_as(leaf), rtol=1e-12, atol=1e-12)
    assert (log["body"].steps.numpy() > 0).tolist() == here.tolist()
    message = sum(leaf[0].numel() * 8 for leaf in trained.params.values())
    assert ctx.network.traffic.sent.tolist() == (here * message).tolist()
    assert ctx.network.traffic.received.tolist() == (here * message).tolist()


@pytest.mark.parametrize("kind", SERVERS)
def test_every_server_hears_those_who_have_trained_for_it(lab, kind):
    algorithm = kind(participation=0.5)
    ctx = lab.opened(lab.tiny(algorithm)).ctx
    for round in range(4):
        here, before = ctx.participants(round, 0.5), ctx.network.traffic.sent.copy()
        trained, log = algorithm.local(algorithm.init(ctx), round, ctx)
        algorithm.mix(trained, round, ctx)
        assert (log["body"].steps.numpy() > 0).tolist() == here.tolist()
        assert (ctx.network.traffic.sent > before).tolist() == here.tolist()


def test_participants_are_drawn_anew_each_round(lab):
    ctx = lab.opened(lab.tiny(FedAvg())).ctx
    drawn = [tuple(ctx.participants(round, 0.5)) for round in range(20)]
    assert {sum(one) for one in drawn} == {2}
    assert len(set(drawn)) > 3
    assert drawn == [tuple(ctx.participants(round, 0.5)) for round in range(20)]
    assert drawn != [tuple(replace(ctx, seed=ctx.seed + 1).participants(round, 0.5)) for round in range(20)]
    assert ctx.participants(0, 1.0).all()
    nearest = {0.01: 1, 0.3: 1, 0.375: 2, 0.6: 2, 0.625: 3, 0.7: 3}
    assert {part: ctx.participants(0, part).sum() for part in nearest} == nearest


def test_the_part_is_of_all_workers_and_taken_from_those_present(lab):
    ctx = lab.opened(lab.tiny(FedAvg(), worker_failure=0.5)).ctx
    seen = set()
    for round in range(30):
        present, here = ctx.network.present(round), ctx.participants(round, 0.5)
        assert here.sum() == min(2, present.sum()) and not (here & ~present).any()
        seen.add(int(present.sum()))
    assert seen >= {1, 2, 3}


def test_weights(lab):
    ctx = lab.opened(lab.tiny(FedAvg())).ctx
    assert FedAvg().weights(0, ctx).tolist() == [9, 5, 8, 7]
    assert FedAvg(weighting="uniform").weights(0, ctx).tolist() == [1, 1, 1, 1]
    here = ctx.participants(3, 0.5)
    assert FedAvg(participation=0.5).weights(3, ctx).tolist() == (here * [9, 5, 8, 7]).tolist()


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("participation", [-0.5, 0.0, 1.5])
def test_participation_outside_its_range_is_refused(lab, kind, participation):
    with pytest.raises(UserError, match="participation"):
        lab.tiny(kind(participation=participation))


@pytest.mark.parametrize("kind", SERVERS)
def test_servers_ignore_the_graph(lab, kind):
    sessions = [lab.opened(lab.tiny(kind(), graph=graph)) for graph in ("ring", "full")]
    assert [session.experiment.graph for session in sessions] == ["server", "server"]
    assert len({session.experiment.run_id for session in sessions}) == 1
