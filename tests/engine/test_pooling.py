"""Pooling by way of another layout: the same bits, forward and back."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from manyheads.algorithms import DePRL
from manyheads.data.arrays import from_arrays
from manyheads.engine.images import has_windows
from manyheads.engine.pooling import FastMaxPool2d, with_fast_pooling
from manyheads.experiment import Experiment, Runtime
from manyheads.models.splitting import split
from manyheads.rounds import train
from manyheads.session import open_session


def images(channels: int, kind: str, dtype: torch.dtype) -> Tensor:
    x = torch.randn(3, channels, 9, 7, dtype=dtype, generator=torch.Generator().manual_seed(channels))
    if kind == "with many that are equal":
        return x.relu().round()
    if kind == "not a number":
        x[0, 0, 2, 3] = torch.nan
    return x if kind != "turned" else x.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)


@pytest.mark.parametrize("kind", ["plain", "with many that are equal", "not a number", "turned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, (2,), (3, 2)])
@pytest.mark.parametrize("channels", [1, 8, 20])
def test_the_same_bits_as_torch_in_every_layout(channels: int, size, dtype: torch.dtype, kind: str) -> None:
    plain = nn.MaxPool2d(size)
    assert has_windows(plain)
    x = images(channels, kind, dtype)
    results = []
    for layer in (plain, FastMaxPool2d(plain)):
        inputs = x.clone(memory_format=torch.preserve_format).requires_grad_()
        output = layer(inputs)
        output.backward(torch.arange(output.numel(), dtype=dtype).view_as(output))
        results.append((output.detach(), inputs.grad, layer(x)))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_only_windows_that_lie_side_by_side_are_pooled_so() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.MaxPool2d(2), nn.MaxPool2d(2, stride=1), nn.Flatten(), nn.Linear(72, 2)
    )
    fast = with_fast_pooling(split(net, None, torch.randn(2, 1, 8, 8)))
    assert [type(layer) for layer in fast.representation][1:3] == [FastMaxPool2d, nn.MaxPool2d]


def test_hooks_of_a_pooling_go_on_around_ours() -> None:
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 2))
    net[1].register_forward_hook(lambda layer, inputs, output: 2 * output)
    x = torch.randn(3, 1, 8, 8)
    fast = with_fast_pooling(split(net, None, x))
    assert type(fast.representation[1]) is FastMaxPool2d
    torch.testing.assert_close(fast(x), net(x))


def test_a_run_in_the_loop_on_a_cpu_pools_so_and_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    data = from_arrays(rng.normal(size=(40, 3, 16, 16)), np.arange(40) % 4)
    experiment = Experiment(algorithm=DePRL(), data=data, model="cnn", workers=2, rounds=2, split="iid")
    runtime = Runtime(device="cpu", threads=1)
    assert any(
        type(layer) is FastMaxPool2d for layer in open_session(experiment, runtime).ctx.engine.work.model.modules()
    )
    fast = [record.metrics() for record in train(experiment, runtime)]
    monkeypatch.setattr("manyheads.engine.choose.with_fast_pooling", lambda net: net)
    timed = {"seconds", "peak_memory_bytes"}
    for ours, record in zip(fast, train(experiment, runtime), strict=True):
        assert {k: v for k, v in ours.items() if k not in timed} == {
            k: v for k, v in record.metrics().items() if k not in timed
        }
