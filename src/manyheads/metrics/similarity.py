"""How alike the workers are: cosines between their data, their heads and their representations."""

from collections.abc import Iterable

import torch
from torch import Tensor

from manyheads.metrics.spread import square_norms
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
    """The mean over every two workers of the cosines of their heads and representations [N, ...].

    Without a map of N x N: N unit vectors with the sum u have |u|^2 as the sum of all their products. Empty for a
    single worker.
    """
    found = {}
    for part, kind in _KINDS.items():
        leaves = [flatten(leaf) for leaf in select(params, {part}).values()]
        if not leaves or len(leaves[0]) == 1:
            continue
        count = len(leaves[0])
        norms = torch.stack([square_norms(leaf) for leaf in leaves]).sum(0).sqrt()
        scale = torch.where(norms == 0, 0, 1 / norms).unsqueeze(1)
        total = 0.0
        for leaf in leaves:
            for rows in leaf.split(max(1, _BLOCK_NUMBERS // count), dim=1):
                total += float((rows.to(torch.float64) * scale).sum(0).square().sum())
        found[f"similarity_{kind}"] = (total - int((norms != 0).sum())) / (count * (count - 1))
    return found


def mean_off_diagonal(matrix: Tensor) -> float:
    """Mean over every two different workers of [N, N]."""
    pairs = len(matrix) * (len(matrix) - 1)
    return float((matrix.double().sum() - matrix.diagonal().double().sum()) / pairs)


def _products(leaf: Tensor) -> Tensor:
    """Inner products of every two rows of a leaf [N, ...], [N, N] in double precision."""
    total = torch.zeros(len(leaf), len(leaf), dtype=torch.float64)
    for rows in flatten(leaf).split(max(1, _BLOCK_NUMBERS // len(leaf)), dim=1):
        block = rows.to(torch.float64)
        total.addmm_(block, block.T)
    return total


def _cosines(products: Tensor) -> Tensor:
    """Cosines from inner products [N, N]; 0 beside a row of zeros."""
    norms = products.diagonal().sqrt()
    scale = (norms * norms.unsqueeze(1)).clamp(min=torch.finfo(torch.float64).tiny)
    return (products / scale).clamp(-1, 1).float()
