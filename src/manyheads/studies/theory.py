"""The rate of Theorem 1: M(k) averaged over K rounds against K, for several N, with Corollary 1's schedule.

The problem is smooth with constants that can be computed: worker i holds samples x and y = W* x + shift_i + noise, its
model is W x + theta_i, its loss half the squared distance. The representation is W, the head theta_i. F_i is quadratic,
so that L is the largest eigenvalue of a known matrix and the minimum is a least-squares solution. Corollary 1 sets
beta = sqrt(N/K) and alpha = 1 / (tau sqrt(K)) and claims that the mean of M(k) falls as 1 / sqrt(N K).
"""

from collections import OrderedDict
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from manyheads.algorithms import DePRL
from manyheads.data import Dataset
from manyheads.data.arrays import from_workers
from manyheads.drawing import Picture
from manyheads.experiment import Experiment
from manyheads.randomness import generator
from manyheads.report.pictures import Axis, Line, curves
from manyheads.studies.results import Report, Results
from manyheads.studies.study import Study
from manyheads.studies.trial import GRAPHS, Size, Trial, complete
from manyheads.units import short

_INPUTS, _OUTPUTS = 6, 2
_SAMPLES, _TEST_SAMPLES = 64, 4
_TAU = 2
_BATCH = 4
_WORKERS, _ROUNDS = (2, 4, 8, 16), (64, 128, 256, 512)
_SPREAD, _CENTRE, _SHIFT, _NOISE = 0.5, 0.2, 0.5, 0.5
"""Deviations of a worker's samples around its centre, of centres and of heads over workers, of the noise in y."""


class Shift(nn.Module):
    """The head: adds a vector to the features [B, outputs]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(size))

    def forward(self, features: Tensor) -> Tensor:
        return features + self.theta


def net(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """W x + theta, everything zero at first."""
    linear = nn.Linear(input_shape[0], num_outputs, bias=False)
    nn.init.zeros_(linear.weight)
    return nn.Sequential(OrderedDict(linear=linear, shift=Shift(num_outputs)))


def half_squared_distance(output: Tensor, y: Tensor) -> Tensor:
    """The loss per sample, [B]."""
    return 0.5 * (output - y).square().sum(-1)


@cache
def problem(num_workers: int, seed: int) -> Dataset:
    """The samples of every worker; those of the first workers are the same for every N."""
    truth = generator(seed, "theory/truth").standard_normal((_OUTPUTS, _INPUTS))
    parts = []
    for worker in range(num_workers):
        rng = generator(seed, "theory/samples", worker=worker)
        centre, shift = _CENTRE * rng.standard_normal(_INPUTS), _SHIFT * rng.standard_normal(_OUTPUTS)
        x = centre + _SPREAD * rng.standard_normal((_SAMPLES + _TEST_SAMPLES, _INPUTS))
        y = x @ truth.T + shift + _NOISE * rng.standard_normal((len(x), _OUTPUTS))
        x, y = x.astype(np.float32), y.astype(np.float32)
        parts.append((x[:_SAMPLES], y[:_SAMPLES], x[_SAMPLES:], y[_SAMPLES:]))
    return from_workers(parts, name="quadratic")


def smoothness(num_workers: int, seed: int) -> float:
    """L: the largest eigenvalue of any worker's Hessian, which is that of its samples with a one beside them."""
    data = problem(num_workers, seed)
    largest = 0.0
    for x in data.x_train.double().split(_SAMPLES):
        ahead = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
        largest = max(largest, float(torch.linalg.eigvalsh(ahead.T @ ahead / len(x))[-1]))
    return largest


def excess(num_workers: int, seed: int) -> float:
    """f at the start, where all is zero, less its minimum."""
    data = problem(num_workers, seed)
    x, y = data.x_train.double(), data.y_train.double()
    # A head takes up its worker's mean: what is left is one least-squares problem in W.
    centred_x, centred_y = (_centred(values) for values in (x, y))
    solution = torch.linalg.lstsq(centred_x, centred_y).solution
    lowest = 0.5 * (centred_y - centred_x @ solution).square().sum(1).mean()
    return float(0.5 * y.square().sum(1).mean() - lowest)


def exponents(points: list[tuple[int, int, float]]) -> tuple[float, float, float]:
    """The powers of N and K in the product that fits (N, K, mean of M) best, by least squares of logarithms.

    Last, by what part of itself the product misses the worst of the points.
    """
    n, k, m = np.log(np.array(points, float)).T
    terms = np.stack([np.ones_like(n), n, k], 1)
    fitted, *_ = np.linalg.lstsq(terms, m, rcond=None)
    return float(fitted[1]), float(fitted[2]), float(np.abs(np.expm1(m - terms @ fitted)).max())


def _grid(size: Size) -> list[Trial]:
    workers, rounds = ((2, 4), (8, 16)) if size.quick else (_WORKERS, _ROUNDS)
    return [
        _trial(count, total, graph, seed, size)
        for graph in ("full", "ring")
        for count in workers
        for total in rounds
        for seed in size.seeds
    ]


def _trial(workers: int, rounds: int, graph: str, seed: int, size: Size) -> Trial:
    experiment = Experiment(
        algorithm=DePRL(head_steps=_TAU, body_steps=1),
        data=problem(workers, seed),
        model=net,
        head="shift",
        loss=half_squared_distance,
        split="natural",
        workers=workers,
        graph=GRAPHS[graph],
        rounds=rounds,
        seed=seed,
        validation=0.0,
        schedule="corollary",
        batch_size=_BATCH,
        momentum=0.0,
        weight_decay=0.0,
        clip=0.0,
        precision=size.precision,
    )
    place = {"workers": workers, "rounds": rounds, "graph": graph, "algorithm": "deprl", "seed": seed}
    # The start falls within few rounds, and it is most of the mean: every round counts.
    label = f"quadratic-{graph}-{workers}-rounds{rounds}-seed{seed}"
    return Trial(complete(experiment), place, every=1, theory=True, label=label)


def _report(results: Results, report: Report) -> None:
    counts, totals = results.values("workers"), results.values("rounds")
    lipschitz = max(smoothness(max(counts), seed) for seed in results.values("seed"))
    gap = np.mean([excess(max(counts), seed) for seed in results.values("seed")])
    report.parts.append(
        f"DePRL on a quadratic problem of {_INPUTS} inputs and {_OUTPUTS} outputs, {_SAMPLES} samples a worker, "
        f"τ = {_TAU}, mini-batches of {_BATCH}. L = {lipschitz:.3g}; f at the start lies {gap:.3g} above its minimum. "
        f"The largest β is {(max(counts) / min(totals)) ** 0.5:.2f}, where 1/L = {1 / lipschitz:.2f}. The powers of N "
        "and K are fitted to the means over K rounds; *off by up to* is how far the fit misses the worst of them. "
        "Corollary 1 claims −0.5 for both in M, if K is large enough for the graph."
    )
    fits, numbers = [], []
    for graph in results.values("graph"):
        found = [
            (count, total, stat.mean, apart.mean)
            for count in counts
            for total in totals
            if (stat := results.stat("mean_theory_m", graph=graph, workers=count, rounds=total)) is not None
            and (apart := results.stat("mean_theory_consensus", graph=graph, workers=count, rounds=total)) is not None
        ]
        if len({row[0] for row in found}) < 2 or len({row[1] for row in found}) < 2:
            continue
        numbers += [[graph, *row, row[2] * (row[0] * row[1]) ** 0.5] for row in found]
        fits.append([graph, "M", *_powers([row[:3] for row in found])])
        fits.append([graph, "M without its consensus term", *_powers([(n, k, m - c) for n, k, m, c in found])])
        report.parts.append(f"On the graph {graph}:")
        report.add_picture(_drawn(graph, [row[:3] for row in found]))
    report.add_table(["graph", "mean of", "power of N", "power of K", "off by up to"], fits)
    report.add_csv(["graph", "workers", "rounds", "mean_m", "mean_consensus", "mean_m_times_sqrt_nk"], numbers)


def _drawn(name: str, points: list[tuple[int, int, float]]) -> Picture:
    """The mean of M against K, a line for each N, and the claimed slope."""
    lines = []
    for place, workers in enumerate(dict.fromkeys(n for n, _, _ in points)):
        x, y = (np.array(values, float) for values in zip(*((k, m) for n, k, m in points if n == workers), strict=True))
        lines.append(Line(f"N = {workers}", place, x, y, np.zeros_like(y)))
    x, first = lines[0].x, lines[0].y[0]
    lines.append(Line("as 1/√K", None, x, first * (x / x[0]) ** -0.5, np.zeros_like(x)))
    axes = (
        Axis("rounds K", lambda v: f"K = {v:g}", log=True, whole=True),
        Axis("mean of M(k)", short, log=True),
    )
    return curves(name, lines, *axes)


def _powers(points: list[tuple[int, int, float]]) -> list[str]:
    *powers, off = exponents(points)
    return [*(f"{power:+.2f}".replace("-", "−") for power in powers), f"{100 * off:.0f} %"]


def _centred(values: Tensor) -> Tensor:
    """Samples less their worker's mean."""
    return torch.cat([part - part.mean(0) for part in values.split(_SAMPLES)])


STUDIES = (Study("theory", "The rate of M(k) under Corollary 1's schedule", _grid, _report),)
