"""BatchNorm that leaves padded samples out, and GroupNorm in its place."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.errors import UserError
from manyheads.models.layers import replace_layers

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_MOST_GROUPS = 32


class BatchNorm(nn.Module):
    """torch's BatchNorm, for [B, C] and [B, C, ...], with its names and numbers and two things more.

    ``sample_weight``: [B], 1 for a sample and 0 for padding, or None. Padding enters no statistic, and a batch of
    nothing else moves none. ``track``: whether train mode moves the running statistics. It changes them in place: under
    vmap they must be stacked, under vmap(grad) arguments of the function itself.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    sample_weight: Tensor | None

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True) -> None:
        super().__init__()
        self.num_features, self.affine = num_features, affine
        self.eps, self.momentum, self.track = eps, momentum, True
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))
        self.register_buffer("num_batches_tracked", torch.tensor(0))
        self.register_buffer("sample_weight", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, ...] -> [B, C, ...]."""
        if self.training and self.sample_weight is not None:
            return self._without_padding(x, self.sample_weight)
        mean, var = self.running_mean, self.running_var
        if self.training and self.track:
            self.num_batches_tracked.add_(1)
        elif self.training:
            mean = var = None
        return F.batch_norm(x, mean, var, self.weight, self.bias, self.training, self.momentum, self.eps)

    def _without_padding(self, x: Tensor, sample_weight: Tensor) -> Tensor:
        exact = x.to(self.running_mean.dtype)
        weight = sample_weight.to(exact.dtype).view(-1, *[1] * (x.ndim - 1))
        axes, channel = (0, *range(2, x.ndim)), (-1, *[1] * (x.ndim - 2))
        count = weight.sum() * x[0, 0].numel()
        mean = (exact * weight).sum(axes) / count.clamp(min=1)
        centred = exact - mean.view(channel)
        var = (centred.square() * weight).sum(axes) / count.clamp(min=1)
        if self.track:
            # With too few values for a variance, which torch would refuse, nothing moves.
            moves = count > 1
            unbiased = var.detach() * (count / (count - 1).clamp(min=1))
            rate = self.momentum * moves.to(exact.dtype)
            self.running_mean.add_(rate * (mean.detach() - self.running_mean))
            self.running_var.add_(rate * (unbiased - self.running_var))
            self.num_batches_tracked.add_(moves)
        scale = torch.rsqrt(var + self.eps)
        if self.weight is None or self.bias is None:
            return (centred * scale.view(channel)).to(x.dtype)
        return (centred * (scale * self.weight).view(channel) + self.bias.view(channel)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}"


def own_batchnorm(layer: nn.Module) -> BatchNorm | None:
    """One of torch's BatchNorms as ours, with a copy of its tensors; None for any other layer.

    Other norms that mix samples or keep statistics are refused: nothing here could keep padding out of them.
    """
    plain_instance_norm = isinstance(layer, nn.modules.instancenorm._InstanceNorm) and not layer.track_running_stats
    if not isinstance(layer, nn.modules.batchnorm._NormBase) or plain_instance_norm:
        return None
    if type(layer) not in BATCH_NORMS or layer.running_mean is None or layer.momentum is None:
        raise UserError(
            f"cannot train a model with {layer}: use nn.BatchNorm1d, 2d or 3d with a momentum and running statistics,"
            " or nn.GroupNorm."
        )
    ours = BatchNorm(layer.num_features, layer.eps, layer.momentum, layer.affine).to(layer.running_mean)
    ours.load_state_dict(layer.state_dict())
    for name, parameter in layer.named_parameters():
        ours.get_parameter(name).requires_grad_(parameter.requires_grad)
    return ours


def has_batchnorm(module: nn.Module) -> bool:
    """Whether there is a BatchNorm in it, so that batches of one sample must be left out."""
    return any(isinstance(layer, BatchNorm) for layer in module.modules())


def group_norm(module: nn.Module) -> nn.Module:
    """A copy with GroupNorm for every BatchNorm, in 32 groups or the largest divisor of the channels below that.

    BatchNorm1d becomes a single group: on vectors, groups of one or two numbers would leave nothing but their signs.
    """

    def group(layer: nn.Module) -> nn.Module | None:
        if not isinstance(layer, BATCH_NORMS):
            return None
        most = 1 if isinstance(layer, nn.BatchNorm1d) else _MOST_GROUPS
        groups = max(g for g in range(1, most + 1) if layer.num_features % g == 0)
        ours = nn.GroupNorm(groups, layer.num_features, layer.eps, layer.affine)
        return ours.to(layer.weight) if layer.affine else ours

    module = copy.deepcopy(module)
    replace_layers(module, group)
    return module
