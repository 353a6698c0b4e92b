"""First weights: equal for all, a function of the seed, and drawn without touching anybody's random numbers."""

import torch

from manyheads.algorithms import DePRL


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


def test_opening_leaves_torchs_generator_alone(lab):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    lab.opened(lab.tiny(DePRL(heads="random")))
    assert torch.equal(torch.get_rng_state(), before)
