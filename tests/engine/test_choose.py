"""Which engine runs a net."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from manyheads import memory
from manyheads.engine import choose
from manyheads.engine.choose import make_engine
from manyheads.engine.cuda_graphs.footprint import footprint_of
from manyheads.engine.local import LocalEngine
from manyheads.engine.precision import Precision
from manyheads.errors import UserError
from manyheads.experiment import Runtime
from manyheads.threads import Threads


def noisy(input_shape, num_outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.RReLU(), nn.Linear(8, num_outputs))


class Doubled(nn.Linear):
    """A Linear by its type, and not by what it computes."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda module, inputs, output: 2 * output)
    return layer


def tied(first: nn.Linear, second: nn.Linear) -> nn.Module:
    second.weight = first.weight
    return nn.Sequential(first, second)


UNUSUAL = {
    "own forward": lambda: Doubled(8, 8),
    "hook": lambda: hooked(nn.Linear(8, 8)),
    "hook on a chain": lambda: hooked(nn.Sequential(nn.Linear(8, 8))),
    "reparametrised": lambda: register_parametrization(nn.Linear(8, 8), "weight", nn.Tanh()),
    "tied weights": lambda: tied(nn.Linear(8, 8), nn.Linear(8, 8)),
}
"""Layers that look like links of a chain."""


@pytest.mark.parametrize("net", ["mlp", "dnn"])
def test_auto_stacks_chains(problem, net):
    assert make_engine("auto", problem(net).work).name == "batched"


@pytest.mark.parametrize(("worth", "count"), [(1, 3), (10, 2), (20, 1), (1000, 1)])
def test_threads_have_enough_to_compute(problem, monkeypatch, worth, count):
    """In a step 20 samples, those of five workers in batches of 4; with little to do, threads wait for each other."""
    work, threads = problem("mlp").work, Threads(3)
    assert (len(work.ids), work.source.batch_size) == (5, 4)
    monkeypatch.setattr(choose, "_WORTH_A_THREAD", worth * sum(p.numel() for p in work.model.parameters()))
    engine = make_engine("auto", work, threads=threads)
    assert isinstance(engine, LocalEngine) and engine.threads.count == count
    assert engine.chunk_size == -(-5 // count), "what one thread does is done at once"
    assert (engine.threads is threads) == (count == 3), "those of the run, if all are used"
    loop = make_engine("loop", work, threads=threads)
    assert isinstance(loop, LocalEngine) and loop.threads is threads


def test_auto_loops_over_convolutions_and_random_modules(problem):
    assert make_engine("auto", problem("cnn").work).name == "loop"
    assert make_engine("auto", problem(noisy).work).name == "loop"


def test_a_transform_does_not_keep_workers_from_being_stacked(problem):
    transformed = replace(problem("mlp").work, transform=lambda x, rng: x)
    assert make_engine("auto", transformed).name == "batched"


@pytest.mark.parametrize("net", ["mlp", "cnn"])
def test_the_engines_by_name_agree(problem, phase, net):
    p = problem(net)
    loop, batched = (make_engine(name, p.work, threads=Threads(1)) for name in ("loop", "batched"))
    assert (loop.name, batched.name) == ("loop", "batched")
    a, b = (engine.fit(p.params, p.buffers, phase(), 0) for engine in (loop, batched))
    for name in a.params:
        torch.testing.assert_close(a.params[name], b.params[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layer", UNUSUAL.values(), ids=UNUSUAL)
def test_only_what_is_a_chain_runs_as_one(problem, phase, layer):
    def net(input_shape, num_outputs):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), layer(), nn.ReLU(), nn.Linear(8, num_outputs))

    p = problem(net)
    expected, *others = (make_engine(name, p.work, threads=Threads(1)) for name in ("loop", "auto", "batched"))
    loss = expected.fit(p.params, p.buffers, phase(), 0).loss
    for engine in others:
        torch.testing.assert_close(engine.fit(p.params, p.buffers, phase(), 0).loss, loss, rtol=1e-10, atol=1e-10)


def test_a_net_with_a_hook_on_the_way_back_is_no_chain(problem):
    def net(input_shape, num_outputs):
        second = nn.Linear(8, 8)
        second.register_full_backward_hook(lambda module, inputs, outputs: (2 * inputs[0],))
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), second, nn.ReLU(), nn.Linear(8, num_outputs))

    assert make_engine("auto", problem(net).work).name == "loop"


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (noisy, "representation.2 draws its own random numbers"),
        ("centred", "a sample's output or gradient depends on the others"),
    ],
)
def test_batched_refuses_what_draws_for_itself_or_would_look_at_padding(problem, net, reason):
    with pytest.raises(UserError, match=f"'batched' cannot run this net, as {reason}.*: use 'loop'"):
        make_engine("batched", problem(net).work)
    assert make_engine("batched", problem("batchnorm").work).name == "batched"
    notes = []
    assert make_engine("auto", problem(net).work, notes=notes).name == "loop"
    assert len(notes) == 1 and notes[0].startswith(reason) and notes[0].endswith(": engine 'loop'.")


def test_the_engine_for_gpus_needs_one(problem):
    with pytest.raises(UserError, match="needs a GPU"):
        make_engine("cuda-graphs", problem("mlp").work)


@pytest.mark.parametrize("name", ["loop", "batched"])
def test_every_engine_computes_in_the_precision_it_is_given(problem, phase, name):
    entered = []

    @dataclass(frozen=True)
    class Watched(Precision):
        @contextmanager
        def settings(self, device: torch.device, *, tune: bool = True) -> Iterator[None]:
            entered.append((device.type, tune))
            yield

    p = problem("mlp")
    engine = make_engine(name, p.work, precision=Watched("float64", deterministic=True))
    engine.fit(p.params, p.buffers, phase(), 0)
    engine.evaluate(p.params, p.buffers, p.work.train)
    engine.gradient(p.params, p.buffers, phase(), 0)
    assert entered == [("cpu", False)] * 3, "without trying kernels on every shape of a last batch"


def test_an_unknown_engine_is_named_with_the_nearest():
    with pytest.raises(UserError, match="Did you mean 'batched'"):
        Runtime(engine="bached")  # pyright: ignore[reportArgumentType]


def test_the_host_must_hold_the_rows_that_the_gpu_does_not(problem, monkeypatch):
    work, made, notes = problem("mlp").work, object(), []
    footprint = footprint_of(work.model, tuple(work.train.x.shape[1:]))
    row = sum(p.numel() * p.element_size() for p in work.model.parameters())
    two_copies = round(2e6 * row * len(work.ids))
    monkeypatch.setattr(choose, "free_memory", lambda _: 2.4 * 10**9)
    monkeypatch.setattr(choose, "CudaGraphsEngine", lambda *_, **options: made if options["rows_on_host"] else None)
    monkeypatch.setattr(memory, "available", lambda: 2 * two_copies)
    assert choose._cuda_graphs(work, footprint, Precision(), 1e6, notes) is made
    (streaming,) = notes
    assert "from host memory" in streaming
    monkeypatch.setattr(memory, "available", lambda: round(1.01 * two_copies))
    assert choose._cuda_graphs(work, footprint, Precision(), 1e6, notes) is made
    assert notes[1:-1] == [streaming] and notes[-1].startswith("the rows can take up to")
    monkeypatch.setattr(memory, "available", lambda: round(0.99 * two_copies))
    with pytest.raises(UserError, match=r"^the rows of .* the GPU has 1\.9 GB free and its host .* for \d+: lower"):
        choose._cuda_graphs(work, footprint, Precision(), 1e6, notes)
