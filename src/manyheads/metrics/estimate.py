"""Estimates of the constants in the paper's assumptions: smoothness L, noise sigma^2 and variability varsigma^2."""

import torch
from torch import Tensor

from manyheads.algorithms.base import Context, State
from manyheads.algorithms.phases import REPRESENTATION
from manyheads.engine.phase import Steps
from manyheads.metrics.spread import spread
from manyheads.metrics.theory import full_gradient, gradient_phase
from manyheads.randomness import generator
from manyheads.tree import Params, by_row, flatten, select


def smoothness(point: State, groups: frozenset[str], ctx: Context, *, iterations: int = 30) -> Tensor:
    """L of each worker's F_i in some groups around a point, [W]: the largest absolute eigenvalue of its Hessian.

    Power iteration on differences of full-batch gradients. A Hessian changes from place to place, so this is a lower
    bound of L; it is exact for quadratic losses.
    """
    around = select(point.params, groups)
    direction = _unit(
        {
            name: torch.from_numpy(generator(ctx.seed, f"smoothness/{name}").standard_normal(leaf.shape[1:]))
            .to(leaf)
            .expand_as(leaf)
            for name, leaf in around.items()
        }
    )[0]
    # Central differences lose least in steps of the cube root of the rounding error, on the scale of the weights.
    steps = torch.finfo(next(iter(around.values())).dtype).eps ** (1 / 3) * (1 + _norms(around))
    curvature = torch.zeros_like(steps)
    for _ in range(iterations):
        moved = [_moved(around, direction, sign * steps) for sign in (1, -1)]
        ahead, behind = (full_gradient(State({**point.params, **at}, point.buffers), groups, ctx) for at in moved)
        direction, lengths = _unit({name: leaf - behind[name] for name, leaf in ahead.items()})
        curvature = lengths / (2 * steps)
    return curvature


def gradient_noise(point: State, groups: frozenset[str], ctx: Context, *, draws: int = 8) -> Tensor:
    """sigma^2 of each worker, [W]: the mean squared distance of a mini-batch's gradient from the full one."""
    full = full_gradient(point, groups, ctx)
    phase = gradient_phase(groups, ctx)
    total = torch.zeros(len(ctx.ids), dtype=torch.float64)
    for draw in range(draws):
        batch = ctx.engine.gradient(point.params, point.buffers, phase, draw, batches=Steps(1))
        total += _norms({name: leaf - full[name] for name, leaf in batch.items()}).double().cpu().square()
    return total / draws


def variability(point: State, ctx: Context) -> float:
    """varsigma^2: the mean squared distance of the workers' representation gradients from their mean."""
    return spread(full_gradient(point, REPRESENTATION, ctx), ctx.network).variance


def _norms(tree: Params) -> Tensor:
    """Each worker's norm over all leaves, [W]."""
    return torch.stack([flatten(leaf).norm(dim=1) for leaf in tree.values()]).norm(dim=0)


def _unit(tree: Params) -> tuple[Params, Tensor]:
    """Each worker's row scaled to length 1, and the length it had, [W]. A row of zeros stays."""
    lengths = _norms(tree)
    inverse = 1 / torch.where(lengths > 0, lengths, 1)
    return {name: leaf * by_row(inverse, leaf) for name, leaf in tree.items()}, lengths


def _moved(tree: Params, direction: Params, steps: Tensor) -> Params:
    """Every row moved along its direction by its own step [W]."""
    return {name: leaf + by_row(steps, leaf) * direction[name] for name, leaf in tree.items()}
