"""How alike workers are: their data, their heads, their representations. DePRL, CIFAR-100.

The paper names neither graph nor heterogeneity for its figure: Dirichlet 0.3 on the random graph.
"""

import numpy as np

from manyheads.report.pictures import similarity_map
from manyheads.studies.results import Report, Results
from manyheads.studies.study import Study
from manyheads.studies.trial import Size, Trial


def _grid(size: Size) -> list[Trial]:
    (data,) = size.data("cifar100")
    return [size.trial("deprl", data, 0.3, graph="random", seed=size.seeds[0], similarity=True)]


def _report(results: Results, report: Report) -> None:
    report.parts.append(
        "Cosines between every two workers. The paper's claim: heads follow the data, representations agree. "
        "*Heads follow the data* is the correlation of the two maps off their diagonals."
    )
    for run in results.runs():
        maps, off = run.similarity, ~np.eye(run.options["workers"], dtype=bool)
        follow = {name: float(np.corrcoef(maps["data"][off], values[off])[0, 1]) for name, values in maps.items()}
        rows = [[name, f"{values[off].mean():.4f}", f"{follow[name]:.3f}"] for name, values in maps.items()]
        report.add_table(["of", "mean cosine", "correlation with the data's"], rows)
        for name, values in maps.items():
            low = float(values[off].min())
            report.add_picture(similarity_map(name, name, values, (low, 1.0 if low < 1 else low + 1)))


STUDIES = (Study("similarity", "Similarities between workers: data, heads, representations", _grid, _report),)
