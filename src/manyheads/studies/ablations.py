"""The paper's ablations: training loss by number of workers, accuracy by head epochs and by number of workers.

On a ring (or with a server) and Dirichlet 0.3. For algorithms without a head of their own, as many epochs more move the
whole model.
"""

from functools import partial
from typing import Any

from manyheads.algorithms import DPSGD, Algorithm, DePRL, DisPFL, FedRep, title_of
from manyheads.report.pictures import ROUND, Axis, curves, own_colours
from manyheads.studies.lines import ACCURACY, across, along
from manyheads.studies.published import data_title
from manyheads.studies.results import BANDS, Report, Results, in_percent, percent
from manyheads.studies.speedup import ALGORITHMS, DATA, DIRICHLET, ladder
from manyheads.studies.study import Study
from manyheads.studies.trial import Size, Trial

_TAUS = (1, 2, 3, 4, 5)
_WORKERS = (16, 32, 64, 128)
_LOSS = Axis("train loss", lambda value: f"{value:.3f}")


def _loss(results: Results, report: Report) -> None:
    report.parts.append(
        f"DePRL on a ring, Dirichlet {DIRICHLET:g}: the loss of each worker over all its samples after the round's "
        f"local training, mean over workers. {BANDS}"
    )
    for data in results.values("data"):
        lines = [
            line
            for place, count in enumerate(results.values("workers"))
            for line in along(f"{count} workers", place, results.runs(data=data, workers=count), "round", "train_loss")
        ]
        if lines:
            report.parts.append(f"## {data_title(data)}")
            report.add_picture(curves(data, lines, ROUND, _LOSS))


def _tau_grid(size: Size) -> list[Trial]:
    def algorithms(tau: int) -> list[Algorithm]:
        return [FedRep(head_epochs=tau), DPSGD(epochs=tau + 1), DisPFL(epochs=tau + 1), DePRL(head_epochs=tau)]

    return [
        size.trial(algorithm, data, DIRICHLET, seed=seed, place={"tau": tau})
        for data in size.data(*DATA)
        for tau in _TAUS
        for algorithm in algorithms(tau)
        for seed in size.seeds
    ]


def _tau(results: Results, report: Report) -> None:
    report.parts.append(
        "D-PSGD and DisPFL train whole models for one pass more than the others train their heads, so all methods "
        "make the same number of passes."
    )
    _accuracy_by("tau", "head epochs", results, report)


def _workers_grid(size: Size) -> list[Trial]:
    counts = (4, 8) if size.quick else _WORKERS
    return [
        size.trial(algorithm, data, DIRICHLET, seed=seed, workers=count)
        for data in size.data(*DATA)
        for count in counts
        for algorithm in ALGORITHMS
        for seed in size.seeds
    ]


def _accuracy_by(key: str, label: str, results: Results, report: Report) -> None:
    report.parts.append(
        f"On a ring, FedRep with a server; Dirichlet {DIRICHLET:g}. {BANDS} A line uses only the seeds that all its "
        "points share, so it may differ from the table."
    )
    numbers: list[list[Any]] = []
    colours = own_colours()
    for data in results.values("data"):
        lines = [
            line
            for algorithm in ALGORITHMS
            for line in across(
                title_of(algorithm), colours[algorithm], results, key, "accuracy_mean", data=data, algorithm=algorithm
            )
        ]
        if not lines:
            continue
        report.parts.append(f"## {data_title(data)}")
        if len({value for line in lines for value in line.x}) > 1:
            axis = Axis(label, lambda value: f"{value:g} {label}", whole=True)
            report.add_picture(curves(data, lines, axis, ACCURACY))
        rows = []
        for value in results.values(key):
            here: dict[str, Any] = {"data": data, key: value}
            found = {name: results.stat("accuracy_mean", algorithm=name, **here) for name in ALGORITHMS}
            floor = results.floor(**here)
            rows.append([str(value), percent(floor), *map(percent, found.values())])
            numbers += [
                [data, value, name, *in_percent(stat), stat.count if stat else 0] for name, stat in found.items()
            ]
        report.add_table([label, "floor", *map(title_of, ALGORITHMS)], rows)
    report.add_csv(["data", key, "algorithm", "accuracy", "deviation", "seeds"], numbers)


STUDIES = (
    Study("loss", "Training loss of DePRL by number of workers", partial(ladder, algorithms=["deprl"]), _loss),
    Study("tau", "Accuracy by head epochs", _tau_grid, _tau),
    Study("workers", "Accuracy by number of workers", _workers_grid, partial(_accuracy_by, "workers", "workers")),
)
