"""Table 5 and the speed-up figure: 4 to 32 workers share one data set; and the same with as much work in every round.

The paper divides one data set over more and more workers, so that a pass gets shorter as 1/N and time falls whatever
the algorithm does. ``speedup`` therefore counts rounds as well, with as many mini-batches of every worker in a round
whatever N is: until the representation's gradient norm, and the train loss, fall to what all N come to. Linear
speed-up would divide the rounds by N. Corollary 1 claims it for rates that grow as sqrt(N), which stand beside equal
ones.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np

from manyheads.algorithms import DePRL, title_of
from manyheads.report.collect import Finished
from manyheads.report.numbers import Stat, at_end, stat
from manyheads.report.pictures import Axis, Line, curves, own_colours
from manyheads.studies.published import SpeedCell, data_title, speeds
from manyheads.studies.results import Report, Results, beside, in_percent, over_seeds, percent
from manyheads.studies.study import Study
from manyheads.studies.trial import Size, Trial
from manyheads.units import counted

WORKERS = (4, 8, 16, 32)
ALGORITHMS = ("fedrep", "d-psgd", "dispfl", "deprl")
DATA = ("cifar100", "mobiact")
DIRICHLET = 0.3
"""The paper does not say which; 0.3 is what it trains on for new workers."""

_TARGETS = {"cifar100": 0.35, "mobiact": 0.60, "digits": 0.60}
"""Accuracies that the time to accuracy counts to."""

_SETTLED = 0.01
"""Convergence time ends when accuracy has come this close to its last value for good."""

_BATCHES = 8
_ROUNDS = 200
_MEASURES = {"theory_grad_phi": "squared gradient norm of the representation", "train_loss": "train loss"}


def ladder(size: Size, algorithms: Sequence[str] = ALGORITHMS) -> list[Trial]:
    """Different numbers of workers on one data set, on a ring or with a server, scored in every round."""
    return [
        size.trial(algorithm, data, DIRICHLET, workers=count, seed=seed, every=1)
        for data in size.data(*DATA)
        for count in WORKERS
        for algorithm in algorithms
        for seed in size.seeds
    ]


def _table5(results: Results, report: Report) -> None:
    sets = results.values("data")
    below = ", with the paper's below" if {data for data, *_ in speeds()} & set(sets) else ""
    targets = " or ".join(f"{_TARGETS[data] * 100:.0f} % ({data_title(data)})" for data in sets)
    report.parts.append(
        f"Our numbers{below}. Times are simulated seconds: the time the run would take with one "
        "machine per worker. *Convergence time*: until accuracy stays within a point of its last value. *Time to "
        f"accuracy*: until it first reaches {targets}, which means nothing where the "
        "*floor*, the score of always naming each worker's most frequent class, is higher. The paper names neither "
        "graph nor heterogeneity for this table; we take a ring, as it does wherever it compares with a server, and "
        "Dirichlet 0.3. A line in the picture uses only the seeds that all its points share, so it may differ "
        "from the table."
    )
    numbers = []
    for data in sets:
        rows = []
        for count, algorithm in product(results.values("workers"), ALGORITHMS):
            cell = speeds().get((data, count, algorithm))
            ours = _speed_numbers(results.runs(data=data, workers=count, algorithm=algorithm), data)
            floor = percent(results.floor(data=data, workers=count))
            rows.append([str(count), floor, title_of(algorithm), *_speed_texts(ours, cell)])
            times = (found and found.mean for found in ours[1:])
            numbers.append([data, count, algorithm, *(cell or (None,) * 3), in_percent(ours[0])[0], *times])
        report.parts.append(f"## {data_title(data)}")
        report.add_table(["workers", "floor", "algorithm", "accuracy, %", "convergence, s", "to accuracy, s"], rows)
        lines = [
            _speed_line(title_of(algorithm), own_colours()[algorithm], times)
            for algorithm in ALGORITHMS
            if len(times := _by_workers(results, convergence_time, data=data, algorithm=algorithm)) > 1
        ]
        _draw_speed(report, f"{data}-convergence", lines, "speed-up of the convergence time over 4 workers")
    names = ("final_accuracy", "convergence_time", "time_to_accuracy")
    sides = [f"{side}_{name}" for side in ("paper", "ours") for name in names]
    report.add_csv(["data", "workers", "algorithm", *sides], numbers)


def _speed_numbers(runs: Sequence[Finished], data: str) -> tuple[Stat | None, Stat | None, Stat | None]:
    """Final accuracy, convergence time and time to accuracy over seeds."""
    return (
        at_end(runs, "accuracy_mean"),
        stat(map(convergence_time, runs)),
        stat(time_to_accuracy(run, _TARGETS[data]) for run in runs),
    )


def _speed_texts(ours: tuple[Stat | None, Stat | None, Stat | None], paper: SpeedCell | None) -> list[str]:
    accuracy, *times = ours
    texts = [percent(accuracy), *map(over_seeds, times)]
    if paper is None:
        return texts
    below = (beside(accuracy, paper.final_accuracy), f"{paper.convergence_time:.1f}", f"{paper.time_to_accuracy:.1f}")
    return [f"{text}<br>{other}" for text, other in zip(texts, below, strict=True)]


def _steps_grid(size: Size) -> list[Trial]:
    batches, rounds, every = (1, size.rounds, 1) if size.quick else (_BATCHES, _ROUNDS, 2)
    algorithm = DePRL(head_steps=2 * batches, body_steps=batches)
    trials = []
    for data in size.data(*DATA):
        for rates in ("equal", "growing"):
            for count in WORKERS:
                scale = (count / WORKERS[0]) ** 0.5 if rates == "growing" else 1.0
                changes: dict[str, Any] = {"lr": round(0.01 * scale, 6), "decay": 1.0, "momentum": 0.0}
                trials += [
                    size.trial(
                        algorithm, data, DIRICHLET, workers=count, seed=seed, rounds=rounds, every=every, theory=True,
                        place={"rates": rates}, **changes,
                    )
                    for seed in size.seeds
                ]  # fmt: skip
    return trials


def _speedup(results: Results, report: Report) -> None:
    batches = vars(results.trials[0].experiment.algorithm)["body_steps"]
    report.parts.append(
        f"DePRL on a ring, Dirichlet {DIRICHLET:g}: in each round every worker trains its representation on "
        f"{counted(batches, 'mini-batch')} and its head on twice as many, whatever the number of workers; constant "
        "rates without momentum. *Target*: the lowest value that every number of workers reaches, in the mean over the "
        "seeds they share; a measure that some never bring below its first value has no target. *Linear*: the rounds "
        "of 4 workers, divided by the factor in workers."
    )
    rows = []
    for data, (measure, meaning) in product(results.values("data"), _MEASURES.items()):
        lines = []
        for place, rates in enumerate(results.values("rates")):
            target, rounds = _rounds_to_target(results, measure, data=data, rates=rates)
            first = min(rounds, default=0)
            for count, value in rounds.items():
                rows.append([data_title(data), meaning, target, rates, count, value, rounds[first] * first / count])
            if rounds:
                lines.append(_speed_line(f"{rates} rates", place, rounds))
        if lines or results.runs(data=data):
            report.parts.append(f"## {data_title(data)}: {meaning}")
        if not lines and results.runs(data=data):
            report.parts.append("No target: with some number of workers it never falls below its first value.")
        _draw_speed(report, f"{data}-{measure.replace('_', '-')}", lines, f"speed-up in rounds, {meaning}")
    report.parts.append("## In numbers")
    header = ["data", "measure", "target", "rates", "workers", "rounds", "linear"]
    report.add_table(
        header, [[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    )
    report.add_csv(header, rows)


def _rounds_to_target(results: Results, measure: str, **place: Any) -> tuple[float, dict[int, float]]:
    """The lowest value that all numbers of workers come to, over the seeds they share, and the rounds each takes to it.

    No rounds where the values of some number of workers never fall.
    """
    runs = results.alike("workers", **place)
    falls = {count: _falling(here, measure) for count, here in runs.items() if here}
    if len(falls) < 2 or any(values[-1] == values[0] for _, values in falls.values()):
        return 0.0, {}
    target = max(float(values[-1]) for _, values in falls.values())
    return target, {count: float(x[int((values <= target).argmax())]) for count, (x, values) in falls.items()}


def convergence_time(run: Finished) -> float | None:
    """Simulated seconds until accuracy stays close to its last value."""
    last = run.metrics[-1]["accuracy_mean"]
    far = [place for place, row in enumerate(run.metrics) if abs(row["accuracy_mean"] - last) > _SETTLED]
    return run.metrics[far[-1] + 1 if far else 0]["simulated_seconds"]


def time_to_accuracy(run: Finished, target: float) -> float | None:
    """Simulated seconds until accuracy first reaches a target; None: it never does."""
    return next((row["simulated_seconds"] for row in run.metrics if row["accuracy_mean"] >= target), None)


def _by_workers(results: Results, time: Callable[[Finished], float | None], **place: Any) -> dict[int, float]:
    """A time for each number of workers, over the seeds that all of them have."""
    found = {count: stat(map(time, runs)) for count, runs in results.alike("workers", **place).items()}
    return {count: value.mean for count, value in found.items() if value is not None and value.mean > 0}


def _falling(runs: Sequence[Finished], measure: str) -> tuple[np.ndarray, np.ndarray]:
    """Rounds, and the lowest value of a measure until then, its mean over seeds."""
    rows = [[row for row in run.metrics if measure in row] for run in runs]
    values = np.mean([[row[measure] for row in of_run] for of_run in rows], axis=0)
    return np.array([row["round"] for row in rows[0]], float), np.minimum.accumulate(values)


def _speed_line(label: str, colour: int, cost: dict[int, float]) -> Line:
    """How many times cheaper than the fewest workers."""
    x = np.array(sorted(cost), float)
    y = np.array([cost[min(cost)] / cost[int(count)] for count in x])
    return Line(label, colour, x, y, np.zeros_like(y))


def _draw_speed(report: Report, name: str, lines: list[Line], label: str) -> None:
    if not lines:
        return
    x = max((line.x for line in lines), key=len)
    lines = [*lines, Line("linear", None, x, x / x[0], np.zeros_like(x))]
    axes = Axis("workers", lambda value: f"{value:g} workers", whole=True), Axis(label, lambda value: f"{value:.2f}")
    report.add_picture(curves(name, lines, *axes))


STUDIES = (
    Study("table5", "Table 5: accuracy and time with 4 to 32 workers", ladder, _table5),
    Study("speedup", "Speed-up in rounds, with as much work in every round", _steps_grid, _speedup),
)
