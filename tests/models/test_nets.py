"""The nets have the layers and sizes that their tables say."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from manyheads.errors import UserError
from manyheads.models import build
from manyheads.models.dropout import dropouts
from manyheads.models.nets import NETS
from manyheads.models.split import cacheable_prefix, cut
from manyheads.randomness import torch_seed

SHAPES = {
    "mlp": (1, 8, 8),
    "cnn": (1, 8, 8),
    "dnn": (900,),
    "dnn-code": (900,),
    "alexnet": (1, 32, 32),
    "alexnet-code": (1, 32, 32),
    "vgg11": (3, 32, 32),
    "vgg11-code": (3, 32, 32),
    "resnet18": (3, 32, 32),
}
build_once = cache(build)
SMALL = ("mlp", "cnn", "dnn", "alexnet-code")


def size(module: nn.Module, *kinds: str) -> int:
    return sum(p.numel() for name, p in module.named_parameters() if not kinds or name.startswith(kinds))


@pytest.mark.parametrize(
    ("net", "outputs", "convolutions", "linear", "head"),
    [
        ("vgg11", 10, 7_008_256, 525_312, 5_130),
        ("vgg11-code", 10, 9_220_480, 525_312, 5_130),
        ("alexnet", 10, 2_250_432, 20_979_712, 40_970),
        ("alexnet-code", 10, 2_454_208, 49_408, 1_290),
        ("dnn", 5, 0, 633_792, 325),
    ],
)
def test_sizes_are_the_published_ones(net: str, outputs: int, convolutions: int, linear: int, head: int) -> None:
    model = build_once(net, SHAPES[net], outputs)
    assert size(model.representation, "conv") == convolutions
    assert size(model.representation, "fc") == linear
    assert size(model.representation) == convolutions + linear
    assert size(model) - size(model.representation) == head


def test_resnet18_has_the_published_sizes_and_statistics() -> None:
    model = build_once("resnet18", (3, 32, 32), 100)
    assert size(model.representation) == 11_168_832
    assert size(model) == 11_168_832 + 51_300
    statistics = {name: value for name, value in model.state_dict().items() if ".running_" in name}
    assert sum(value.numel() for value in statistics.values()) == 9_600


def test_group_norm_keeps_resnet18_s_size_and_drops_its_statistics() -> None:
    model = build("resnet18", (3, 32, 32), 100, norm="group")
    assert size(model) == 11_168_832 + 51_300
    assert not [name for name in model.state_dict() if ".running_" in name]


@pytest.mark.parametrize(
    ("net", "head", "expected"),
    [("vgg11", "fc9", 530_442), ("alexnet-code", "fc6", 50_698), ("vgg11-code", "fc9", 530_442)],
)
def test_the_whole_classifier_can_be_the_head(net: str, head: str, expected: int) -> None:
    model = build(net, SHAPES[net], 10, head=head)
    assert size(model) - size(model.representation) == expected
    assert size(model.representation, "fc") == 0


@pytest.mark.parametrize(("net", "numbers"), [("vgg11", 512), ("alexnet", 1024), ("dnn", 512)])
def test_cached_features_end_before_the_first_dropout(net: str, numbers: int) -> None:
    model = build_once(net, SHAPES[net], 10)
    front, _ = cut(model, cacheable_prefix(model, "train"))
    assert front(torch.zeros(2, *SHAPES[net])).shape == (2, numbers)


def test_batchnorm_allows_a_cache_in_eval_mode_only() -> None:
    model = build_once("resnet18", (3, 32, 32), 100)
    assert cacheable_prefix(model, "train") == 1
    front, _ = cut(model, cacheable_prefix(model, "eval"))
    assert front.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 512)


def test_dropout_stands_where_the_tables_say() -> None:
    places = {}
    for net in ("vgg11", "alexnet", "dnn"):
        model = build_once(net, SHAPES[net], 10)
        layers = [name for part in model.children() for name, _ in part.named_children()]
        dropouts = [k for k, name in enumerate(layers) if name.startswith("dropout")]
        places[net] = [(layers[k - 1], layers[k + 1]) for k in dropouts]
    assert places == {
        "vgg11": [("flatten", "fc9"), ("relu10", "fc11")],
        "alexnet": [("flatten", "fc6"), ("relu6", "fc7")],
        "dnn": [("relu1", "fc2"), ("relu2", "fc3"), ("relu3", "fc4")],
    }


def test_images_are_halved_where_the_tables_say() -> None:
    places = {}
    for net in ("vgg11", "vgg11-code", "alexnet", "alexnet-code", "cnn"):
        layers = build_once(net, SHAPES[net], 10).representation.named_children()
        places[net] = [int(name.removeprefix("pool")) for name, _ in layers if name.startswith("pool")]
    assert places == {
        "vgg11": [1, 3, 5, 7, 8],
        "vgg11-code": [1, 2, 4, 6, 8],
        "alexnet": [1, 2, 5],
        "alexnet-code": [1, 2, 5],
        "cnn": [1, 2],
    }


def test_dropout_is_as_the_tables_and_the_code_say() -> None:
    rates = {net: {layer.p for layer in dropouts(build_once(net, SHAPES[net], 10)).values()} for net in SHAPES}
    tables, code = {"vgg11": {0.2}, "alexnet": {0.2}, "dnn": {0.05}}, ("vgg11-code", "alexnet-code", "dnn-code")
    assert {net: found for net, found in rates.items() if found} == tables | {net: {0.05} for net in code}


@pytest.mark.parametrize(
    ("net", "first"),
    [("cnn", 1), ("vgg11", 1), ("vgg11-code", 1), ("alexnet", 3), ("alexnet-code", 3), ("resnet18", 99)],
)
def test_convolutions_without_batchnorm_begin_as_he_has_it(net: str, first: int) -> None:
    """From the ``first`` on. A reading of the paper that decides whether these nets learn; others begin as torch's."""
    with torch_seed(1):
        model, number = build(net, SHAPES[net], 10), 0
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            number += 1
            fan_in = layer.weight[0].numel()
            wanted = (2 / fan_in) ** 0.5 if number >= first else (3 * fan_in) ** -0.5
            error = 4 / (2 * layer.weight.numel()) ** 0.5
            assert layer.weight.std().item() == pytest.approx(wanted, rel=error), f"{net}, convolution {number}"


@pytest.mark.parametrize("net", NETS)
def test_every_net_gives_a_row_of_outputs_per_sample(net: str) -> None:
    outputs = 100 if net == "resnet18" else 10
    model = build_once(net, SHAPES[net], outputs).eval()
    x = torch.randn(3, *SHAPES[net])
    together = model(x)
    assert together.shape == (3, outputs)
    torch.testing.assert_close(together, torch.cat([model(row.unsqueeze(0)) for row in x]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("net", SMALL)
def test_stacked_workers_equal_single_ones_in_train_mode(net: str) -> None:
    models = [build(net, SHAPES[net], 5) for _ in range(2)]
    keys = torch.tensor([7, 2**50])
    dropouts = [name for name, _ in models[0].named_buffers() if name.endswith(".key")]
    stacked = {
        name: torch.stack([model.get_parameter(name) for model in models]) for name, _ in models[0].named_parameters()
    }
    stacked |= dict.fromkeys(dropouts, keys)
    x = torch.randn(2, 3, *SHAPES[net])
    together = vmap(lambda tensors, x: functional_call(models[0], tensors, (x,)))(stacked, x)
    for w, model in enumerate(models):
        for name in dropouts:
            model.get_submodule(name.removesuffix(".key")).key = keys[w]
        torch.testing.assert_close(together[w], model(x[w]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("net", "smallest"), [("cnn", 4), ("alexnet", 16), ("alexnet-code", 29), ("vgg11", 32), ("resnet18", 8)]
)
def test_images_that_are_too_small_are_refused_and_the_smallest_allowed_work(net: str, smallest: int) -> None:
    assert build(net, (2, smallest, smallest), 3).eval()(torch.zeros(1, 2, smallest, smallest)).shape == (1, 3)
    for shape in [(1, smallest, smallest - 1), (900,), (smallest, smallest)]:
        with pytest.raises(UserError, match=f"{net}.* of at least {smallest}x{smallest}"):
            build(net, shape, 3)


def test_images_with_their_channels_last_or_without_are_refused_with_the_way_to_turn_them() -> None:
    with pytest.raises(UserError, match=r"are 32x32: give grey images their one channel, x\[:, None\]"):
        build("vgg11", (32, 32), 10)
    with pytest.raises(UserError, match=r"are 32x32x3: put the channels first, x\.transpose\(0, 3, 1, 2\)"):
        build("vgg11", (32, 32, 3), 10)
    with pytest.raises(UserError, match="are 3x8x8: use mlp"):
        build("vgg11", (3, 8, 8), 10)
