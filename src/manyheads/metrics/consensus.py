"""How far the workers' representations are from agreeing."""

import torch
from torch import Tensor

from manyheads.network.base import Network
from manyheads.tree import Params, select


def consensus_error(params: Params, network: Network) -> float:
    """(1/N) sum_i |phi_i - phibar|^2 over the representation parameters [W, ...] of all processes, in double precision."""
    leaves = select(params, {"representation"}).values()
    distances = [_square_distances(leaf, network) for leaf in leaves]
    return float(network.gather(torch.stack(distances).sum(0)).mean()) if distances else 0.0


def _square_distances(leaf: Tensor, network: Network) -> Tensor:
    """|x_i - xbar|^2 of the hosted rows, [W]."""
    hosted = leaf.flatten(1).to(torch.float64)
    mean = network.gather(hosted.sum(0, keepdim=True)).sum(0) / network.num_workers
    return (hosted - mean).square().sum(1)
