"""Dropout masks are a pure function of key and element, and look random."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from manyheads.models.dropout import Dropout, dropout_mask
from manyheads.randomness import hashed, key

KEYS = torch.tensor([0, 1, 2**40, 2**63 - 1, key(1, "dropout/body", worker=3)])
WORD = 1 << 64


def mask(keys: Tensor, shape: tuple[int, ...], p: float = 0.25, dtype: torch.dtype = torch.float32) -> Tensor:
    return dropout_mask(keys, shape, p, dtype, "cpu")


def signed(x: int) -> int:
    x %= WORD
    return x - WORD if x >= WORD // 2 else x


def reference_hash(seed: int, position: int) -> int:
    z = signed(seed + position * 0x9E3779B97F4A7C15)
    z = signed((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9)
    z = signed((z ^ (z >> 27)) * 0x94D049BB133111EB)
    return z ^ (z >> 31)


def test_hashes_equal_those_of_exact_integer_arithmetic() -> None:
    bits = hashed(KEYS, 9)
    assert bits.tolist() == [[reference_hash(k, n) for n in range(1, 10)] for k in KEYS.tolist()]


def test_the_mask_is_the_one_the_docstring_defines() -> None:
    batch, width, p = 3, 4, 0.25
    for k, row, place in itertools.product(KEYS.tolist(), range(batch), range(width)):
        of_row = reference_hash(k, width + row + 1)
        value = (of_row * reference_hash(k, place + 1) + (of_row >> 32)) % 2**32
        reaches = (value + 2**31) % 2**32 >= p * 2**32
        assert mask(torch.tensor(k), (batch, width), p)[row, place] == (1 / (1 - p) if reaches else 0)


def test_a_worker_has_the_same_mask_alone_and_in_a_stack() -> None:
    stacked = mask(KEYS, (6, 3, 5))
    assert stacked.shape == (5, 6, 3, 5)
    assert torch.equal(stacked, torch.stack([mask(k, (6, 3, 5)) for k in KEYS]))
    assert len({row.numpy().tobytes() for row in stacked}) == len(KEYS)


def test_a_row_is_the_same_for_every_batch_size() -> None:
    whole = mask(KEYS, (32, 10))
    for batch in (1, 7, 31):
        assert torch.equal(mask(KEYS, (batch, 10)), whole[:, :batch])


def test_features_of_any_shape_are_taken_in_row_major_order() -> None:
    assert torch.equal(mask(KEYS, (4, 2, 3, 5)).flatten(2), mask(KEYS, (4, 30)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_precision_drops_the_same_elements(dtype: torch.dtype) -> None:
    drawn = mask(KEYS, (8, 16), 0.5, dtype)
    assert drawn.dtype == dtype
    assert torch.equal(drawn.double(), mask(KEYS, (8, 16), 0.5, torch.float64))


@pytest.mark.parametrize("p", [0.01, 0.05, 0.2, 0.5, 0.9])
def test_the_rate_is_p_and_the_expectation_is_one(p: float) -> None:
    drawn = mask(torch.arange(200), (16, 100), p)
    dropped = (drawn == 0).double().mean().item()
    assert abs(dropped - p) < 4 * math.sqrt(p * (1 - p) / drawn.numel())
    assert set(drawn.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p)).item()}


def test_p_of_zero_keeps_everything_and_p_of_one_nothing() -> None:
    assert torch.equal(mask(KEYS, (2, 3), 0.0), torch.ones(5, 2, 3))
    assert torch.equal(mask(KEYS, (2, 3), 1.0), torch.zeros(5, 2, 3))


@pytest.mark.parametrize("step", [1, 0x9E3779B1, 1 << 32, 1 << 48], ids=["one", "odd", "high word", "top"])
def test_neither_keys_rows_nor_places_are_correlated(step: int) -> None:
    p, batch, width = 0.2, 16, 48
    dropped = (mask(torch.arange(2000) * step, (batch, width), p) == 0).float()
    x = (dropped - p) / math.sqrt(p * (1 - p))
    products = {
        "next key": x[1:] * x[:-1],
        "next row": x[:, 1:] * x[:, :-1],
        "next place": x[:, :, 1:] * x[:, :, :-1],
        "places in progression": x[:, :, 2:] * x[:, :, 1:-1] * x[:, :, :-2],
        "rectangle": x[:, 1:, 1:] * x[:, 1:, :-1] * x[:, :-1, 1:] * x[:, :-1, :-1],
        "key and row": x[1:, 1:] * x[:-1, :-1],
    }
    deviations = {name: float(product.mean()) * math.sqrt(product.numel()) for name, product in products.items()}
    assert all(abs(deviation) < 4.5 for deviation in deviations.values()), deviations
    # A mask with hidden structure would spread its counts more or less than coins do.
    for axis, size in ((1, batch), (2, width)):
        assert dropped.sum(axis).var().item() == pytest.approx(size * p * (1 - p), rel=0.03)


def test_eval_mode_and_p_of_zero_give_back_the_input_itself() -> None:
    x = torch.randn(3, 4)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x


def test_the_key_is_no_part_of_the_state() -> None:
    layer = Dropout(0.5)
    assert not layer.state_dict()
    assert [name for name, _ in layer.named_buffers()] == ["key"]


def test_under_vmap_every_worker_gets_its_own_mask_and_gradient() -> None:
    net = nn.Sequential(nn.Linear(6, 10), Dropout(0.4), nn.Linear(10, 2))
    x = torch.randn(len(KEYS), 7, 6)
    params = {name: p.detach() + torch.randn(len(KEYS), *p.shape) for name, p in net.named_parameters()}

    def loss(params: dict[str, Tensor], key: Tensor, x: Tensor) -> Tensor:
        return functional_call(net, {**params, "1.key": key}, (x,)).square().mean()

    losses = vmap(loss)(params, KEYS, x)
    gradients = vmap(grad(loss))(params, KEYS, x)
    for w, k in enumerate(KEYS):
        own = {name: p[w] for name, p in params.items()}
        net[1].key = k
        assert torch.allclose(losses[w], loss(own, k, x[w]))
        assert torch.allclose(losses[w], functional_call(net, own, (x[w],)).square().mean())
        for name, gradient in grad(loss)(own, k, x[w]).items():
            assert torch.allclose(gradients[name][w], gradient, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_mask_is_the_same_on_the_device_and_inside_a_graph() -> None:
    keys = KEYS.cuda()
    expected = mask(KEYS, (16, 100))
    assert torch.equal(dropout_mask(keys, (16, 100), 0.25, torch.float32, "cuda").cpu(), expected)
    static = torch.zeros_like(keys)
    dropout_mask(static, (16, 100), 0.25, torch.float32, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = dropout_mask(static, (16, 100), 0.25, torch.float32, "cuda")
    static.copy_(keys)
    graph.replay()
    assert torch.equal(drawn.cpu(), expected)
