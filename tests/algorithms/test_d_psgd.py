"""D-PSGD: a whole model on the graph, scored by itself or by the mean of all."""

import torch
import torch.nn.functional as F

from manyheads.algorithms import DPSGD


def test_a_round_by_hand(lab):
    """One full-batch step and one mixing: sum_j P_ij (w - lr grad F_j(w))."""
    experiment = lab.tiny(DPSGD(steps=1), batch_size=64, lr=0.3, momentum=0.9, weight_decay=0.0, clip=0.0)
    session = lab.opened(experiment)
    start, end = lab.states(session, 1)
    shards, net = session.federation.train, session.ctx.model
    net.load_state_dict({name: leaf[0] for name, leaf in start.params.items()})
    stepped = []
    for worker in range(4):
        here = shards.rows(worker)
        net.zero_grad()
        F.cross_entropy(net(shards.x[shards.index[here]]), shards.y[here]).backward()
        stepped.append({name: (p - 0.3 * p.grad).detach() for name, p in net.named_parameters()})
    matrix = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1]], dtype=torch.float64) / 3
    for name, leaf in end.params.items():
        expected = torch.tensordot(matrix, torch.stack([tree[name] for tree in stepped]), 1)
        torch.testing.assert_close(leaf, expected, rtol=1e-12, atol=1e-12)


def test_the_mean_model_is_scored_where_it_is_asked_for(lab):
    session = lab.opened(lab.tiny(DPSGD(evaluate="mean-model")))
    state = lab.states(session, 1)[-1]
    models = session.experiment.algorithm.models(state, session.ctx)
    for name, leaf in models.params.items():
        torch.testing.assert_close(leaf, state.params[name].mean(0).expand_as(leaf), rtol=1e-12, atol=1e-12)
        assert not torch.allclose(state.params[name][0], state.params[name][2])
    assert DPSGD().models(state, session.ctx) is state
