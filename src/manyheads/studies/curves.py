"""Learning curves: accuracy against rounds and against time, CIFAR-100 on a random graph.

Time is simulated: every worker a machine of its own. The paper's is that of its three GPUs.
"""

from manyheads.algorithms import title_of
from manyheads.report.chapters import x_axis
from manyheads.report.pictures import curves, own_colours
from manyheads.studies.lines import ACCURACY, along
from manyheads.studies.published import data_title
from manyheads.studies.results import BANDS, Report, Results
from manyheads.studies.study import Study
from manyheads.studies.trial import Size, Trial

_ALGORITHMS = ("d-psgd", "dispfl", "deprl")


def _grid(size: Size) -> list[Trial]:
    return [
        size.trial(algorithm, data, dirichlet, graph="random", seed=seed, every=1)
        for data in size.data("cifar100")
        for dirichlet in (0.1, 0.3, 0.5)
        for algorithm in _ALGORITHMS
        for seed in size.seeds
    ]


def _report(results: Results, report: Report) -> None:
    report.parts.append(
        f"{data_title(results.trials[0].data)}, random graph: accuracy of each worker's own model after mixing, mean "
        "over workers, beside the score of always naming each worker's most frequent class (the majority floor). Time "
        f"is simulated: one machine per worker. {BANDS}"
    )
    for dirichlet in results.values("dirichlet"):
        for name, x in (("rounds", "round"), ("time", "simulated_seconds")):
            lines = [
                line
                for algorithm in _ALGORITHMS
                for line in along(
                    title_of(algorithm),
                    own_colours()[algorithm],
                    results.runs(dirichlet=dirichlet, algorithm=algorithm),
                    x,
                    "accuracy_mean",
                )
            ]
            if lines:
                floor = results.floor(dirichlet=dirichlet)
                report.parts.append(f"Dirichlet {dirichlet:g}, against {name}:")
                axes = x_axis(x, lines), ACCURACY
                drawn = curves(f"{dirichlet:g}-{name}", lines, *axes, floor=floor and floor.mean, values=True)
                report.add_picture(drawn)


STUDIES = (Study("curves", "Learning curves on a random graph", _grid, _report),)
