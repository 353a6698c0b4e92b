"""How alike the workers are: cosines between their data, their heads and their representations."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from manyheads.metrics.spread import COLUMNS, square_norms
from manyheads.threads import share
from manyheads.tree import Params, flatten, group, select

_BLOCK_NUMBERS = 1 << 22
"""A block in double precision takes 32 MB, whatever the size of the leaf."""

_KINDS = {"head": "heads", "representation": "representations"}


def similarities(models: Iterable[tuple[str, Tensor]], class_counts: Tensor | None) -> dict[str, Tensor]:
    """Cosines between every two workers, [N, N] float32 each.

    ``data``: of class counts [N, C] as each worker names the classes; left out without classes. ``heads`` and
    ``representations``: of all their parameters side by side, from the leaves [N, ...] of the workers' models, read one
    after another; left out where a net has none.
    """
    products: dict[str, Tensor] = {}
    if class_counts is not None:
        products["data"] = _products(class_counts)
    for name, leaf in models:
        if kind := _KINDS.get(group(name)):
            products[kind] = _products(leaf) + products.get(kind, 0)
    return {kind: _cosines(products[kind]) for kind in ("data", "heads", "representations") if kind in products}


def mean_cosines(params: Params) -> dict[str, float]:
    """The means over every two workers of the cosines of their heads and representations, from leaves [N, ...]."""
    leaves = {kind: list(select(params, {part}).values()) for part, kind in _KINDS.items()}
    means = {f"similarity_{kind}": mean_cosine(parts) for kind, parts in leaves.items()}
    return {name: mean for name, mean in means.items() if mean is not None}


def mean_cosine(leaves: Sequence[Tensor]) -> float | None:
    """The mean over every two workers of the cosine of their rows, all leaves [N, ...] side by side.

    Without a map of N x N: N unit vectors with the sum u have |u|^2 as the sum of all their products. None where there
    are no two workers, or no leaves.
    """
    if not leaves or len(leaves[0]) == 1:
        return None
    count = len(leaves[0])
    norms = torch.stack([square_norms(leaf) for leaf in leaves]).sum(0).sqrt()
    scale = torch.where(norms == 0, 0, 1 / norms).unsqueeze(1)

    def square_of_sum(block: Tensor) -> float:
        return float(block.to(torch.float64, copy=True).mul_(scale).sum(0).square_().sum())

    total = 0.0
    for leaf in leaves:
        blocks = flatten(leaf).split(max(1, min(COLUMNS, _BLOCK_NUMBERS // count)), dim=1)
        for square in share(square_of_sum, blocks, leaf):
            total += square
    # Rows that are alike would come out a rounding error above 1.
    return min((total - int((norms != 0).sum())) / (count * (count - 1)), 1.0)


def _products(leaf: Tensor) -> Tensor:
    """Inner products of every two rows of a leaf [N, ...], [N, N] in double precision, computed where the leaf lies."""
    total = torch.zeros(len(leaf), len(leaf), dtype=torch.float64, device=leaf.device)
    for rows in flatten(leaf).split(max(1, _BLOCK_NUMBERS // len(leaf)), dim=1):
        # Made contiguous, as the bits depend on the layout, which may differ between memory and a file.
        block = rows.to(torch.float64).contiguous()
        total.addmm_(block, block.T)
    return total.cpu()


def _cosines(products: Tensor) -> Tensor:
    """Cosines from inner products [N, N]; 0 beside a row of zeros."""
    norms = products.diagonal().sqrt()
    scale = (norms * norms.unsqueeze(1)).clamp(min=torch.finfo(torch.float64).tiny)
    return (products / scale).clamp(-1, 1).float()
