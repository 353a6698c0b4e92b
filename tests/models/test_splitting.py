"""Splitting by a head's name, and what is cached of a net that is split."""

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from manyheads.errors import UserError
from manyheads.models.dropout import Dropout
from manyheads.models.norm import BatchNorm
from manyheads.models.split import cacheable_prefix, needs_loop
from manyheads.models.splitting import split

from .small import Custom, Noise, Shifting, Standardised, X, chain


def names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def nested() -> nn.Sequential:
    net = nn.Sequential()
    net.add_module("body", nn.Sequential(nn.Linear(6, 5), nn.ReLU()))
    net.add_module("classifier", nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 3)))
    net.add_module("last", nn.LogSoftmax(1))
    return net


@pytest.mark.parametrize(
    ("head", "body", "top"),
    [
        (None, ["body.0"], ["classifier.0", "classifier.3"]),
        ("classifier", ["body.0"], ["classifier.0", "classifier.3"]),
        ("classifier.1", ["body.0", "classifier.0"], ["classifier.3"]),
        ("classifier.3", ["body.0", "classifier.0"], ["classifier.3"]),
        ("body", [], ["body.0", "classifier.0", "classifier.3"]),
        ("body.1", ["body.0"], ["classifier.0", "classifier.3"]),
        ("last", ["body.0", "classifier.0", "classifier.3"], []),
        ("all", [], ["body.0", "classifier.0", "classifier.3"]),
        ("none", ["body.0", "classifier.0", "classifier.3"], []),
    ],
)
def test_a_sequential_is_cut_at_any_name(head: str | None, body: list[str], top: list[str]) -> None:
    module = nested()
    net = split(module, head, X)
    layers = [f"representation.{name}" for name in body] + [f"head.{name}" for name in top]
    assert names(net) == [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
    module.load_state_dict(net.module_state())
    torch.testing.assert_close(net.eval()(X), module.eval()(X))


def test_the_weights_of_tied_layers_can_be_kept_without_this_package(tmp_path: Path) -> None:
    module, fresh = (nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 3)) for _ in range(2))
    for net in (module, fresh):
        net[2].weight = net[0].weight
    save_file(split(module, None, X).module_state(), tmp_path / "net.safetensors")
    fresh.load_state_dict(load_file(tmp_path / "net.safetensors"))
    assert torch.equal(fresh(X), module(X))


@pytest.mark.parametrize(
    ("head", "top"),
    [
        (None, ["classifier.0.weight", "classifier.0.bias", "classifier.2.weight", "classifier.2.bias"]),
        ("classifier.1", ["classifier.2.weight", "classifier.2.bias"]),
        ("classifier.2", ["classifier.2.weight", "classifier.2.bias"]),
    ],
)
def test_another_module_is_cut_at_the_last_thing_it_applies(head: str | None, top: list[str]) -> None:
    module = Custom()
    before = copy.deepcopy(module.state_dict())
    net = split(module, head, X)
    assert [name.removeprefix("head.") for name in names(net) if name.startswith("head.")] == [
        name.removeprefix("classifier.") for name in top
    ]
    assert {name for name in names(net) if name.startswith("representation.")} == {
        f"representation.{name}" for name in names(module) if name not in top
    }
    torch.testing.assert_close(net.eval()(X), module.eval()(X))
    module.load_state_dict(net.module_state())
    assert isinstance(module.dropout, nn.Dropout)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


class Wrapper(nn.Module):
    """A net inside another module."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x - self.mean)


@pytest.mark.parametrize(
    ("module", "top"),
    [
        (Wrapper(chain()), ["2.weight", "2.bias"]),
        (Wrapper(Wrapper(chain())), ["2.weight", "2.bias"]),
        (nn.Sequential(nn.Flatten(), chain()), ["1.2.weight", "1.2.bias"]),
        (Wrapper(nn.Sequential(nn.Flatten(), nn.Linear(6, 3))), ["1.weight", "1.bias"]),
    ],
    ids=range(4),
)
def test_the_last_layer_is_found_inside_a_lone_child(module: nn.Module, top: list[str]) -> None:
    net = split(module, None, X)
    assert [name.removeprefix("head.") for name in names(net) if name.startswith("head.")] == top
    torch.testing.assert_close(net.eval()(X), module.eval()(X))


class Locked(nn.Linear):
    """It holds something that belongs to one process."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.lock = threading.Lock()


class Squeezed(nn.Module):
    """A net that takes a batch of one sample for no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x).squeeze())


@pytest.mark.parametrize(
    ("module", "head", "message"),
    [
        (Custom(), "", "unknown head ''. Allowed: all, body, "),
        (Custom(), "clasifier", "unknown head 'clasifier'. Did you mean 'classifier'?"),
        (Custom(), "classifier.9", "Did you mean 'classifier"),
        (nested(), "lost", "Allowed: all, body, classifier, none."),
        (Custom(), "body", "head 'body' is not the last thing"),
        (Custom(), "body.1", "head 'body.1' is not the last thing"),
        (Custom("softmax"), None, "head 'classifier' is not the last thing"),
        (nn.Linear(6, 3), None, "Linear has no layers to choose a head from"),
        (nn.Linear(7, 3), "all", "on samples of shape 6 the model fails in Linear(in_features=7, out_features=3, "),
        (nn.LSTM(6, 3), "all", "must return one tensor with a row for every sample: "),
        (
            chain(nn.GroupNorm(5, 5)),
            None,
            "on a single sample of shape 6, which every net must take, the model fails in"
            " GroupNorm(5, 5, eps=1e-05, affine=True",
        ),
        (Squeezed(), None, "one tensor with a row for every sample, even if it is alone in its batch (squeeze()"),
        (chain(nn.BatchNorm1d(5, momentum=None)), None, "nn.GroupNorm"),
        (Locked(), "all", "the model cannot be copied, as it is for every worker: TypeError: cannot pickle"),
    ],
)
def test_a_wrong_head_or_module_is_refused_in_one_line(module: nn.Module, head: str | None, message: str) -> None:
    with pytest.raises(UserError) as error:
        split(module, head, X)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


class Ending(nn.Module):
    """A net that does something more with what its last layer gives."""

    def __init__(self, ending: str) -> None:
        super().__init__()
        self.body, self.out, self.ending = nn.Linear(6, 5), nn.Linear(5, 3), ending
        self.dropout, self.two = nn.Dropout(0.5), nn.Bilinear(5, 5, 3)
        nn.init.constant_(self.out.bias, 3.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh()
        y = self.out(0.1 * h)
        return {
            "nothing": lambda: y.contiguous(),
            "clamp": lambda: y.clamp(0, 9),
            "relu": lambda: y.relu(),
            "in place": lambda: y.clamp_(-9, 9),
            "mask": lambda: y.masked_fill(x[:, :3] > 2, -1e4),
            "dropout": lambda: self.dropout(y),
            "when it is used": lambda: y if self.training else y + 0,
            "row": lambda: y.unsqueeze(1),
            "not it": lambda: h,
        }[self.ending]()


@pytest.mark.parametrize("ending", ["clamp", "relu", "in place", "mask", "dropout", "when it is used", "row", "not it"])
def test_what_follows_the_head_is_noticed_even_where_it_does_nothing(ending: str) -> None:
    """On these samples every output is positive, small and allowed."""
    with pytest.raises(UserError, match="head 'out' is not the last thing"):
        split(Ending(ending), "out", X)


def test_a_net_may_give_what_its_head_gives_by_another_name() -> None:
    split(Ending("nothing"), "out", X)


class Pair(nn.Module):
    """A net whose head comes last, but takes two tensors, one by one or as a tuple."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.body, self.out = nn.Linear(6, 5), Both()

    def forward(self, x: Tensor) -> Tensor:
        both = self.body(x), x
        return self.out(both) if self.packed else self.out(*both)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(11, 3)

    def forward(self, *both: Any) -> Tensor:
        return self.layer(torch.cat(both if len(both) == 2 else both[0], 1))


@pytest.mark.parametrize("packed", [False, True])
def test_a_head_takes_one_tensor(packed: bool) -> None:
    with pytest.raises(UserError, match="or its input is not one tensor: let one module with one tensor as its input"):
        split(Pair(packed), "out", X)


class Picky(nn.Module):
    """A net that takes no zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not x.all():
            raise ValueError("a zero")
        return self.out(self.body(x))


def test_a_net_that_is_known_is_not_tried_again() -> None:
    with pytest.raises(
        UserError, match=r"^on samples of shape 6 the model fails in .*splitting.py, line \d+: ValueError: a zero$"
    ):
        split(Picky(), None, torch.zeros(2, 6))
    assert names(split(Picky(), None, torch.zeros(2, 6), known=True)) == names(split(Picky(), None, X + 2))


def test_a_head_that_shares_parameters_is_refused() -> None:
    layer = nn.Linear(6, 6)
    with pytest.raises(UserError, match="shares parameters"):
        split(nn.Sequential(layer, nn.ReLU(), layer), "2", X)


def test_a_layer_that_stands_in_two_places_is_cut_at_the_right_one() -> None:
    layer = nn.Linear(6, 6)
    module = nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(6, 3))
    net = split(module, None, X)
    assert names(net) == ["representation.0.weight", "representation.0.bias", "head.4.weight", "head.4.bias"]
    assert cacheable_prefix(net, "train") == 4
    torch.testing.assert_close(net.eval()(X), module.eval()(X))


def test_our_own_layers_take_the_place_of_torch_s() -> None:
    module = chain(nn.BatchNorm1d(5), nn.Dropout(0.3))
    with torch.no_grad():
        module[2].running_mean.normal_()
    net = split(module, None, X)
    kinds = [type(layer) for layer in net.representation.children()]
    assert kinds == [nn.Linear, nn.ReLU, BatchNorm, Dropout]
    assert torch.equal(net.get_buffer("representation.2.running_mean"), module[2].running_mean)
    assert net.representation[3].p == 0.3
    assert net.training
    assert needs_loop(net) is None


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(5), nn.Dropout(0.3)])
def test_hooks_of_a_layer_go_on_around_ours(layer: nn.Module) -> None:
    module = chain(layer)
    layer.register_forward_hook(lambda layer, inputs, output: 2 * output)
    net = split(module, None, X)
    assert type(net.representation[2]) in (BatchNorm, Dropout)
    torch.testing.assert_close(net.eval()(X), module.eval()(X))


def test_a_hook_may_ask_a_batchnorm_what_torch_s_knows() -> None:
    module = chain(nn.BatchNorm1d(5))
    module[2].register_forward_hook(lambda layer, inputs, output: output * layer.num_features * layer.affine)
    torch.testing.assert_close(split(module, None, X).eval()(X), module.eval()(X))


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(5), nn.Dropout(0.3)])
def test_hooks_of_a_layer_s_state_dict_stay_behind(layer: nn.Module) -> None:
    module = chain(layer)
    # It knows the layer by a weak reference, and so cannot be copied once that is gone.
    layer.register_load_state_dict_pre_hook(lambda layer, *call: None)
    net = split(module, None, X)
    net.load_state_dict(copy.deepcopy(net).state_dict())
    torch.testing.assert_close(net.eval()(X), module.eval()(X))


def test_hooks_of_a_dropout_that_is_applied_twice_go_on_too() -> None:
    calls: list[nn.Module] = []
    module = Custom("dropout twice")
    module.dropout.register_forward_hook(lambda layer, inputs, output: calls.append(layer))
    net = split(module, None, X)
    calls.clear()
    net(X)
    assert [type(layer) for layer in calls] == [nn.Dropout] * 2


@pytest.mark.parametrize("head", [None, "1.2"])
def test_hooks_of_a_sequential_that_is_cut_are_refused(head: str | None) -> None:
    inside = chain()
    inside.register_forward_hook(lambda *call: None)
    module = inside if head is None else nn.Sequential(nn.Flatten(), inside)
    with pytest.raises(UserError, match="the model's head lies inside an nn"):
        split(module, head, X)
    assert split(module, "all", X).head_layer == "all"


def test_one_activation_for_all_places_keeps_every_place() -> None:
    relu, drop = nn.ReLU(), nn.Dropout(0.5)
    module = nn.Sequential(nn.Linear(6, 5), relu, drop, nn.Linear(5, 4), relu, drop, nn.Linear(4, 3))
    net = split(module, None, X)
    assert [name for name, _ in net.representation.named_children()] == list("012345")
    assert needs_loop(net) is None
    torch.testing.assert_close(net.eval()(X), module.eval()(X))


def test_lazy_layers_are_made_on_the_example() -> None:
    net = split(nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.Linear(5, 3)), None, X)
    assert net.get_parameter("representation.0.weight").shape == (5, 6)
    assert isinstance(net.representation[1], BatchNorm)


def test_a_lazy_layer_may_have_nothing_but_buffers() -> None:
    net = split(nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(6, 5), nn.Linear(5, 3)), None, X)
    assert net.get_buffer("representation.0.running_mean").shape == (6,)


@pytest.mark.parametrize(
    ("module", "head", "train", "evaluate"),
    [
        (chain(), None, 2, 2),
        (chain(nn.Dropout(0.5)), None, 2, 3),
        (chain(nn.Dropout(0.0)), None, 3, 3),
        (chain(nn.BatchNorm1d(5)), None, 2, 3),
        (chain(nn.Sequential(nn.Tanh(), nn.Dropout(0.1)), nn.Tanh()), None, 2, 4),
        (chain(nn.Sequential(Noise()), nn.Tanh()), None, 2, 4),
        (chain(nn.Dropout1d(0.5)), None, 2, 3),
        (Custom(), None, 0, 1),
        (nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)), None, 0, 1),
        (chain(nn.Dropout(0.5)), "all", 0, 0),
        (chain(nn.Dropout(0.5)), "none", 2, 4),
        (chain(nn.Tanh(), nn.Sequential(Standardised()), nn.Tanh()), None, 3, 5),
        (nn.Sequential(Shifting(), nn.Linear(6, 5), nn.Linear(5, 3)), None, 2, 2),
    ],
    ids=range(13),
)
def test_features_are_cached_up_to_the_first_layer_that_varies(
    module: nn.Module, head: str | None, train: int, evaluate: int
) -> None:
    net = split(module, head, X)
    assert cacheable_prefix(net, "train") == train
    assert cacheable_prefix(net, "eval") == evaluate


class Linked(nn.Module):
    """A layer that mixes its features over a sparse graph of them."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("links", torch.eye(5).roll(1, 0).to_sparse(), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.links, x.T).T


def test_a_sparse_tensor_is_held_but_not_kept() -> None:
    assert split(chain(Linked(persistent=False)), None, X)(X).shape == (4, 3)
    with pytest.raises(UserError, match=r"the model's 2\.links is sparse, .* buffer with persistent=False"):
        split(chain(Linked(persistent=True)), None, X)
