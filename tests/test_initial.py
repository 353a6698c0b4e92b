"""First weights: equal for all, a function of the seed, and drawn without touching anybody's random numbers."""

import pytest
import torch
from torch import nn

from manyheads.algorithms import DePRL, FedRep
from manyheads.errors import UserError
from manyheads.initial import random_heads


def test_the_first_weights_are_equal_for_all_and_a_function_of_the_seed(lab):
    torch.manual_seed(1)
    one = lab.opened(lab.tiny(DePRL())).ctx.initial.params
    torch.manual_seed(2)
    two = lab.opened(lab.tiny(DePRL())).ctx.initial.params
    other = lab.opened(lab.tiny(DePRL(), seed=2)).ctx.initial.params
    for name, leaf in one.items():
        assert leaf.shape[0] == 4 and (leaf == leaf[0]).all()
        assert torch.equal(leaf, two[name])
        assert not torch.equal(leaf, other[name])


@pytest.mark.parametrize("kind", [DePRL, FedRep])
def test_random_heads_are_each_workers_own_and_a_function_of_its_id(lab, kind):
    algorithm = kind(heads="random")
    ctx = lab.opened(lab.tiny(algorithm)).ctx
    one, two = (algorithm.init(ctx).params for _ in range(2))
    same = kind().init(ctx).params
    for name, leaf in one.items():
        assert torch.equal(leaf, two[name])
        if name.startswith("head."):
            assert len({tuple(row.flatten().tolist()) for row in leaf}) == 4
        else:
            assert torch.equal(leaf, same[name])
        assert torch.equal(same[name], ctx.initial.params[name])
    part = random_heads(ctx.model, ctx.seed, (2, 3))
    assert all(torch.equal(leaf, one[name][2:]) for name, leaf in part.items())


class Prototypes(nn.Module):
    """A head of the user's: distances to a point for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -torch.cdist(x, self.points)


class Redrawn(Prototypes):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.points)


def test_a_head_of_the_users_own_is_drawn_as_it_says_or_refused(lab):
    algorithm = DePRL(heads="random")

    def first_heads(head: nn.Module) -> torch.Tensor:
        net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.BatchNorm1d(6), head)
        ctx = lab.opened(lab.tiny(algorithm, model=net, head="2")).ctx
        return algorithm.init(ctx).params["head.3.points"]

    assert len({tuple(row.flatten().tolist()) for row in first_heads(Redrawn())}) == 4
    with pytest.raises(UserError, match="--heads random: Prototypes in the head cannot be drawn anew"):
        first_heads(Prototypes())


def test_the_first_weights_lie_as_those_of_a_checkpoint_do(lab):
    """Another order in memory gives other last bits: a run that was continued would not end as one that was not."""
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    net[0].weight = nn.Parameter(torch.randn(6, 5).T)
    ctx = lab.opened(lab.tiny(DePRL(), model=net)).ctx
    assert all(leaf[0].is_contiguous() for leaf in ctx.initial.params.values())


def test_opening_leaves_torchs_generator_alone(lab):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    algorithm = DePRL(heads="random")
    algorithm.init(lab.opened(lab.tiny(algorithm)).ctx)
    assert torch.equal(torch.get_rng_state(), before)
