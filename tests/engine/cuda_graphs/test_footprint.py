"""What a net takes, and what in it cannot be captured."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from manyheads.engine.cuda_graphs.footprint import footprint_of
from manyheads.models.split import Split
from manyheads.models.splitting import split


def make_net() -> Split:
    return split(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2)), None, torch.randn(2, 3, 8, 8))


class Peeks(nn.Module):
    """Looks at its numbers, which cannot be captured."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else -x


class Recomputes(nn.Linear):
    """Keeps no activations, but computes them again in its backward pass."""

    def forward(self, input: Tensor) -> Tensor:
        output = checkpoint(super().forward, input, use_reentrant=False)
        assert isinstance(output, Tensor)
        return output


def test_activation_checkpointing_is_not_captured() -> None:
    """Its backward pass would find the module's weights in place of the recorded ones."""
    net = split(nn.Sequential(nn.Linear(4, 3), Recomputes(3, 3), nn.Linear(3, 2)), None, torch.randn(2, 4))
    assert footprint_of(net, (4,)).blocked == "representation.1"


def test_a_footprint_counts_and_names_what_cannot_be_captured() -> None:
    footprint = footprint_of(make_net(), (3, 8, 8))
    assert footprint.blocked is None
    assert footprint.products == 4 * 36 * 27 + 144 * 2
    assert footprint.activations == 144 + 144 + 2
    assert footprint.patches == 36 * 27
    peeking = split(nn.Sequential(nn.Linear(4, 3), Peeks(), nn.Linear(3, 2)), None, torch.randn(2, 4))
    assert footprint_of(peeking, (4,)).blocked == "representation.1"
