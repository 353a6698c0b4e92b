"""Every kernel computes what the plain loop computes, on every net that both can run."""

from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from manyheads.algorithms.fedrod import two_losses
from manyheads.engine.chain import is_chain
from manyheads.engine.choose import make_engine
from manyheads.engine.phase import SGD, Epochs, Fit, Phase, Steps, cross_entropy
from manyheads.errors import UserError
from manyheads.models.split import twin
from manyheads.threads import Threads
from manyheads.tree import group

HEAD, BODY = frozenset({"head"}), frozenset({"representation"})
EVERYTHING = SGD(0.05, momentum=0.9, weight_decay=0.01, clip=0.3)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-4}

CHANGES = {
    "joint": lambda p: {},
    "head": lambda p: {"stream": "head", "update": HEAD},
    "head-eval": lambda p: {"stream": "head", "update": HEAD, "frozen": "eval"},
    "body": lambda p: {"update": BODY},
    "momentum-decay-clip": lambda p: {"optimizer": EVERYTHING},
    "body-momentum-decay-clip": lambda p: {"update": BODY, "optimizer": EVERYTHING},
    "steps": lambda p: {"amount": Steps(5), "optimizer": EVERYTHING},
    "proximal": lambda p: {"proximal": (p.anchor(), 0.7)},
    "proximal-momentum": lambda p: {"proximal": (p.anchor(), 0.7), "optimizer": EVERYTHING},
    "mask": lambda p: {"mask": p.mask()},
    "mask-momentum": lambda p: {"mask": p.mask(), "optimizer": EVERYTHING},
    "nothing-to-do": lambda p: {"amount": Epochs(0)},
}


def assert_agree(given: Fit, expected: Fit, tolerance: float) -> None:
    """Parameters, statistics and losses, leaf by leaf."""

    def close(a: Tensor, b: Tensor, name: str) -> None:
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{name}: {m}")

    assert given.params.keys() == expected.params.keys() and given.buffers.keys() == expected.buffers.keys()
    for name, leaf in {**given.params, **given.buffers}.items():
        close(leaf, {**expected.params, **expected.buffers}[name], name)
    close(given.loss, expected.loss, "loss")


def fits(problem, phase: Phase, kinds: tuple[str, ...], **options) -> list[Fit]:
    return [problem.engine(kind).fit(problem.params, problem.buffers, phase, 2, **options) for kind in kinds]


def agreed(problem, phase: Phase, kinds: tuple[str, ...], tolerance: float = TOLERANCE[torch.float64]) -> Fit:
    """What the first kernel gives, once the others have given the same."""
    expected, *others = fits(problem, phase, kinds)
    for fit in others:
        assert_agree(fit, expected, tolerance)
    return expected


SMALL = {
    "mlp": (("loop", "chain", "vmap"), {"net": "mlp:12,8"}),
    "mlp-deep-head": (("loop", "chain", "vmap"), {"net": "mlp:12,8", "head": "fc2"}),
    "mlp-all-head": (("loop", "chain", "vmap"), {"net": "mlp:12,8", "head": "all"}),
    "mlp-no-head": (("loop", "chain", "vmap"), {"net": "mlp:12,8", "head": "none"}),
    "dnn": (("loop", "chain", "vmap"), {"net": "narrow-dnn"}),
    "smooth": (("loop", "chain", "vmap"), {"net": "smooth"}),
    "dnn-deep-head": (("loop", "chain", "vmap"), {"net": "narrow-dnn", "head": "fc3"}),
    "cnn": (("loop", "vmap"), {"net": "cnn", "sizes": (7, 3, 9)}),
    "batchnorm": (("loop", "vmap"), {"net": "batchnorm"}),
    "summed": (("loop", "vmap"), {"net": "summed"}),
}


@pytest.fixture(scope="session")
def small(problem):
    def make(name: str, **changes):
        kinds, options = SMALL[name]
        return kinds, problem(**{**options, **changes})

    return make


OTHER_CUTS = {
    "mlp-deep-head": ["joint", "head", "body", "momentum-decay-clip"],
    "mlp-all-head": ["joint", "head", "momentum-decay-clip"],
    "mlp-no-head": ["joint", "body", "momentum-decay-clip"],
    "dnn-deep-head": ["head", "head-eval", "body", "momentum-decay-clip"],
}
"""The same nets cut elsewhere need not go through everything again."""


@pytest.mark.parametrize(("net", "change"), [(net, change) for net in SMALL for change in OTHER_CUTS.get(net, CHANGES)])
def test_kernels_agree(small, phase, net, change):
    kinds, p = small(net)
    asked = phase(**CHANGES[change](p))
    fit = agreed(p, asked, kinds)
    moved = {name for name, leaf in p.params.items() if not torch.allclose(fit.params[name], leaf, rtol=1e-4)}
    assert moved == {name for name in p.params if group(name) in asked.update and asked.amount.count}


@pytest.mark.parametrize("change", ["momentum-decay-clip", "head"])
@pytest.mark.parametrize("net", ["mlp", "dnn", "cnn", "batchnorm"])
def test_kernels_agree_in_single_precision(small, phase, net, change):
    kinds, p = small(net, dtype=torch.float32)
    assert agreed(p, phase(**CHANGES[change](p)), kinds, TOLERANCE[torch.float32]).loss.dtype == torch.float32


LARGE = {"dnn": (30,), "alexnet-code": (1, 29, 29), "vgg11": (3, 32, 32), "resnet18": (3, 8, 8)}
"""At small samples; the table's AlexNet has the same kinds of layers as this one and ten times the weights."""


@pytest.mark.parametrize(("net", "change"), [*((net, "joint") for net in LARGE), ("vgg11", "head")])
def test_the_papers_nets_agree(problem, phase, net, change):
    p = problem(net, input_shape=LARGE[net], sizes=(3, 4), batch_size=3)
    asked = phase(**CHANGES[change](p), amount=Steps(1), optimizer=SGD(0.01, clip=0.5))
    agreed(p, asked, ("loop", "chain", "vmap") if net == "dnn" else ("loop", "vmap"))


@pytest.mark.parametrize("net", ["mlp", "dnn", "cnn"])
def test_fedrods_two_losses_agree(small, phase, net):
    kinds, p = small(net, generic=True)
    counts = torch.tensor([[3.0, 1.0, 0.0, 2.0], [1.0, 1.0, 1.0, 0.0], [0.0, 9.0, 0.0, 5.0]], dtype=torch.float64)
    counts = counts.repeat(2, 1)[: p.work.train.num_workers]
    log_counts = torch.where(counts > 0, counts.clamp(min=1).log(), -1e4)
    asked = phase(
        update=HEAD | BODY | {"generic"},
        optimizer=EVERYTHING,
        objective=two_losses,
        constants={"log_counts": log_counts},
    )
    agreed(p, asked, kinds)


@pytest.mark.parametrize("change", ["joint", "momentum-decay-clip"])
def test_two_heads_move_one_representation(small, phase, change):
    """By the sum of what each sends back; heads that send nothing leave it to other kernels, where it decays."""
    kinds, p = small("mlp", generic=True)
    model = twin(p.work.model)
    model.detached = frozenset()
    p = replace(p, work=replace(p.work, model=model))

    def of_both(outputs: dict[str, Tensor], y: Tensor, constants: dict[str, Tensor]) -> Tensor:
        return cross_entropy(outputs["head"], y) + 2 * cross_entropy(outputs["generic"], y)

    asked = phase(**CHANGES[change](p), update=HEAD | BODY | {"generic"}, objective=of_both)
    agreed(p, asked, kinds)
    assert is_chain(model)
    model.detached = frozenset(model.head_names)
    assert not is_chain(model)


@pytest.mark.parametrize("used", ["head", "generic"])
@pytest.mark.parametrize("net", ["mlp", "dnn", "cnn"])
def test_a_head_that_the_objective_leaves_out_decays_and_is_pulled_and_masked(small, phase, net, used):
    kinds, p = small(net, generic=True)

    def of_one_head(outputs: dict[str, Tensor], y: Tensor, constants: dict[str, Tensor]) -> Tensor:
        return cross_entropy(outputs[used], y)

    for change in ("joint", "momentum-decay-clip", "proximal-momentum", "mask"):
        asked = phase(**CHANGES[change](p), update=HEAD | BODY | {"generic"}, objective=of_one_head)
        fit = agreed(p, asked, kinds)
        assert not any(torch.equal(fit.params[name], leaf) for name, leaf in p.params.items())


@pytest.mark.parametrize("net", ["mlp", "cnn", "batchnorm"])
def test_rows_may_lie_in_memory_in_any_order(small, phase, net):
    kinds, p = small(net)
    params, buffers = (
        {name: leaf.transpose(0, -1).contiguous().transpose(0, -1) for name, leaf in tree.items()}
        for tree in (p.params, p.buffers)
    )
    turned = replace(p, params=params, buffers=buffers)
    for change in ("momentum-decay-clip", "head", "body"):
        asked = phase(**CHANGES[change](p))
        expected, *_ = fits(p, asked, kinds)
        for fit in fits(turned, asked, kinds):
            assert_agree(fit, expected, TOLERANCE[torch.float64])
        before, after = (p.engine("loop").gradient(q.params, q.buffers, asked, 0) for q in (p, turned))
        torch.testing.assert_close(after, before, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("net", ["mlp", "batchnorm"])
def test_some_workers_only(small, phase, net):
    kinds, p = small(net)
    asked = phase(optimizer=EVERYTHING, proximal=(p.anchor(), 0.5), mask=p.mask())
    expected, *others = fits(p, asked, kinds, workers=torch.tensor([3, 0]))
    for fit in (expected, *others):
        assert_agree(fit, expected, TOLERANCE[torch.float64])
        for row in (1, 2, 4):
            assert fit.loss[row].isnan()
            for name, leaf in {**p.params, **p.buffers}.items():
                assert torch.equal({**fit.params, **fit.buffers}[name][row], leaf[row]), name
        moved = [name for name, leaf in p.params.items() if not torch.equal(fit.params[name][3], leaf[3])]
        assert moved == list(p.params)


def test_a_minimum_is_stayed_at(problem, phase):
    """There the squared norm of a gradient is the sum of terms that cancel, and may be rounded below zero."""

    def linear(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(input_shape[0], num_outputs))

    p = problem(linear, input_shape=(3,), sizes=(60,) * 6, batch_size=60, head="all", dtype=torch.float32)
    descent = phase(amount=Epochs(500), optimizer=SGD(0.5, momentum=0.9, clip=10.0))
    agreed(p, descent, ("loop", "chain", "vmap"), 1e-4)


def test_numbers_as_targets(problem, phase):
    """A regression on two numbers a sample, as stacked as labels."""
    p = problem("mlp:5")
    targets = torch.stack([p.work.train.y * 0.5, -p.work.train.y], dim=1).double()
    work = replace(p.work, train=replace(p.work.train, y=targets))
    p = replace(p, work=work)

    def squares(outputs: dict[str, Tensor], y: Tensor, constants: dict[str, Tensor]) -> Tensor:
        return (outputs["head"][:, :2] - y).square().sum(1)

    for sizes in ("ragged", "full"):
        batch_size = 4 if sizes == "ragged" else 3
        q = replace(p, work=replace(work, source=replace(work.source, batch_size=batch_size)))
        agreed(q, phase(objective=squares, optimizer=SGD(0.01)), ("loop", "chain", "vmap"))


def nested() -> nn.Module:
    first = nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(inplace=True))
    return nn.Sequential(first, nn.Identity(), nn.Sequential(nn.Linear(5, 4), nn.ReLU()), nn.Linear(4, 4, bias=False))


def tied() -> nn.Module:
    twice = nn.Linear(5, 5)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), twice, nn.ReLU(), twice, nn.ReLU(), nn.Linear(5, 4))


def time_distributed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4))


class Unused(nn.Module):
    """With a layer that forward leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra, self.head = nn.Linear(6, 5), nn.Linear(2, 2), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


UNUSUAL = {
    "linear": (lambda: nn.Linear(6, 4), (6,)),
    "nested": (nested, (6,)),
    "tied": (tied, (6,)),
    "time-distributed": (time_distributed, (2, 3)),
    "unused": (Unused, (6,)),
}


@pytest.mark.parametrize("update", [HEAD | BODY, HEAD], ids=["joint", "head"])
@pytest.mark.parametrize("net", UNUSUAL)
def test_unusual_nets_agree(problem, phase, net, update):
    """Whatever an engine takes, it trains as the loop does; what it cannot take, it refuses in words."""
    factory, shape = UNUSUAL[net]
    p = problem(factory, input_shape=shape, head="all" if net == "linear" else None)
    asked = phase(update=update, optimizer=EVERYTHING)
    expected = make_engine("loop", p.work, threads=Threads(1)).fit(p.params, p.buffers, asked, 1)
    assert expected.loss.isfinite().all()
    for name in ("auto", "batched"):
        try:
            engine = make_engine(name, p.work, threads=Threads(1))
        except UserError:
            assert name == "batched"
            continue
        assert_agree(engine.fit(p.params, p.buffers, asked, 1), expected, TOLERANCE[torch.float64])
        # What one phase leaves behind in the engine is in nobody's way.
        assert engine.evaluate(p.params, p.buffers, p.work.train).loss.isfinite().all()
        assert_agree(engine.fit(p.params, p.buffers, asked, 1), expected, TOLERANCE[torch.float64])


@pytest.mark.parametrize(("net", "change"), [("mlp", "joint"), ("mlp", "head"), ("dnn", "head"), ("dnn", "head-eval")])
def test_a_transform_of_the_inputs(small, phase, net, change):
    """It is drawn once per worker and step, whichever engine asks; no features are kept for a phase."""
    kinds, p = small(net)
    asked = phase(**CHANGES[change](p))

    drawn: list[float] = []

    def noisy(x: Tensor, rng) -> Tensor:
        assert x.shape[1:] == p.work.train.x.shape[1:], "inputs, not features"
        noise = torch.from_numpy(rng.standard_normal(x.shape))
        drawn.append(float(noise.flatten()[0]))
        # Padding is no part of a batch.
        return x - x.mean(0) + noise

    plain = fits(p, asked, ("loop",))[0]
    p = replace(p, work=replace(p.work, transform=noisy))
    expected = agreed(p, asked, kinds)
    assert not torch.equal(expected.loss, plain.loss)
    beside = p.take([3, 1])
    (fit,) = fits(beside, asked, ("loop",))
    assert torch.equal(fit.loss, expected.loss[[3, 1]])
    drawn.clear()
    for round in (0, 1):
        p.engine("loop").fit(p.params, p.buffers, asked, round)
    assert len(set(drawn)) == len(drawn) > 0, "anew for every worker, round and step"


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    batch_size=st.integers(2, 5),
    amount=st.one_of(st.builds(Epochs, st.integers(1, 2)), st.builds(Steps, st.integers(1, 4))),
    net=st.sampled_from(["mlp", "batchnorm"]),
    chunk=st.integers(1, 4),
)
def test_ragged_shards_agree(small, phase, sizes, batch_size, amount, net, chunk):
    _, p = small(net, input_shape=(1, 2, 2), sizes=sizes, batch_size=batch_size)
    asked = phase(amount=amount, optimizer=EVERYTHING)
    expected = p.engine("loop").fit(p.params, p.buffers, asked, 0)
    for kind in ("chain", "vmap") if net == "mlp" else ("vmap",):
        fit = p.engine(kind, chunk=chunk).fit(p.params, p.buffers, asked, 0)
        assert_agree(fit, expected, TOLERANCE[torch.float64])
