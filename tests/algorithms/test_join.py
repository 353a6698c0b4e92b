"""What new workers do in a round: they train their heads as others do, and nothing else."""

import pytest
import torch
from torch import nn

from manyheads.algorithms import DePRL, Join


def normed(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(input_shape[0], 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, num_outputs))


@pytest.mark.parametrize("frozen", ["train", "eval"])
def test_a_round_is_one_pass_of_deprls_head_phase(lab, frozen):
    join = Join(frozen=frozen)
    session = lab.opened(lab.tiny(join, model=normed, worker_failure=0.4))
    ctx, heads_alone = session.ctx, DePRL(head_epochs=1, body_epochs=0, frozen=frozen)
    away = set()
    for round in range(4):
        (found, log), (wanted, its_log) = (kind.local(ctx.initial, round, ctx) for kind in (join, heads_alone))
        for mine, theirs in ((found.params, wanted.params), (found.buffers, wanted.buffers)):
            assert all(torch.equal(leaf, theirs[name]) for name, leaf in mine.items())
        assert log["head"].steps.tolist() == its_log["head"].steps.tolist() and log.keys() == {"head"}
        away |= set((log["head"].steps == 0).nonzero().flatten().tolist())
        assert join.mix(found, round, ctx) is found
    assert away
