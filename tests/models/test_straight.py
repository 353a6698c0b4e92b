"""Nets whose forward only applies layers one after another are trained as the nn.Sequential that does the same."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.engine.chain import is_chain
from manyheads.models.split import Split
from manyheads.models.splitting import split

X = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Three linear layers and whatever else a forward may use, applied as ``way`` says."""

    def __init__(self, way: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.act, self.drop, self.norm = nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm1d(5)
        self.first, self.second, self.out = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.layers = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = self.act(layer(x))
        return self.layers[-1](x)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deep = Net(lambda net, x: net.second(net.act(net.first(x.flatten(1)))))
        del self.deep.out, self.deep.norm
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.deep(x)))


def plain(way: Callable[[Net, Tensor], Tensor]) -> nn.Module:
    net = Net(way)
    del net.norm
    return net


STRAIGHT = {
    "modules": plain(lambda net, x: net.out(net.act(net.second(net.act(net.first(x.flatten(1))))))),
    "functions": plain(lambda net, x: net.out(F.relu(net.second(torch.relu(net.first(torch.flatten(x, 1))))))),
    "smooth functions": plain(
        lambda net, x: net.out(F.gelu(net.second(torch.tanh(net.first(torch.flatten(x, 1)))), approximate="tanh"))
    ),
    "functions with numbers": plain(
        lambda net, x: net.out(F.elu(net.second(F.leaky_relu(net.first(x.flatten(1)), 0.2)), alpha=0.5))
    ),
    "smooth methods": plain(lambda net, x: net.out(F.silu(net.second(net.first(x.flatten(1)).tanh())).sigmoid())),
    "methods": plain(lambda net, x: net.out(net.second(net.first(x.view(x.size(0), -1)).relu()).relu())),
    "reshape": plain(lambda net, x: net.out(net.second(net.first(x.reshape(x.shape[0], -1))))),
    "sizes": plain(lambda net, x: net.out(net.second(net.first(x.view(-1, 6))))),
    "dropout": plain(lambda net, x: net.out(net.drop(net.second(net.first(x.flatten(1)))))),
    "a list": Listed(),
    "nets inside": Inner(),
    "a sequence of nets": nn.Sequential(Inner(), nn.Linear(3, 3)),
}


def made(module: nn.Module, x: Tensor = X) -> Split:
    return split(module, None, x)


@pytest.mark.parametrize("name", STRAIGHT)
def test_a_straight_forward_is_a_chain_with_the_same_numbers_under_the_same_names(name: str) -> None:
    module = STRAIGHT[name]
    net = made(module)
    assert is_chain(net)
    assert net.module_state().keys() == module.state_dict().keys()
    assert all(torch.equal(leaf, module.state_dict()[leaf_name]) for leaf_name, leaf in net.module_state().items())
    assert torch.allclose(net.eval()(X), module.eval()(X))
    # A layer that stands in two places would be listed once.
    assert len([*net.named_modules()]) == len([*net.named_modules(remove_duplicate=False)])


def test_a_layer_that_changes_next_to_nothing_the_second_time_is_still_applied_twice() -> None:
    """Once would be the same but for rounding on the few samples that it is tried on, and not on all others."""
    module = plain(lambda net, x: net.out(net.second(net.scale(net.scale(net.first(x.flatten(1)))))))
    module.scale = nn.LayerNorm(5, elementwise_affine=False)
    net = made(module)
    assert type(net.representation) is Net
    assert torch.equal(net.eval()(X), module.eval()(X))
    small = X * 1e-3
    assert torch.allclose(net(small), module(small))


def test_images_are_a_chain_too() -> None:
    module = Images()
    net = made(module, IMAGES)
    assert is_chain(net, images=True)
    assert torch.allclose(net(IMAGES), module(IMAGES))


def _without_gradient(net: Net, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(not net.training):
        x = net.act(net.first(x.flatten(1)))
    return net.out(net.second(x))


CROOKED = {
    "a sum": lambda net, x: net.out(net.second(y := net.first(x.flatten(1))) + y),
    "the same layer twice": lambda net, x: net.out(net.second(net.second(net.first(x.flatten(1))))),
    "a number": lambda net, x: net.out(net.second(2 * net.first(x.flatten(1)))),
    "another function": lambda net, x: net.out(net.second(torch.sin(net.first(x.flatten(1))))),
    "a look at the numbers": lambda net, x: net.out(net.second(net.first(x.flatten(1)))) if x.sum() < 99 else x,
    "other layers in training": lambda net, x: net.out(
        net.act(net.second(net.first(x.flatten(1)))) if net.training else net.second(net.first(x.flatten(1)))
    ),
    "other layers in evaluation": lambda net, x: net.out(
        net.second(net.first(x.flatten(1))) if net.training else net.act(net.second(net.first(x.flatten(1))))
    ),
    "no gradient in training": _without_gradient,
    "what came before the last layer": lambda net, x: net.out((y := net.first(x.flatten(1)), net.second(y))[0]),
    "halves of samples": lambda net, x: net.out(net.second(net.first(x.view(x.size(0), -1).flip(1)))),
    "layers told apart by kind": lambda net, x: net.out(
        net.second(net.act(net.first(x.flatten(1)))) if isinstance(net.first, nn.Linear) else net.first(x.flatten(1))
    ),
}


@pytest.mark.parametrize("name", CROOKED)
def test_a_forward_that_does_more_stays_as_it_is(name: str) -> None:
    module = plain(CROOKED[name])
    net = made(module)
    assert type(net.representation) is Net and not is_chain(net)
    assert torch.allclose(net.eval()(X), module.eval()(X))


def test_a_layer_that_is_never_applied_keeps_its_weights() -> None:
    module = Net(lambda net, x: net.out(net.second(net.first(x.flatten(1)))))
    net = made(module)
    assert net.module_state().keys() == module.state_dict().keys() and type(net.representation) is Net


def test_a_net_with_weights_or_hooks_of_its_own_stays_as_it_is() -> None:
    with_weight = plain(lambda net, x: net.out(net.second(net.first(x.flatten(1)))))
    with_weight.scale = nn.Parameter(torch.ones(()))
    hooked = plain(lambda net, x: net.out(net.second(net.first(x.flatten(1)))))
    hooked.register_forward_hook(lambda module, inputs, output: None)
    for module in (with_weight, hooked):
        assert type(made(module).representation) is Net


def test_statistics_of_batchnorm_and_layers_of_dropout_are_ours_as_before() -> None:
    module = Net(lambda net, x: net.out(net.drop(net.norm(net.second(net.first(x.flatten(1)))))))
    net = made(module)
    assert type(net.representation) is nn.Sequential
    assert [type(layer).__module__ for layer in (net.representation.norm, net.representation.drop)] == [
        "manyheads.models.norm",
        "manyheads.models.dropout",
    ]
    assert net.moving and all(name.startswith("representation.norm.") for name in net.moving)


def test_a_net_that_fails_on_the_way_back_is_left_to_those_who_try_its_gradients() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, *gradients: Tensor) -> Tensor:
            raise RuntimeError("no way back")

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Failing.apply(x)

    module = plain(lambda net, x: net.out(net.second(net.extra(net.first(x.flatten(1))))))
    module.extra = Layer()
    assert type(made(module).representation) is Net
