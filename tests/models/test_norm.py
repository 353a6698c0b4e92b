"""BatchNorm equals torch's, padding changes nothing, and both hold under vmap."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from manyheads.errors import UserError
from manyheads.models.norm import BatchNorm, group_norm, has_batchnorm, own_batchnorm

SHAPES = [(6, 4), (6, 4, 5), (6, 4, 3, 5)]
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def torch_norm(shape: tuple[int, ...], **options: float | bool) -> nn.Module:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    norm = kind(shape[1], **options).double()
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        if norm.affine:
            norm.weight.normal_()
            norm.bias.normal_()
    return norm


def own(norm: nn.Module) -> BatchNorm:
    ours = own_batchnorm(norm)
    assert ours is not None
    return ours


def run(norm: nn.Module, x: Tensor, rows: slice = slice(None)) -> tuple[Tensor, ...]:
    """Output, gradients and statistics after a step whose loss sees some rows only."""
    x = x.clone().requires_grad_()
    y = norm(x)[rows]
    loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum() + y.pow(3).sum()
    gradients = torch.autograd.grad(loss, [x, *norm.parameters()])
    return y.detach(), gradients[0][rows], *gradients[1:], *(norm.get_buffer(name).clone() for name in STATISTICS)


def assert_close(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> None:
    for left, right in zip(a, b, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_equals_torch(shape: tuple[int, ...], affine: bool, training: bool) -> None:
    torch.manual_seed(0)
    theirs = torch_norm(shape, affine=affine, momentum=0.3, eps=1e-3).train(training)
    ours = own(theirs).train(training)
    assert {name: p.shape for name, p in ours.state_dict().items()} == {
        name: p.shape for name, p in theirs.state_dict().items()
    }
    for _ in range(3):
        x = torch.randn(shape, dtype=torch.float64)
        assert_close(run(ours, x), run(theirs, x))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_padding_changes_nothing(shape: tuple[int, ...], affine: bool) -> None:
    torch.manual_seed(1)
    theirs = torch_norm(shape, affine=affine)
    ours = own(theirs)
    for real in (6, 4, 2):
        x = torch.randn(shape, dtype=torch.float64)
        ours.sample_weight = (torch.arange(6) < real).double()
        padded = torch.cat([x[:real], torch.full_like(x[real:], 1e3)])
        assert_close(run(ours, padded, slice(real)), run(theirs, x[:real]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_batch_of_padding_moves_no_statistic_and_gives_finite_gradients(shape: tuple[int, ...]) -> None:
    norm = own(torch_norm(shape))
    before = copy.deepcopy(norm.state_dict())
    norm.sample_weight = torch.zeros(6)
    results = run(norm, torch.randn(shape, dtype=torch.float64))
    assert all(result.isfinite().all() for result in results)
    assert all(torch.equal(norm.get_buffer(name), before[name]) for name in STATISTICS)


def test_a_single_value_per_channel_moves_no_statistic() -> None:
    norm = BatchNorm(4)
    norm.sample_weight = torch.tensor([1.0, 0.0, 0.0])
    assert norm(torch.randn(3, 4)).isfinite().all()
    assert torch.equal(norm.running_mean, torch.zeros(4))
    assert norm.num_batches_tracked == 0


@pytest.mark.parametrize("padded", [True, False])
def test_without_track_train_mode_leaves_the_statistics(padded: bool) -> None:
    torch.manual_seed(2)
    theirs = torch_norm((6, 4))
    norm, x = own(theirs), torch.randn(6, 4, dtype=torch.float64)
    before = copy.deepcopy(norm.state_dict())
    norm.track = False
    norm.sample_weight = torch.ones(6) if padded else None
    torch.testing.assert_close(norm(x), theirs(x))
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


def test_half_precision_input_is_normalised_in_the_precision_of_the_statistics() -> None:
    norm = BatchNorm(4)
    norm.sample_weight = torch.ones(512)
    x = (torch.randn(512, 4) + 100).bfloat16()
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm.running_mean, 0.1 * x.float().mean(0))


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("differentiated", [True, False])
def test_under_vmap_stacked_statistics_move_as_each_worker_s_own(padded: bool, differentiated: bool) -> None:
    torch.manual_seed(3)
    num_workers, batch = 3, 5
    net = nn.Sequential(nn.Conv2d(2, 4, 3), BatchNorm(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3), BatchNorm(3))
    net.double()
    counts = (5, 3, 2) if padded else (5, 5, 5)
    weight = torch.stack([torch.arange(batch) < count for count in counts]).double()
    x = torch.randn(num_workers, batch, 2, 6, 6, dtype=torch.float64)
    params = {name: p.detach() + torch.randn(num_workers, *p.shape) for name, p in net.named_parameters()}
    buffers = {name: torch.stack([b.clone() + w for w in range(num_workers)]) for name, b in net.named_buffers()}
    alone = {name: b.clone() for name, b in buffers.items()}
    supplied = {"1.sample_weight": weight, "5.sample_weight": weight} if padded else {}

    def loss(params: dict[str, Tensor], others: dict[str, Tensor], x: Tensor, weight: Tensor) -> Tensor:
        return (functional_call(net, {**params, **others}, (x,)).pow(3).sum(1) * weight).sum()

    result = vmap(grad(loss) if differentiated else loss)(params, {**buffers, **supplied}, x, weight)
    for w, count in enumerate(counts):
        own_params = {name: p[w] for name, p in params.items()}
        own_buffers = {name: b[w] for name, b in alone.items()}
        single = grad(loss) if differentiated else loss
        expected = single(own_params, own_buffers, x[w, :count], torch.ones(count, dtype=torch.float64))
        if differentiated:
            for name, gradient in expected.items():
                torch.testing.assert_close(result[name][w], gradient)
        else:
            torch.testing.assert_close(result[w], expected)
        for name, buffer in own_buffers.items():
            torch.testing.assert_close(buffers[name][w], buffer)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(4, momentum=None),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.SyncBatchNorm(4),
        nn.InstanceNorm2d(4, track_running_stats=True),
        type("Subclass", (nn.BatchNorm2d,), {})(4),
    ],
    ids=["no momentum", "no statistics", "sync", "instance", "subclass"],
)
def test_other_norms_over_samples_are_refused(norm: nn.Module) -> None:
    with pytest.raises(UserError, match=r"nn\.GroupNorm"):
        own_batchnorm(norm)


@pytest.mark.parametrize(
    "layer", [nn.Linear(2, 2), nn.GroupNorm(1, 4), nn.InstanceNorm2d(4), nn.LayerNorm(4)], ids=repr
)
def test_other_layers_are_left_alone(layer: nn.Module) -> None:
    assert own_batchnorm(layer) is None


def test_has_batchnorm_looks_inside() -> None:
    assert has_batchnorm(nn.Sequential(nn.Sequential(BatchNorm(3))))
    assert not has_batchnorm(nn.Sequential(nn.GroupNorm(1, 3)))


@pytest.mark.parametrize(("channels", "groups"), [(64, 32), (512, 32), (48, 24), (10, 10), (37, 1), (1, 1)])
def test_group_norm_takes_32_groups_or_the_largest_divisor_below(channels: int, groups: int) -> None:
    net = nn.Sequential(nn.Conv2d(3, channels, 3), nn.Sequential(nn.BatchNorm2d(channels, eps=1e-3)))
    changed = group_norm(net)
    assert repr(changed[1][0]) == repr(nn.GroupNorm(groups, channels, eps=1e-3))
    assert isinstance(net[1][0], nn.BatchNorm2d)
    assert torch.equal(changed[0].weight, net[0].weight)


def test_group_norm_normalises_vectors_as_a_whole() -> None:
    norm = group_norm(nn.Sequential(nn.BatchNorm1d(8)))
    y = norm(torch.randn(3, 8))
    torch.testing.assert_close(y.mean(1), torch.zeros(3), atol=1e-6, rtol=0)
    assert y.unique().numel() == 24


@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_has_the_numbers_of_the_net(affine: bool) -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, affine=affine)).double()
    changed = group_norm(net)
    assert {p.dtype for p in changed.parameters()} == {torch.float64}
    assert changed(torch.randn(2, 1, 5, 5, dtype=torch.float64)).dtype == torch.float64


def test_what_is_not_to_be_trained_stays_so_unless_it_is_new() -> None:
    layer = nn.BatchNorm2d(4)
    layer.weight.requires_grad_(False)
    for made, trained in ((own_batchnorm(layer), False), (group_norm(nn.Sequential(layer))[0], True)):
        assert made is not None
        assert {name: p.requires_grad for name, p in made.named_parameters()} == {"weight": trained, "bias": True}
