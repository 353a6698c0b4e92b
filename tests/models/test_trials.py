"""What trials find out about a net: what draws, what looks at other samples, what moves and what is carried on."""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from manyheads.errors import UserError
from manyheads.models.split import needs_loop
from manyheads.models.splitting import split

from .small import Custom, Noise, Standardised, X, chain

# Nets are drawn where they are listed: of other weights an RReLU may see no negative number, and draw none itself.
torch.manual_seed(0)


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
    with pytest.raises(UserError, match=r"draws from Python's or numpy's random numbers: draw from torch's"):
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


def test_splitting_draws_nothing_from_the_global_generator() -> None:
    module = chain(nn.AlphaDropout(0.5))
    before = torch.get_rng_state()
    split(module, None, X)
    assert torch.equal(before, torch.get_rng_state())


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

    with pytest.raises(UserError, match=r"assigns a new tensor to representation\.2\.mean: change it in place"):
        split(chain(Mean()), None, X)


class Writing(nn.Module):
    """Does something with its weight and its buffer whenever it is called."""

    def __init__(self, do: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 5))
        self.register_buffer("mean", torch.zeros(5))
        self.rare, self.do = nn.Embedding(9, 5, max_norm=99.0), do

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.do(self, x)
        return x + self.weight


@pytest.mark.parametrize(
    ("do", "name"),
    [
        (lambda own, x: own.weight.clamp_(-0.1, 0.1), "2.weight"),
        (lambda own, x: own.weight.data.clamp_(-0.1, 0.1), "2.weight"),
        (lambda own, x: own.training and own.weight.mul_(0.9), "representation.2.weight"),
        (lambda own, x: own.rare(torch.arange(2)), "2.rare.weight"),
        (lambda own, x: own.mean.lerp_(x.mean(0), 0.1), "2.mean"),
    ],
    ids=["weight", "data", "in training", "max_norm", "buffer in eval mode"],
)
def test_a_forward_that_writes_to_what_is_trained_is_refused(do: Callable[[Any, Tensor], object], name: str) -> None:
    """Otherwise runs would depend on when they are scored, and on which workers share first weights."""
    with pytest.raises(UserError, match=rf"forward writes to {name}: it may change nothing but buffers"):
        split(chain(Writing(do)), None, X)


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


def _mark(own: Any, x: Tensor) -> None:
    own._held |= bool((x == x[0]).all())


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
        (deque(), lambda own, x: own._held.append(x.mean())),
        (set(), lambda own, x: own._held.add(len(own._held))),
        (np.False_, _mark),
    ],
)
def test_what_is_carried_on_outside_of_buffers_is_refused(held: object, do: Callable[[Any, Tensor], object]) -> None:
    """One module serves all workers of a process, and no checkpoint would hold it."""
    with pytest.raises(UserError, match=r"forward carries representation\.2\._held over .* \(register_buffer\)"):
        split(chain(Remembering(held, do)), None, X)


def test_a_buffer_that_is_not_kept_carries_nothing_on_either() -> None:
    for persistent in (True, False):
        layer = Remembering(None, _average_in_place)
        del layer._held
        layer.register_buffer("_held", torch.zeros(5), persistent=persistent)
        if persistent:
            assert split(chain(layer), None, X).moving == ("representation.2._held",)
        else:
            with pytest.raises(UserError, match=r"forward carries representation\.2\._held over from batch to batch"):
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
    with pytest.raises(UserError, match="forward gives a sample a different output after it has seen others"):
        split(chain(Remembering(held, do)), None, X)


def _cache(own: Any, x: Tensor) -> Tensor:
    own._held = torch.arange(5.0) if own._held is None else own._held
    return own._held


def _note(own: Any, x: Tensor) -> None:
    own._held = {"last": [x, float("nan"), object()]}


def _note_sparse(own: Any, x: Tensor) -> None:
    own._held = [x.to_sparse()]


endless: list[object] = []
endless.extend([endless, endless])


@pytest.mark.parametrize(
    "layer",
    [
        Remembering(None, _cache),
        Remembering(None, _note),
        Remembering(None, _note_sparse),
        Remembering(endless, lambda own, x: None),
        Remembering(torch.eye(5).to_sparse(), lambda own, x: None),
        nn.utils.spectral_norm(nn.Linear(5, 5)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5)),
    ],
    ids=["cache", "note", "sparse note", "endless", "sparse", "old norm", "new norm"],
)
def test_caches_and_notes_of_the_last_batch_carry_nothing_on(layer: nn.Module) -> None:
    layer.register_buffer("constant", torch.ones(1).expand(5))
    split(chain(layer), None, X)
