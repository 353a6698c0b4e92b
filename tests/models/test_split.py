"""Nets of a representation and heads: their names, copies and parts, and what no worker trains."""

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call

from manyheads.models.split import Split, cacheable_prefix, constants_of, cut, hold_still, needs_loop, statistics, twin
from manyheads.models.splitting import split

X = torch.linspace(-1, 1, 24).view(4, 6)


def names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def chain(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), *middle, nn.Linear(5, 3))


def test_parameters_are_named_by_group() -> None:
    net = Split(nn.Linear(6, 5), {"head": nn.Linear(5, 3), "personal": nn.Linear(5, 3)}, frozenset({"personal"}))
    assert names(net) == [f"{g}.{n}" for g in ("representation", "head", "personal") for n in ("weight", "bias")]
    assert net.head_names == ("head", "personal")
    assert net.groups == ("representation", "head", "personal")
    assert Split(nn.Identity(), {"head": nn.Linear(6, 3)}).groups == ("head",)


def test_the_output_is_the_sum_of_the_heads() -> None:
    net = Split(nn.Linear(6, 5), {"head": nn.Linear(5, 3), "personal": nn.Linear(5, 3)})
    outputs = net.outputs(X)
    assert list(outputs) == ["head", "personal"]
    torch.testing.assert_close(net(X), outputs["head"] + outputs["personal"])


def test_a_detached_head_sends_no_gradient_into_the_features() -> None:
    net = Split(nn.Linear(6, 5), {"head": nn.Linear(5, 3)}).with_head("personal", detach=frozenset({"personal"}))
    body = list(net.representation.parameters())
    (whole,) = torch.autograd.grad(net(X).sum(), body[:1])
    (first,) = torch.autograd.grad(net.outputs(X)["head"].sum(), body[:1])
    torch.testing.assert_close(whole, first)
    personal = net.outputs(X)["personal"].sum()
    assert torch.autograd.grad(personal, [net.get_parameter("personal.weight")])[0].abs().sum() > 0
    assert torch.autograd.grad(net.outputs(X)["personal"].sum(), body, allow_unused=True) == (None, None)


def test_with_head_copies_everything() -> None:
    net = split(chain(nn.AlphaDropout(0.5)), None, X)
    more = net.with_head("personal", detach=frozenset({"head"}))
    assert (net.head_names, more.head_names) == (("head",), ("head", "personal"))
    assert (net.detached, more.detached) == (frozenset(), frozenset({"head"}))
    assert torch.equal(more.get_parameter("personal.3.weight"), net.get_parameter("head.3.weight"))
    assert not {p.data_ptr() for p in net.parameters()} & {p.data_ptr() for p in more.parameters()}
    assert needs_loop(more) == "representation.2"


def test_known_random_modules_are_named_without_an_example() -> None:
    assert needs_loop(Split(nn.LSTM(6, 5, 2, dropout=0.5), {"head": nn.Linear(5, 3)})) == "representation"
    assert needs_loop(Split(nn.Sequential(nn.Linear(6, 5)), {"head": nn.Dropout3d(0.2)})) == "head"


def test_a_plain_module_counts_as_one_layer() -> None:
    net = Split(nn.Linear(6, 5), {"head": nn.Linear(5, 3)})
    assert cacheable_prefix(net, "train") == 1
    for depth in (0, 1):
        front, rest = cut(net, depth)
        torch.testing.assert_close(rest(front(X)), net(X))
        assert names(rest) == names(net)[2 * depth :]


def test_a_cut_shares_parameters_and_keeps_names() -> None:
    net = split(chain(nn.Tanh(), nn.Linear(5, 5), nn.Dropout(0.5)), None, X).with_head("personal", detach=frozenset())
    net.eval()
    for depth in range(6):
        front, rest = cut(net, depth)
        torch.testing.assert_close(rest(front(X)), net(X))
        assert rest.head_names == net.head_names
        for name, parameter in rest.named_parameters():
            assert parameter is net.get_parameter(name)
        for name, parameter in front.named_parameters():
            assert parameter is net.get_parameter(f"representation.{name}")
        assert len(names(front)) + len(names(rest)) == len(names(net))
    zeros = {name: torch.zeros_like(p) for name, p in rest.named_parameters()}
    assert functional_call(rest, zeros, (front(X),)).abs().sum() == 0


def test_what_is_not_trained_leaves_the_state_and_the_net_computes_the_same() -> None:
    shared = nn.Linear(5, 5)
    net = split(
        nn.Sequential(nn.Linear(6, 5), nn.LSTM(5, 5), Last(), shared, nn.ReLU(), shared, nn.Linear(5, 3)), "6", X
    )
    net.representation[1].requires_grad_(False)
    shared_weight = net.representation[3].weight.requires_grad_(False)
    expected, before = net(X), set(names(net))
    hold_still(net)
    held = {name for name in before if name.startswith("representation.1.")} | {"representation.3.weight"}
    assert set(net.constants) == held and set(names(net)) == before - held
    assert not statistics(net)
    assert torch.equal(net(X), expected)
    assert net.representation[5].weight.data_ptr() == shared_weight.data_ptr(), "one tensor in both places"
    more = copy.deepcopy(net).double()
    assert more.representation[1].weight_hh_l0.dtype == torch.float64


def test_twins_have_weights_of_their_own_and_constants_in_common() -> None:
    net = split(chain(), None, X)
    held, trained = [name for name, _ in net.named_parameters()][:2]
    net.get_parameter(held).requires_grad_(False)
    hold_still(net)
    front, rest = cut(net, len(net.representation))
    assert constants_of(rest) == {} and len(list(front.buffers())) == 1
    other = twin(net)
    assert constants_of(other)[held] is constants_of(net)[held]
    with torch.no_grad():
        other.get_parameter(trained).zero_()
    assert net.get_parameter(trained).any()
    assert constants_of(twin(cut(net, 0)[1]))[held] is constants_of(net)[held], "of a part, too"


class Last(nn.Module):
    """What an LSTM gives, without its state."""

    def forward(self, given: tuple[Tensor, object]) -> Tensor:
        return given[0]
