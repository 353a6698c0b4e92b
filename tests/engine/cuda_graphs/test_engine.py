"""The engine for GPUs against the plain loop: step by step on a CPU, recorded on a GPU."""

import gc
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyheads import host_memory
from manyheads.data.shards import Shards
from manyheads.engine.batches import Source
from manyheads.engine.chain import is_chain
from manyheads.engine.choose import make_engine
from manyheads.engine.cuda_graphs import CudaGraphsEngine
from manyheads.engine.cuda_graphs.descent import UpdateRule
from manyheads.engine.cuda_graphs.engine import _KEPT
from manyheads.engine.cuda_graphs.fused import PlainUpdate
from manyheads.engine.cuda_graphs.lane import Lane
from manyheads.engine.cuda_graphs.rows import Extras, FlatRows, Kind
from manyheads.engine.cuda_graphs.stacked import stackable
from manyheads.engine.local import LocalEngine
from manyheads.engine.loop import LoopKernel
from manyheads.engine.phase import SGD, Epochs, Phase, Steps, accuracy, cross_entropy, single_head
from manyheads.engine.precision import Precision
from manyheads.engine.workload import Workload
from manyheads.models.norm import has_batchnorm
from manyheads.models.split import Split, hold_still, statistics
from manyheads.models.splitting import split
from manyheads.threads import Threads
from manyheads.tree import Buffers, Params, group

from .recorder import Recording

CLASSES, BATCH = 3, 4
SIZES = (9, 4, 17, 1, 0, 6)
HEAD, BODY, WHOLE = frozenset({"head"}), frozenset({"representation"}), frozenset({"head", "representation"})
PLAIN, FULL = SGD(0.1), SGD(0.05, momentum=0.9, weight_decay=0.01, clip=0.5)
GPU = partial(
    pytest.param,
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")],
)
DEVICES = ["cpu", GPU("cuda")]


class Block(nn.Module):
    """A small residual block with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.conv(x)) + x)


class Scale(nn.Module):
    """A parameter of a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def named(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


def chain() -> nn.Module:
    return named(
        flat=nn.Flatten(), fc1=nn.Linear(32, 8), relu1=nn.ReLU(), drop=nn.Dropout(0.3),
        fc2=nn.Linear(8, 6, bias=False), relu2=nn.ReLU(), fc3=nn.Linear(6, CLASSES),
    )  # fmt: skip


def other() -> nn.Module:
    return named(
        flat=nn.Flatten(), fc1=nn.Linear(32, 8), norm=nn.LayerNorm(8), gelu=nn.GELU(), drop=nn.Dropout(0.3),
        fc2=nn.Linear(8, CLASSES),
    )  # fmt: skip


def smooth() -> nn.Module:
    return named(
        flat=nn.Flatten(), fc1=nn.Linear(32, 8), gelu=nn.GELU(), fc2=nn.Linear(8, 7), silu=nn.SiLU(),
        drop=nn.Dropout(0.3), fc3=nn.Linear(7, 6), tanh=nn.Tanh(), fc4=nn.Linear(6, 5), sigmoid=nn.Sigmoid(),
        fc5=nn.Linear(5, 4), leaky=nn.LeakyReLU(0.2), fc6=nn.Linear(4, CLASSES),
    )  # fmt: skip


def held() -> nn.Module:
    return named(
        flat=nn.Flatten(), fc1=nn.Linear(32, 8), relu1=nn.ReLU(), drop=nn.Dropout(0.3),
        fc2=nn.Linear(8, 6).requires_grad_(False), relu2=nn.ReLU(), fc3=nn.Linear(6, CLASSES),
    )  # fmt: skip


def images() -> nn.Module:
    return named(
        conv1=nn.Conv2d(2, 4, 3, padding=1), relu1=nn.ReLU(), drop=nn.Dropout(0.3),
        conv2=nn.Conv2d(4, 5, 2, 2, padding=(1, 0), bias=False), elu2=nn.ELU(0.5),
        pool=nn.MaxPool2d(2), flat=nn.Flatten(), fc1=nn.Linear(5, 8), relu3=nn.ReLU(), fc2=nn.Linear(8, CLASSES),
    )  # fmt: skip


def convolutional() -> nn.Module:
    return named(
        conv=nn.Conv2d(2, 4, 3, padding=1), soft=nn.Softsign(), pool=nn.MaxPool2d(2), flat=nn.Flatten(),
        drop=nn.Dropout(0.3), fc1=nn.Linear(16, 8), relu1=nn.ReLU(), fc2=nn.Linear(8, CLASSES),
    )  # fmt: skip


def normalised() -> nn.Module:
    return named(
        conv=nn.Conv2d(2, 4, 3, padding=1, bias=False), bn=nn.BatchNorm2d(4), relu=nn.ReLU(), block=Block(),
        pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), fc=nn.Linear(4, CLASSES),
    )  # fmt: skip


def scaled() -> nn.Module:
    return named(flat=nn.Flatten(), fc1=nn.Linear(32, 8), scale=Scale(), relu=nn.ReLU(), fc2=nn.Linear(8, CLASSES))


def hooked() -> nn.Module:
    """Layers that are replaced by ours, with code of the user's around them."""
    net = named(
        flat=nn.Flatten(), fc1=nn.Linear(32, 8), bn=nn.BatchNorm1d(8), relu=nn.ReLU(), drop=nn.Dropout(0.3),
        fc2=nn.Linear(8, CLASSES),
    )  # fmt: skip
    for layer in (net.bn, net.drop):
        layer.register_forward_hook(lambda layer, inputs, output: 2 * output)
    return net


NETS = {
    "chain": chain,
    "other": other,
    "smooth": smooth,
    "held": held,
    "images": images,
    "convolutional": convolutional,
    "normalised": normalised,
    "scaled": scaled,
    "hooked": hooked,
}
STACKED = ("chain", "other", "smooth", "held", "images", "scaled")


def make_model(net: str, dtype: torch.dtype) -> Split:
    torch.manual_seed(3)
    model = split(NETS[net](), None, torch.randn(2, 2, 4, 4)).to(dtype)
    hold_still(model)
    return model


def make_shards(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> Shards:
    """Shards that share samples of one pool."""
    generator = torch.Generator().manual_seed(5)
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    x = torch.randn(20, 2, 4, 4, generator=generator, dtype=torch.float64)
    index = torch.randint(20, (ends[-1],), generator=generator)
    y = torch.randint(CLASSES, (ends[-1],), generator=generator)
    return Shards(x, index, y, tuple(ends)).to(device, dtype)


def make_state(model: Split, num_workers: int, device: str) -> tuple[Params, Buffers]:
    """Every worker its own weights."""
    generator = torch.Generator().manual_seed(7)

    def spread(leaf: Tensor) -> Tensor:
        noise = torch.randn(num_workers, *leaf.shape, generator=generator, dtype=torch.float64).to(leaf.device)
        return (
            leaf.detach() + 0.1 * noise.to(leaf.dtype) if leaf.is_floating_point() else leaf.expand(num_workers)
        ).to(device)

    params = {name: spread(p) for name, p in model.named_parameters()}
    buffers = {n: spread(b).abs() if b.is_floating_point() else spread(b) for n, b in statistics(model).items()}
    return params, buffers


class Sides:
    """The two engines on the same work."""

    def __init__(
        self,
        model: Split,
        device: str,
        *,
        batch_size: int = BATCH,
        sizes: tuple[int, ...] = SIZES,
        precision: str = "float32",
        num_slots: int = 2,
        num_stacked: int = 4,
    ) -> None:
        dtype = next(model.parameters()).dtype
        source = Source(11, batch_size, has_batchnorm(model))
        self.ids = tuple(range(10, 10 + len(sizes)))
        train = make_shards(sizes, dtype, device)
        self.work = Workload(model.to(device), train, self.ids, source, cross_entropy, accuracy)
        self.loop = LocalEngine(self.work, LoopKernel, chunk_size=1, threads=Threads(1), name="loop")
        self.ours = CudaGraphsEngine(
            self.work,
            precision=Precision(precision),
            num_slots=num_slots,
            num_stacked=num_stacked,
            stack_images=True,
            compile=False,
        )
        self.params, self.buffers = make_state(model, len(sizes), device)

    def check(self, phase: Phase, *, rounds: int = 2, workers: Tensor | None = None, tolerance: float = 1e-9) -> None:
        """Run both from the same state, round after round."""
        params, buffers = self.params, self.buffers
        for round in range(rounds):
            here = replace(phase, optimizer=replace(phase.optimizer, lr=phase.optimizer.lr * 0.5**round))
            before = {name: leaf.clone() for name, leaf in {**params, **buffers}.items()}
            expected = self.loop.fit(params, buffers, here, round, workers=workers)
            result = self.ours.fit(params, buffers, here, round, workers=workers)
            for name, leaf in {**params, **buffers}.items():
                assert torch.equal(leaf, before[name]), f"{name} was changed"
            close(result.params, expected.params, tolerance)
            close(result.buffers, expected.buffers, tolerance)
            torch.testing.assert_close(result.loss, expected.loss, rtol=tolerance, atol=tolerance, equal_nan=True)
            assert not all(torch.equal(expected.params[n], params[n]) for n in params), "nothing moved"
            # As in a run, where other phases move what this one leaves: nothing that was kept of it may be used again.
            params = {n: leaf if group(n) in phase.update else 1.25 * leaf for n, leaf in expected.params.items()}
            buffers = expected.buffers


def close(result: Params, expected: Params, tolerance: float) -> None:
    assert result.keys() == expected.keys()
    for name, leaf in expected.items():
        torch.testing.assert_close(
            result[name], leaf, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def phase_of(update: frozenset[str], sgd: SGD = FULL, **options) -> Phase:
    stream = "head" if update == HEAD else "body"
    return Phase(stream, update, options.pop("amount", Epochs(2)), sgd, single_head(cross_entropy), **options)


PHASES = {
    "whole": phase_of(WHOLE),
    "whole, plain": phase_of(WHOLE, PLAIN),
    "body": phase_of(BODY),
    "head": phase_of(HEAD),
    "head, eval": phase_of(HEAD, frozen="eval"),
    "steps": phase_of(WHOLE, amount=Steps(3)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("net", NETS)
def test_agrees_with_the_loop(net: str, phase: str, device: str) -> None:
    Sides(make_model(net, torch.float64), device, precision="float64").check(PHASES[phase])


@pytest.mark.parametrize("net", NETS)
def test_which_nets_are_stacked(net: str) -> None:
    assert stackable(make_model(net, torch.float64), images=True) == (net in STACKED)
    assert stackable(make_model(net, torch.float64), images=False) == (net in STACKED and net != "images")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("net", NETS)
def test_anchor_mask_and_absent_workers(net: str, device: str) -> None:
    sides = Sides(make_model(net, torch.float64), device, precision="float64")
    generator = torch.Generator().manual_seed(1)
    mask = {
        name: (torch.rand(leaf.shape, generator=generator) < 0.5).to(device)
        for name, leaf in sides.params.items()
        if name.endswith("weight")
    }
    anchor = {name: leaf + 1 for name, leaf in sides.params.items()}
    phase = phase_of(WHOLE, proximal=(anchor, 0.7), mask={name: leaf.double() for name, leaf in mask.items()})
    sides.check(phase, workers=torch.tensor([2, 0, 3]))
    moved = sides.ours.fit(sides.params, sides.buffers, phase, 0).params
    for name, leaf in mask.items():
        assert not moved[name][2][~leaf[2]].any(), "a masked weight is zero"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("net", ["chain", "normalised"])
def test_a_mask_of_some_leaves_is_no_mask_of_those_that_were_masked_before(net: str, device: str) -> None:
    sides = Sides(make_model(net, torch.float64), device, precision="float64")
    every = {name: torch.zeros_like(leaf) for name, leaf in sides.params.items()}
    head = next(name for name in every if name.startswith("head") and name.endswith("weight"))
    for mask in (every, {head: every[head]}):
        phase = phase_of(WHOLE, mask=mask)
        result, expected = (one.fit(sides.params, sides.buffers, phase, 0) for one in (sides.ours, sides.loop))
        close(result.params, expected.params, 1e-9)


@dataclass
class Weighted:
    """An objective that cannot be hashed."""

    factor: float

    def __call__(self, outputs: dict[str, Tensor], y: Tensor, constants: Params) -> Tensor:
        return self.factor * cross_entropy(outputs["head"], y)


def test_objectives_may_be_objects_that_do_not_hash_and_functions_that_call_themselves() -> None:
    sides = Sides(make_model("chain", torch.float64), "cpu", precision="float64")

    def repeated(outputs: dict[str, Tensor], y: Tensor, constants: Params, times: int = 2) -> Tensor:
        return cross_entropy(outputs["head"], y) + (repeated(outputs, y, constants, times - 1) if times else 0)

    for objective in (Weighted(2.0), repeated):
        sides.check(replace(phase_of(WHOLE), objective=objective))
    assert len(sides.ours._trainers) == 2, "each is recorded once for all rounds"


class Softened(nn.Module):
    """A loss that holds a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(CLASSES, dtype=torch.float64)

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(output * self.scale, y)


@pytest.mark.parametrize("net", ["chain", "other", "normalised"])
def test_what_an_objective_holds_may_change_between_rounds(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it stays the same object: what was recorded with other numbers is not replayed."""
    monkeypatch.setattr(Lane, "record", lambda lane, step: Recording(step).replay)
    sides = Sides(make_model(net, torch.float64), "cpu", precision="float64")
    factors, weighted, loss = [1.0], Weighted(1.0), Softened()

    def listed(outputs: dict[str, Tensor], y: Tensor, constants: Params) -> Tensor:
        return factors[0] * cross_entropy(outputs["head"], y)

    for number in (1.0, 2.0, 0.5):
        factors[0], weighted.factor, loss.scale = number, number, number * loss.scale
        for objective in (listed, weighted, weighted.__call__, single_head(loss)):
            sides.check(replace(phase_of(WHOLE), objective=objective), rounds=1)
            expected, result = (
                one.gradient(sides.params, sides.buffers, replace(phase_of(WHOLE), objective=objective), 0)
                for one in (sides.loop, sides.ours)
            )
            close(result, expected, 1e-12)


def test_what_a_loss_holds_may_change_between_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lane, "record", lambda lane, step: Recording(step).replay)
    sides, loss = Sides(make_model("chain", torch.float64), "cpu", precision="float64"), Softened()
    for engine in (sides.loop, sides.ours):
        engine.work = replace(sides.work, loss=loss)
    for number in (1.0, 2.0, 0.5):
        loss.scale = number * loss.scale
        expected, result = (one.evaluate(sides.params, {}, sides.work.train) for one in (sides.loop, sides.ours))
        torch.testing.assert_close(result.loss, expected.loss, equal_nan=True)


@pytest.mark.parametrize("net", ["chain", "other"])
def test_a_representation_decays_even_if_no_head_sends_it_a_gradient(net: str) -> None:
    model = make_model(net, torch.float64)
    model.detached = frozenset(model.head_names)
    phase = PHASES["whole"]
    assert phase.optimizer.weight_decay > 0
    sides = Sides(model, "cpu", precision="float64")
    sides.check(phase)
    batched = make_engine("batched", sides.work, threads=Threads(1)).fit(sides.params, sides.buffers, phase, 0)
    close(batched.params, sides.loop.fit(sides.params, sides.buffers, phase, 0).params, 1e-12)


def test_recordings_for_numbers_that_change_in_every_round_do_not_pile_up() -> None:
    sides = Sides(make_model("chain", torch.float64), "cpu", precision="float64")
    steady = phase_of(WHOLE, amount=Steps(1))
    sides.ours.fit(sides.params, {}, steady, 0)
    (kept,) = sides.ours._trainers.values()
    for factor in range(1, 40):
        phase = replace(steady, objective=Weighted(factor))
        close(*(one.fit(sides.params, {}, phase, 0).params for one in (sides.ours, sides.loop)), 1e-9)
        sides.ours.fit(sides.params, {}, steady, 0)
    assert len(sides.ours._trainers) == _KEPT
    assert any(trainer is kept for trainer in sides.ours._trainers.values()), "what is used in every round stays"


def test_a_counter_of_an_objective_is_no_reason_to_record_anew() -> None:
    sides = Sides(make_model("chain", torch.float64), "cpu", precision="float64")
    objective = Weighted(2.0)
    for count in range(3):
        objective._count = count
        sides.ours.fit(sides.params, {}, replace(phase_of(WHOLE), objective=objective), 0)
    assert len(sides.ours._trainers) == 1


def test_when_compiling_fails_what_was_compiled_before_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyheads.engine.cuda_graphs.engine.keeps_dropout", lambda device: True)
    sides = Sides(make_model("chain", torch.float64), "cpu", precision="float64")
    sides.ours.fit(sides.params, {}, phase_of(WHOLE), 0)
    sides.ours.compile = True
    tries = iter([RuntimeError("no compiler"), None])

    def make() -> dict:
        if error := next(tries):
            raise error
        return dict(sides.ours._trainers)

    assert sides.ours._compiled_if_possible(make) == {}
    assert not sides.ours.compile and "torch.compile failed (RuntimeError: no compiler)" in sides.ours.notes[-1]


def test_an_objective_that_fails_is_no_reason_not_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyheads.engine.cuda_graphs.engine.keeps_dropout", lambda device: True)
    sides = Sides(make_model("chain", torch.float64), "cpu", precision="float64")
    sides.ours.fit(sides.params, {}, phase_of(WHOLE), 0)
    before = dict(sides.ours._trainers)
    sides.ours.compile = True

    def make() -> None:
        raise RuntimeError("shapes that do not fit")

    with pytest.raises(RuntimeError, match="do not fit"):
        sides.ours._compiled_if_possible(make)
    assert sides.ours.compile and sides.ours.stack_images and not sides.ours.notes
    assert sides.ours._trainers == before


def two_losses(outputs: dict[str, Tensor], y: Tensor, constants: Params) -> Tensor:
    generic = outputs["generic"]
    return cross_entropy(generic + constants["bias"], y) + cross_entropy(generic.detach() + outputs["head"], y)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("net", NETS)
def test_two_heads_and_constants(net: str, device: str) -> None:
    model = make_model(net, torch.float64).with_head("generic", detach=frozenset({"head"}))
    sides = Sides(model, device, precision="float64")
    bias = torch.arange(len(SIZES) * CLASSES, device=device, dtype=torch.float64).view(-1, CLASSES)
    groups = frozenset({"representation", "head", "generic"})
    sides.check(Phase("body", groups, Epochs(2), FULL, two_losses, {"bias": bias}))


@pytest.mark.parametrize(("device", "compiled"), [("cpu", False), GPU("cuda", False), GPU("cuda", True)])
@pytest.mark.parametrize("net", ["convolutional", "normalised"])
def test_short_batches_of_every_length(net: str, device: str, compiled: bool) -> None:
    """Large batches are cut to a few widths; statistics are those of the true samples."""
    sizes = (33, 34, 36, 40, 49, 57, 63, 64, 65, 3)
    sides = Sides(make_model(net, torch.float64), device, precision="float64", batch_size=32, sizes=sizes, num_slots=3)
    sides.ours.compile = compiled
    sides.check(phase_of(WHOLE, amount=Epochs(1)), rounds=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("net", ["chain", "images", "normalised"])
def test_nothing_depends_on_slots_or_chunks(net: str, device: str) -> None:
    model = make_model(net, torch.float64)
    fits = []
    for number in (1, 2, 6):
        sides = Sides(model, device, precision="float64", num_slots=number, num_stacked=number)
        fits.append(sides.ours.fit(sides.params, sides.buffers, phase_of(WHOLE), 3))
    for fit in fits[1:]:
        close({**fit.params, **fit.buffers}, {**fits[0].params, **fits[0].buffers}, 1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("net", STACKED)
def test_more_workers_than_a_stack_holds(net: str, device: str) -> None:
    sizes = tuple(range(1, 40, 2))
    sides = Sides(make_model(net, torch.float64), device, precision="float64", sizes=sizes, num_slots=3, num_stacked=17)
    sides.check(phase_of(WHOLE, amount=Epochs(1)), workers=torch.tensor([k for k in range(20) if k != 7]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("net", NETS)
def test_scores(net: str, device: str) -> None:
    sides = Sides(make_model(net, torch.float64), device, precision="float64")
    weighted = make_shards((0, 600, 3, 1, 256, 20), torch.float64, device)
    weight = torch.rand(weighted.offsets[-1], device=device, dtype=torch.float64)
    # Turned images lie in the same memory and have the same shape.
    turned = replace(sides.work.train, x=sides.work.train.x.mT)
    for shards in (turned, sides.work.train, replace(weighted, weight=weight), turned, sides.work.train):
        expected = sides.loop.evaluate(sides.params, sides.buffers, shards)
        result = sides.ours.evaluate(sides.params, sides.buffers, shards)
        for kind in ("metric", "loss"):
            torch.testing.assert_close(getattr(result, kind), getattr(expected, kind), equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("batches", [Steps(1), Steps(3), None])
def test_gradient(net: str, device: str, batches: Steps | None) -> None:
    """Of one batch, of several, and of shards that are empty or take more than one pass."""
    sides = Sides(make_model(net, torch.float64), device, precision="float64", sizes=(9, 0, 300))
    for phase, round in ((phase_of(BODY), 1), (phase_of(WHOLE), 1), (phase_of(BODY), 2)):
        expected, result = (
            engine.gradient(sides.params, sides.buffers, phase, round, batches=batches)
            for engine in (sides.loop, sides.ours)
        )
        close(result, expected, 1e-12)


@pytest.mark.parametrize(("device", "compiled"), [("cpu", False), GPU("cuda", False), GPU("cuda", True)])
@pytest.mark.parametrize("net", ["chain", "held", "images", "convolutional", "normalised"])
def test_bf16_stays_near_and_keeps_its_copy(net: str, device: str, compiled: bool) -> None:
    """Compiled code, too, which rounds numbers in other places."""
    sides = Sides(make_model(net, torch.float32), device, precision="bf16")
    sides.ours.compile = compiled
    for phase in (PHASES["whole"], PHASES["head"]):
        expected = sides.loop.fit(sides.params, sides.buffers, phase, 0)
        result = sides.ours.fit(sides.params, sides.buffers, phase, 0)
        for name, leaf in expected.params.items():
            assert result.params[name].dtype == torch.float32
            moved = (leaf - sides.params[name]).norm()
            assert (result.params[name] - leaf).norm() <= 0.25 * moved + 1e-6, name
        torch.testing.assert_close(result.loss, expected.loss, rtol=0.05, atol=0.05, equal_nan=True)


def test_a_pooling_that_comes_first_may_be_given_images_without_channels() -> None:
    first = named(pool=nn.MaxPool2d((2, 1)), flat=nn.Flatten(), fc1=nn.Linear(16, 4), fc2=nn.Linear(4, CLASSES))
    assert not is_chain(split(first, None, torch.randn(2, 2, 4, 4)), images=True)
    Sides(split(first, None, torch.randn(2, 2, 4, 4)).double(), "cpu", precision="float64").check(PHASES["whole"])


def test_without_a_compiler_images_go_through_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no C compiler here")

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr("manyheads.engine.cuda_graphs.engine.keeps_dropout", lambda device: True)
    sides = Sides(make_model("images", torch.float64), "cpu", precision="float64")
    sides.ours.compile = True
    sides.check(PHASES["whole"])
    (note,) = sides.ours.notes
    assert note == "torch.compile failed (RuntimeError: no C compiler here): running without it, which is slower."
    assert not sides.ours.stack_images


def test_what_a_compiler_remarks_reaches_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tests turn warnings into errors, as users' may: none of them is a reason to do without compiled code."""
    asked = []

    def talkative(function: Callable, **_: object) -> Callable:
        warnings.warn("online softmax is disabled", stacklevel=1)
        logging.getLogger("torch.utils._sympy.interp").warning("failed while executing pow_by_natural")
        asked.append(function)
        return function

    monkeypatch.setattr(torch, "compile", talkative)
    monkeypatch.setattr("manyheads.engine.cuda_graphs.engine.keeps_dropout", lambda device: True)
    sides = Sides(make_model("images", torch.float64), "cpu", precision="float64")
    sides.ours.compile = True
    sides.check(PHASES["whole"])
    assert asked and sides.ours.compile and not sides.ours.notes and not caplog.records


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize(("outputs", "inputs", "batch"), [(70, 30, 17), (64, 27, 300), (130, 150, 64), (200, 144, 200)])
def test_the_fused_update_is_the_plain_one(outputs: int, inputs: int, batch: int, low: bool) -> None:
    pytest.importorskip("triton")
    from manyheads.engine.cuda_graphs.fused_kernel import TritonUpdate

    rule, shapes = UpdateRule(0.9, 1e-2, 10.0, 0.3), {"fc.weight": (outputs, inputs), "fc.bias": (outputs,)}
    kind = Kind(3, torch.device("cuda"), torch.float32, low=frozenset(shapes) if low else frozenset())
    ends = []
    for update in (PlainUpdate(rule), TritonUpdate(rule, tensor_cores=False)):
        torch.manual_seed(1)
        rows = FlatRows(shapes, kind, Extras(gradient=False, momentum=True, anchor=True, mask=True))
        (part,) = rows.parts
        for flat in (part.weight, part.momentum, part.anchor):
            assert flat is not None
            flat.copy_(torch.randn_like(flat))
        part.compute.copy_(part.weight)
        d, x = torch.randn(3, batch, outputs, device="cuda"), torch.randn(3, batch, inputs + 5, device="cuda")
        d, x = (d.bfloat16(), x.bfloat16()) if low else (d, x)
        factor, count = torch.tensor([1.0, 0.5, 0.2], device="cuda"), torch.tensor([4, 0, 3], device="cuda")
        rate = torch.tensor([0.1], device="cuda")
        update.by_factors(part, "fc", d, x[..., :inputs], factor, count, rate, bias=True)
        gradient = torch.randn(3, outputs * inputs, device="cuda").to(d.dtype)
        update.by_gradient(part, "fc.weight", gradient, factor, count, rate)
        ends.append((rows.weight, {name: leaf.float() for name, leaf in rows.compute.items()}))
    close(ends[1][0], ends[0][0], 1e-4)
    close(ends[1][1], ends[0][1], 0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("net", STACKED)
def test_compiled_stacks_agree_with_the_loop(net: str) -> None:
    sides = Sides(make_model(net, torch.float32), "cuda", sizes=(9, 9, 8, 8, 8, 8, 5, 5, 5, 1), num_stacked=10)
    sides.ours.compile = True
    for phase in (PHASES["whole"], PHASES["body"]):
        sides.check(phase, tolerance=1e-4)
    assert sides.ours.compile and not sides.ours.notes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("net", NETS)
def test_rows_in_host_memory(net: str) -> None:
    sides = Sides(make_model(net, torch.float64), "cuda", precision="float64")
    params, buffers = (host_memory.pinned(tree) for tree in (sides.params, sides.buffers))
    for phase in (PHASES["whole"], PHASES["head"]):
        expected = sides.ours.fit(sides.params, sides.buffers, phase, 0, workers=torch.tensor([2, 0]))
        result = sides.ours.fit(params, buffers, phase, 0, workers=torch.tensor([2, 0]))
        close(result.params, {n: leaf.cpu() for n, leaf in expected.params.items()}, 1e-12)
        close(result.buffers, {n: leaf.cpu() for n, leaf in expected.buffers.items()}, 1e-12)
    scores = (
        sides.ours.evaluate(p, b, sides.work.train) for p, b in ((sides.params, sides.buffers), (params, buffers))
    )
    torch.testing.assert_close(*(score.loss for score in scores), equal_nan=True)
    with_samples = Sides(make_model(net, torch.float64), "cuda", precision="float64", sizes=(9, 4, 17))
    params, buffers = (host_memory.pinned(tree) for tree in (with_samples.params, with_samples.buffers))
    expected = with_samples.ours.gradient(with_samples.params, with_samples.buffers, phase_of(BODY), 1)
    result = with_samples.ours.gradient(params, buffers, phase_of(BODY), 1)
    close(result, {n: leaf.cpu() for n, leaf in expected.items()}, 1e-12)


class Doubled(torch.autograd.Function):
    """An operation in the old form, which torch.func cannot take."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class WithOldForm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.top = nn.Linear(32, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(Doubled.apply(self.body(x.flatten(1))))


@pytest.mark.parametrize("device", DEVICES)
def test_a_net_that_cannot_be_stacked_runs_in_slots(device: str) -> None:
    torch.manual_seed(3)
    model = split(WithOldForm(), "top", torch.randn(2, 2, 4, 4)).to(torch.float64)
    sides = Sides(model, device, precision="float64")
    sides.check(PHASES["whole"])
    sides.check(PHASES["head"])
    (note,) = sides.ours.notes
    assert note.startswith("this net cannot be stacked (") and note.endswith("): it runs in slots.")


def test_an_objective_that_fails_is_no_reason_not_to_stack_a_net() -> None:
    sides = Sides(make_model("other", torch.float64), "cpu", precision="float64")

    def misshapen(outputs: dict[str, Tensor], y: Tensor, constants: Params) -> Tensor:
        return outputs["head"] @ outputs["head"]

    with pytest.raises(RuntimeError, match="shape"):
        sides.ours.fit(sides.params, sides.buffers, replace(PHASES["whole"], objective=misshapen), 0)
    sides.check(PHASES["whole"])
    assert sides.ours.vmaps and not sides.ours.notes


def test_recordings_are_made_once() -> None:
    """Rates fall, rounds and streams change, the objective is made anew: the recordings stay."""
    sides = Sides(make_model("convolutional", torch.float64), "cpu", precision="float64")
    made = []
    for round in range(3):
        phase = Phase("ab"[round % 2], WHOLE, Epochs(1), SGD(0.1 * 0.9**round), single_head(cross_entropy))
        sides.ours.fit(sides.params, sides.buffers, phase, round)
        made.append(dict(sides.ours._trainers))
    assert made[0] and made[0].keys() == made[2].keys()
    assert all(made[0][key] is made[2][key] for key in made[0])


def test_workers_without_batches_keep_their_rows() -> None:
    sides = Sides(make_model("normalised", torch.float64), "cpu", precision="float64")
    fit = sides.ours.fit(sides.params, sides.buffers, PHASES["whole"], 0, workers=torch.tensor([3, 4]))
    close({**fit.params, **fit.buffers}, {**sides.params, **sides.buffers}, 0.0)
    assert fit.loss.isnan().all()


def test_a_broken_worker_shows_and_harms_nobody() -> None:
    sides = Sides(make_model("chain", torch.float64), "cpu", precision="float64")
    sides.params["head.fc3.weight"][1] = torch.inf
    fit = sides.ours.fit(sides.params, sides.buffers, PHASES["whole"], 0)
    expected = sides.loop.fit(sides.params, sides.buffers, PHASES["whole"], 0)
    assert fit.loss[1].isinf()
    assert fit.loss[[0, 2, 5]].isfinite().all()
    torch.testing.assert_close(fit.loss[[0, 2, 5]], expected.loss[[0, 2, 5]])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_garbage_does_not_spoil_a_recording() -> None:
    device, total = torch.device("cuda"), torch.zeros(1, device="cuda")

    def step() -> None:
        if torch.cuda.is_current_stream_capturing():
            _ = [[] for _ in range(20_000)]  # enough for a collection
        total.add_(1)

    gc.collect()
    before = gc.get_threshold()
    gc.set_threshold(10_000)
    try:
        # What an engine that nobody has any more looks like: a graph in a cycle.
        lost: list[object] = [Lane(device).record(step)]
        lost.append(lost)
        del lost
        replay = Lane(device).record(step)
    finally:
        gc.set_threshold(*before)
    total.zero_()
    replay()
    assert total.item() == 1
