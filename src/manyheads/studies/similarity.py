"""How alike workers are: their data, their heads, their representations. DePRL, CIFAR-100.

The paper names neither graph nor heterogeneity for its figure: Dirichlet 0.3 on the random graph.
"""

import numpy as np

from manyheads.errors import UserError
from manyheads.report.numbers import correlation, off_diagonal
from manyheads.report.pictures import colour_ends, similarity_map
from manyheads.store.layout import SIMILARITY
from manyheads.studies.published import data_title
from manyheads.studies.results import Report, Results
from manyheads.studies.study import Study
from manyheads.studies.trial import Size, Trial

_DIRICHLET = 0.3


def _grid(size: Size) -> list[Trial]:
    (data,) = size.data("cifar100")
    return [size.trial("deprl", data, _DIRICHLET, graph="random", seed=size.seeds[0], similarity=True)]


def _report(results: Results, report: Report) -> None:
    report.parts.append(
        f"DePRL, {data_title(results.trials[0].data)}, Dirichlet {_DIRICHLET:g}, random graph: cosines between every "
        "two workers in the end. The paper's claim: heads follow the data, representations agree. Correlations are of "
        "two maps off their diagonals. In the pictures rows and columns are workers, and the scale covers pairs of "
        "different workers; the diagonal is always 1."
    )
    for run in results.runs():
        maps = run.similarity
        if "data" not in maps:
            raise UserError(f"{run.path / SIMILARITY} is damaged: put it back, or delete it and start the study again.")
        rows = []
        for name, values in maps.items():
            follows = correlation(maps["data"], values)
            rows.append(
                [name, f"{np.mean(off_diagonal(values)):.4f}", "all alike" if follows is None else f"{follows:.3f}"]
            )
        report.add_table(["of", "mean cosine", "correlation with the data's"], rows)
        for name, values in maps.items():
            report.add_picture(similarity_map(name, name, values, colour_ends(off_diagonal(values))))


STUDIES = (Study("similarity", "Similarities between workers: data, heads, representations", _grid, _report),)
