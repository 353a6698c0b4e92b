"""Consensus error of DePRL by heterogeneity, beside the same runs with a constant rate.

The paper's error rises and then falls, which it attributes to heads that start at random. But a rate that falls to
nothing makes every such curve fall: the control, whose rate stays constant, shows how much of the fall remains. Here
all heads start equal.
"""

from dataclasses import replace

from manyheads.report.pictures import ROUND, Axis, curves
from manyheads.studies.lines import along
from manyheads.studies.published import data_title
from manyheads.studies.results import BANDS, NOTHING, Report, Results
from manyheads.studies.study import Study
from manyheads.studies.trial import Size, Trial
from manyheads.units import short

_RATES = {"falling": {}, "constant": {"decay": 1.0}}
_ERROR = Axis("consensus error", short, log=True)


def _grid(size: Size) -> list[Trial]:
    return [
        size.trial("deprl", data, dirichlet, seed=seed, place={"rate": rate}, **changes)
        for data in size.data("cifar10", "cifar100")
        for rate, changes in _RATES.items()
        for dirichlet in (0.1, 0.3, 0.5)
        for seed in size.seeds
    ]


def _report(results: Results, report: Report) -> None:
    report.parts.append(
        "(1/N) Σ |φᵢ − φ̄|² after mixing, on a ring. Solid: the paper's rate, which falls by 4 % per round. Dashed: "
        f"the same initial rate, kept constant. All heads start equal. {BANDS}"
    )
    rows = []
    for data in results.values("data"):
        lines = []
        for place, dirichlet in enumerate(results.values("dirichlet")):
            for rate in _RATES:
                runs = results.runs(data=data, dirichlet=dirichlet, rate=rate)
                label = f"Dirichlet {dirichlet:g}" + (", constant rate" if rate == "constant" else "")
                for line in along(label, place, runs, "round", "consensus_error"):
                    peak = int(line.y.argmax())
                    rows.append(
                        [data_title(data), f"{dirichlet:g}", rate, short(line.y[peak]), f"{line.x[peak]:g}",
                         short(line.y[-1]), f"{line.y[-1] / line.y[peak]:.2f}" if line.y[peak] else NOTHING]
                    )  # fmt: skip
                    lines.append(replace(line, dashed=rate == "constant"))
        if lines:
            report.parts.append(f"## {data_title(data)}")
            report.add_picture(curves(data, lines, ROUND, _ERROR))
    report.parts.append("## In numbers")
    header = ["data", "Dirichlet", "rate", "highest", "in round", "at the end", "of the highest"]
    report.add_table(header, rows)
    report.add_csv(header, rows)


STUDIES = (Study("consensus", "Consensus error by heterogeneity, with a constant-rate control", _grid, _report),)
