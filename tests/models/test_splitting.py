"""Splitting by a head's name, and what trials find out on the way: what draws, and what looks at other samples."""

import copy
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from manyheads.errors import UserError
from manyheads.models.dropout import Dropout
from manyheads.models.norm import BatchNorm
from manyheads.models.split import cacheable_prefix, cut, needs_loop
from manyheads.models.splitting import split

X = torch.linspace(-1, 1, 24).view(4, 6)
# Nets are drawn where they are listed: of other weights an RReLU may see no negative number, and draw none itself.
torch.manual_seed(0)


def names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def chain(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), *middle, nn.Linear(5, 3))


def nested() -> nn.Sequential:
    net = nn.Sequential()
    net.add_module("body", nn.Sequential(nn.Linear(6, 5), nn.ReLU()))
    net.add_module("classifier", nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 3)))
    net.add_module("last", nn.LogSoftmax(1))
    return net


class Custom(nn.Module):
    """A net whose forward is more than a chain."""

    def __init__(self, after: str = "") -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
        self.classifier = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
        self.dropout = nn.Dropout(0.5)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(torch.relu(self.body(x)) * self.scale)
        if self.after == "dropout twice":
            y = self.dropout(y)
        if self.after == "noise":
            y = y + 0.1 * torch.randn_like(y)
        if self.after == "functional":
            y = F.dropout(y, 0.5, self.training)
        y = self.classifier(y)
        return y.log_softmax(1) if self.after == "softmax" else y


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
        (Squeezed(), None, "one tensor with a row for every sample of a batch, be it the only one (squeeze()"),
        (chain(nn.BatchNorm1d(5, momentum=None)), None, "nn.GroupNorm"),
        (Locked(), "all", "the model cannot be copied, as it is for every worker: cannot pickle '_thread.lock'"),
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


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x * self.draw() if self.training else x


@pytest.mark.parametrize(
    "draw",
    [lambda: random.random(), lambda: np.random.random()],  # noqa: NPY002 (a copy of the net draws from it)
    ids=["python", "numpy"],
)
def test_a_net_that_draws_from_what_no_run_seeds_is_refused(draw: Callable[[], float]) -> None:
    with pytest.raises(UserError, match=r"draws from Python's random or numpy's: draw from torch"):
        split(chain(Drawing(draw)), None, X)


def test_a_random_net_is_not_taken_for_one_that_mixes_samples() -> None:
    assert not split(chain(Noise()), None, X).mixes_samples
    assert split(chain(Noise(), Standardised()), None, X).mixes_samples


def test_buffers_that_move_are_told_from_those_that_do_not() -> None:
    module = chain(nn.BatchNorm1d(5))
    module.register_buffer("constant", torch.ones(3))
    moving = {f"representation.2.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    net = split(module, "none", X)
    assert set(net.moving) == moving
    head = split(chain(nn.BatchNorm1d(5)), "2", X).with_head("generic", detach=frozenset())
    assert {name.partition(".")[0] for name in head.moving} == {"head", "generic"} and len(head.moving) == 6


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


def test_splitting_draws_nothing_from_the_global_generator() -> None:
    module = chain(nn.AlphaDropout(0.5))
    before = torch.get_rng_state()
    split(module, None, X)
    assert torch.equal(before, torch.get_rng_state())


class Standardised(nn.Module):
    """BatchNorm as a user might write it."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0) + 1) if self.training else x


class Shifting(nn.Module):
    """Changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) if self.training else x


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (chain(), None),
        (chain(nn.Dropout(0.5)), None),
        (chain(nn.AlphaDropout(0.0)), None),
        (Custom(), None),
        (chain(nn.AlphaDropout(0.5)), "representation.2"),
        (chain(nn.Sequential(nn.Linear(5, 5), nn.RReLU())), "representation.2.1"),
        (chain(nn.TransformerEncoderLayer(5, 1, 8, dropout=0.1)), "representation.2.self_attn"),
        (chain(nn.TransformerEncoderLayer(5, 1, 8, dropout=0.0)), None),
        (chain(nn.Sequential(Noise())), "representation.2.0"),
        (Custom("dropout twice"), "representation.dropout"),
        (Custom("functional"), "representation"),
        (Custom("noise"), "representation"),
    ],
    ids=range(12),
)
def test_a_module_with_randomness_of_its_own_is_named(module: nn.Module, name: str | None) -> None:
    net = split(module, None, X)
    assert needs_loop(net) == name
    # What is declared free of other randomness must be so, and the rest must not be.
    net.train()
    torch.manual_seed(0)
    first = net(X)
    torch.manual_seed(1)
    assert torch.equal(first, net(X)) == (name is None)


def test_statistics_must_be_changed_in_place() -> None:
    """A new tensor would be nobody's."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(5))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            return x - self.mean

    with pytest.raises(UserError, match=r"representation\.2\.mean a new tensor: change it in place"):
        split(chain(Mean()), None, X)


class Remembering(nn.Module):
    """Does something with what it holds whenever it is called in train mode."""

    def __init__(self, held: object, do: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self._held, self.do = held, do

    def forward(self, x: Tensor) -> Tensor:
        change = self.do(self, x.detach()) if self.training else 0
        return x + change if isinstance(change, Tensor) else x


def _average(own: Any, x: Tensor) -> Tensor:
    own._held = 0.9 * own._held + 0.1 * x.mean(0)
    return -own._held


def _average_in_place(own: Any, x: Tensor) -> Tensor:
    return -own._held.mul_(0.9).add_(0.1 * x.mean(0))


def _count(own: Any, x: Tensor) -> None:
    own._held += 1


def _append(own: Any, x: Tensor) -> None:
    own._held["means"].append(x.mean())


def _exchange(own: Any, x: Tensor) -> Tensor:
    before, own._held = own._held, x.mean(0)
    return before


@pytest.mark.parametrize(
    ("held", "do"),
    [
        (torch.zeros(5), _average),
        (torch.zeros(5), _average_in_place),
        (np.zeros(1), _count),
        (0, _count),
        (np.int64(0), _count),
        ({"means": []}, _append),
    ],
)
def test_what_is_carried_on_outside_of_buffers_is_refused(held: object, do: Callable[[Any, Tensor], object]) -> None:
    """One module serves all workers of a process, and no checkpoint would hold it."""
    with pytest.raises(UserError, match=r"forward carries representation\.2\._held on .* \(register_buffer\)"):
        split(chain(Remembering(held, do)), None, X)


def test_a_buffer_that_is_not_kept_carries_nothing_on_either() -> None:
    for persistent in (True, False):
        layer = Remembering(None, _average_in_place)
        del layer._held
        layer.register_buffer("_held", torch.zeros(5), persistent=persistent)
        if persistent:
            assert split(chain(layer), None, X).moving == ("representation.2._held",)
        else:
            with pytest.raises(UserError, match=r"forward carries representation\.2\._held on from batch to batch"):
                split(chain(layer), None, X)


@pytest.mark.parametrize(
    ("held", "do"),
    [
        (torch.zeros(5), _exchange),
        (np.random.default_rng(0), lambda own, x: torch.tensor(own._held.random())),
        (iter(range(99)), lambda own, x: torch.tensor(next(own._held))),
    ],
    ids=["previous batch", "generator", "iterator"],
)
def test_what_is_carried_on_out_of_sight_shows_in_the_output(held: object, do: Callable[[Any, Tensor], object]) -> None:
    with pytest.raises(UserError, match="forward gives samples another output when it has seen others before"):
        split(chain(Remembering(held, do)), None, X)


def _cache(own: Any, x: Tensor) -> Tensor:
    own._held = torch.arange(5.0) if own._held is None else own._held
    return own._held


def _note(own: Any, x: Tensor) -> None:
    own._held = {"last": [x, float("nan"), object(), x.to_sparse()]}


endless: list[object] = []
endless.extend([endless, endless])


@pytest.mark.parametrize(
    "layer",
    [
        Remembering(None, _cache),
        Remembering(None, _note),
        Remembering(endless, lambda own, x: None),
        Remembering(torch.eye(5).to_sparse(), lambda own, x: None),
        nn.utils.spectral_norm(nn.Linear(5, 5)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5)),
    ],
    ids=["cache", "note", "endless", "sparse", "old norm", "new norm"],
)
def test_caches_and_notes_of_the_last_batch_carry_nothing_on(layer: nn.Module) -> None:
    layer.register_buffer("constant", torch.ones(1).expand(5))
    split(chain(layer), None, X)


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


def test_what_is_random_is_forgotten_only_where_it_is_cut_off() -> None:
    net = split(chain(Noise(), nn.Tanh()), None, X)
    assert needs_loop(cut(net, 2)[1]) == "representation.2"
    assert needs_loop(cut(net, 4)[1]) is None
