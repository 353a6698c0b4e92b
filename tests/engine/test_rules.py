"""Every rule against autograd: outputs, input gradients, weight gradients and their norms, worker by worker."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from manyheads.engine.rules import Contribution, rule_for
from manyheads.models.dropout import Dropout

WORKERS, BATCH = 3, 4

LAYERS = {
    "linear": (nn.Linear(6, 5), (6,)),
    "without bias": (nn.Linear(6, 5, bias=False), (6,)),
    "over more axes": (nn.Linear(6, 5), (2, 7, 6)),
    "convolution": (nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 7, 6)),
    "pooling": (nn.MaxPool2d(2), (2, 7, 6)),
    "relu": (nn.ReLU(), (2, 3)),
    "elu": (nn.ELU(0.7), (2, 3)),
    "gelu": (nn.GELU(), (2, 3)),
    "gelu by tanh": (nn.GELU(approximate="tanh"), (2, 3)),
    "leaky relu": (nn.LeakyReLU(0.2), (2, 3)),
    "sigmoid": (nn.Sigmoid(), (2, 3)),
    "silu": (nn.SiLU(), (2, 3)),
    "tanh": (nn.Tanh(), (2, 3)),
    "flatten": (nn.Flatten(), (2, 7, 6)),
}


def turned(x: Tensor, channels: str) -> Tensor:
    """As a rule takes images, from [..., C, H, W]."""
    return x.movedim(-3, -1) if channels == "last" else x


def turned_back(x: Tensor, channels: str) -> Tensor:
    return x.movedim(-1, -3) if channels == "last" else x


@pytest.mark.parametrize("kind", LAYERS)
def test_forward_and_back(kind: str) -> None:
    layer, shape = LAYERS[kind]
    layer = layer.double()
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    params = {f"layer.{name}": draw(WORKERS, *p.shape) for name, p in layer.named_parameters()}
    rule = rule_for("layer", layer, params)
    assert rule is not None
    x = draw(WORKERS, BATCH, *shape)
    output, saved = rule.forward(turned(x, rule.channels), {})
    output = turned_back(output, rule.channels)
    d = draw(*output.shape)
    back = turned_back(rule.backward(turned(d, rule.channels), saved), rule.channels)

    for worker in range(WORKERS):
        own = {name: params[f"layer.{name}"][worker].requires_grad_() for name, _ in layer.named_parameters()}
        given = x[worker].clone().requires_grad_()
        expected = functional_call(layer, own, (given,))
        torch.testing.assert_close(output[worker], expected)
        gradients = torch.autograd.grad(expected, [given, *own.values()], d[worker])
        torch.testing.assert_close(back[worker], gradients[0])
        if rule.weights is None:
            continue
        part = Contribution("layer", rule.weights.layer, turned(d, rule.channels).flatten(1, -2), saved[0])
        weight = gradients[1].permute(0, 2, 3, 1) if isinstance(layer, nn.Conv2d) else gradients[1]
        torch.testing.assert_close(part.product()[worker], weight.flatten(1))
        square = sum(gradient.square().sum() for gradient in gradients[1:])
        for product in (None, part.product()):
            torch.testing.assert_close(part.square_norm(torch.float64, product)[worker], square)


def test_a_norm_of_products_that_cancel_is_as_exact_as_it_is_asked_for() -> None:
    """As at a minimum: the gradient is a ten thousandth of the terms that it is made of."""
    d, x = torch.tensor([[[1.0], [-0.9999]]]), torch.ones(1, 2, 3)
    part = Contribution("layer", nn.Linear(3, 1, bias=False), d, x)
    exact = part.product().double().square().sum((1, 2))
    torch.testing.assert_close(part.square_norm(torch.float64), exact, rtol=1e-6, atol=0)


def test_a_dropout_without_a_key_is_off() -> None:
    rule = rule_for("drop", Dropout(0.5), {})
    assert rule is not None
    x, keys = torch.ones(WORKERS, BATCH, 50), {"drop.key": torch.arange(WORKERS)}
    output, saved = rule.forward(x, {})
    assert torch.equal(output, x) and torch.equal(rule.backward(x, saved), x)
    output, saved = rule.forward(x, keys)
    assert set(output.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(rule.backward(x, saved), output), "the same numbers are dropped on the way back"


def test_weights_that_are_not_trained_are_the_same_for_all() -> None:
    layer = nn.Linear(6, 5)
    for name, parameter in list(layer.named_parameters()):
        delattr(layer, name)
        layer.register_buffer(name, parameter.detach())
    rule = rule_for("layer", layer, {})
    assert rule is not None and rule.weights is not None and not rule.weights.trained
    x = torch.randn(WORKERS, BATCH, 6)
    torch.testing.assert_close(rule.forward(x, {})[0], layer(x))


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    "layer",
    [
        Doubled(2, 2),
        nn.Flatten(0),
        nn.Conv2d(2, 2, 1, groups=2),
        nn.MaxPool2d(3, stride=2),
        nn.Softsign(),
        nn.Sequential(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_without_a_rule(layer: nn.Module) -> None:
    assert rule_for("layer", layer, {}) is None


@pytest.mark.parametrize("layer", [nn.ELU(), nn.GELU(), nn.LeakyReLU(), nn.Sigmoid(), nn.SiLU(), nn.Tanh()], ids=repr)
def test_a_worker_s_bits_do_not_depend_on_those_beside_it(layer: nn.Module) -> None:
    """torch computes what fills no vector by other means, and rounds it otherwise."""
    rule = rule_for("layer", layer, {})
    assert rule is not None
    x, d = (torch.randn(5, 3, 7, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    output, saved = rule.forward(x, {})
    back = rule.backward(d, saved)
    for worker in range(5):
        own = slice(worker, worker + 1)
        alone, its = rule.forward(x[own], {})
        assert torch.equal(alone, output[own]) and torch.equal(rule.backward(d[own], its), back[own])


def test_a_layer_that_works_in_place_leaves_its_input_alone() -> None:
    for layer in (nn.ELU(inplace=True), nn.LeakyReLU(inplace=True), nn.SiLU(inplace=True)):
        rule, x = rule_for("layer", layer, {}), torch.randn(WORKERS, BATCH, 16)
        before = x.clone()
        assert rule is not None
        rule.forward(x, {})
        assert torch.equal(x, before)


class Cubed(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return x**3


def test_what_only_looks_like_a_layer_with_a_rule_has_none() -> None:
    """A part that is not trained belongs to no worker, and so its layer is neither of one kind nor of the other."""
    for layer in (nn.Linear(6, 5), nn.Conv2d(2, 3, 3)):
        assert rule_for("layer", layer, {}) is not None
        for name in ("weight", "bias"):
            partly = copy.deepcopy(layer)
            delattr(partly, name)
            partly.register_buffer(name, getattr(layer, name).detach())
            assert rule_for("layer", partly, {}) is None
    for layer in (Cubed(), nn.Flatten(1, 2), nn.Flatten(2)):
        assert rule_for("layer", layer, {}) is None
