"""Small nets to be split and tried, and samples for them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

X = torch.linspace(-1, 1, 24).view(4, 6)


def chain(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), *middle, nn.Linear(5, 3))


class Custom(nn.Module):
    """A net whose forward is more than a chain."""

    def __init__(self, after: str = "") -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
        self.classifier = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
        self.dropout = nn.Dropout(0.5)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(torch.relu(self.body(x)) * self.scale)
        if self.after == "dropout twice":
            y = self.dropout(y)
        if self.after == "noise":
            y = y + 0.1 * torch.randn_like(y)
        if self.after == "functional":
            y = F.dropout(y, 0.5, self.training)
        y = self.classifier(y)
        return y.log_softmax(1) if self.after == "softmax" else y


class Standardised(nn.Module):
    """BatchNorm as a user might write it."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0) + 1) if self.training else x


class Shifting(nn.Module):
    """Changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) if self.training else x
