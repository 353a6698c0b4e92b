"""Which engine runs a net."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from manyheads.engine.choose import make_engine
from manyheads.errors import UserError


def noisy(input_shape, num_outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.RReLU(), nn.Linear(8, num_outputs))


@pytest.mark.parametrize("net", ["mlp", "dnn"])
def test_auto_stacks_chains(problem, net):
    assert make_engine("auto", problem(net).work).name == "batched"


def test_auto_loops_over_convolutions_random_modules_and_transforms(problem):
    assert make_engine("auto", problem("cnn").work).name == "loop"
    assert make_engine("auto", problem(noisy).work).name == "loop"
    transformed = replace(problem("mlp").work, transform=lambda x, rng: x)
    assert make_engine("auto", transformed).name == "loop"


@pytest.mark.parametrize("net", ["mlp", "cnn"])
def test_the_engines_by_name_agree(problem, phase, net):
    p = problem(net)
    loop, batched = (make_engine(name, p.work, threads=1) for name in ("loop", "batched"))
    assert (loop.name, batched.name) == ("loop", "batched")
    a, b = (engine.fit(p.params, p.buffers, phase(), 0) for engine in (loop, batched))
    for name in a.params:
        torch.testing.assert_close(a.params[name], b.params[name], rtol=1e-10, atol=1e-10)


def test_batched_refuses_what_draws_for_itself(problem):
    with pytest.raises(UserError, match="'loop'"):
        make_engine("batched", problem(noisy).work)


def test_an_unknown_engine_is_named_with_the_nearest(problem):
    with pytest.raises(UserError, match="Did you mean 'batched'"):
        make_engine("bached", problem("mlp").work)
