"""The terms of the paper's convergence measure M(k), measured with full-batch gradients.

    M(k) = |G_phi|^2 + (alpha tau / beta) |G_theta|^2 + (1/N) sum_i |phi_i(k) - phibar(k)|^2

with G_phi the mean over workers of the gradient of F_i in the representation at (phibar(k), theta_i(k + 1)), and
G_theta that in the head at (phibar(k), theta_i(k)). G_theta averages gradients of different variables, which can cancel
while no head is optimal: the mean of their squared norms, which the proof bounds as well, stands beside it. The three
terms are in different units, so each is kept by itself. Nets run in eval mode: no dropout, BatchNorm by running
statistics.
"""

from manyheads.algorithms.base import Context, Log, State
from manyheads.algorithms.phases import HEAD, REPRESENTATION
from manyheads.engine.phase import SGD, Phase, Steps
from manyheads.metrics.spread import consensus, spread
from manyheads.tree import Params, select


def theory_terms(start: State, trained: State, log: Log, ctx: Context) -> dict[str, float]:
    """The terms of M(k), from the states before and after a round's local training, and what that was like."""
    point = at_mean(start, ctx)
    ahead = State({**point.params, **select(trained.params, HEAD)}, point.buffers)
    grad_phi = spread(full_gradient(ahead, REPRESENTATION, ctx), ctx.network).square_of_mean
    grad_theta = spread(full_gradient(point, HEAD, ctx), ctx.network)
    apart = consensus(start.params, ctx.network).variance
    return {
        "theory_grad_phi": grad_phi,
        "theory_grad_theta": grad_theta.square_of_mean,
        "theory_grad_theta_mean": grad_theta.mean_square,
        "theory_consensus": apart,
        "theory_m": grad_phi + head_term_factor(start, trained, log, ctx) * grad_theta.square_of_mean + apart,
    }


def at_mean(state: State, ctx: Context) -> State:
    """Every worker's head on the mean of all representations."""
    shared = State(select(state.params, REPRESENTATION), ctx.statistics(state, REPRESENTATION))
    mean = ctx.mean_model(shared)
    return State({**mean.params, **select(state.params, HEAD)}, {**state.buffers, **mean.buffers})


def full_gradient(point: State, groups: frozenset[str], ctx: Context) -> Params:
    """Each worker's gradient in some groups over all its samples, [W, ...]."""
    if not select(point.params, groups):
        return {}
    return ctx.engine.gradient(point.params, point.buffers, gradient_phase(groups, ctx), 0)


def gradient_phase(groups: frozenset[str], ctx: Context) -> Phase:
    """A phase to ask the engine for gradients with, on a random stream that no training phase uses."""
    return Phase("theory", groups, Steps(1), SGD(0.0), ctx.objective)


def head_term_factor(start: State, trained: State, log: Log, ctx: Context) -> float:
    """alpha tau / beta, tau the head's mini-batches for each of the representation's; 1 where both move as one.

    Where the representation does not move, tau is the mini-batches of a worker's head. It is computed from the first
    rates: both fall by the same factor in every round.
    """
    if "head" not in log:
        moved = {name: leaf - start.params[name] for name, leaf in select(trained.params, HEAD).items()}
        # Heads that nothing moves have tau = 0.
        return float(spread(moved, ctx.network).mean_square != 0)
    steps = {name: ctx.network.gather(work.steps) for name, work in log.items()}
    moves = int(steps["body"].sum()) if "body" in steps else 0
    tau = int(steps["head"].sum()) / (moves or max(1, int((steps["head"] > 0).sum())))
    return ctx.rates.head_lr * tau / ctx.rates.lr
