"""Consensus error of DePRL by heterogeneity, beside two controls: a constant rate, and heads that start at random.

The paper's error rises and then falls, which it attributes to heads that start at random. Here all heads start equal,
unless they are the control. And a rate that falls to nothing makes every such curve fall: the control whose rate stays
constant shows how much of the fall remains.
"""

from dataclasses import replace

from manyheads.algorithms import DePRL
from manyheads.report.pictures import ROUND, Axis, curves
from manyheads.studies.lines import along
from manyheads.studies.published import data_title
from manyheads.studies.results import BANDS, NOTHING, Report, Results
from manyheads.studies.study import Study
from manyheads.studies.trial import Size, Trial
from manyheads.units import short

_AS_READ = "as read"
_CONTROLS = {"constant rate": (DePRL(), {"decay": 1.0}), "random heads": (DePRL(heads="random"), {})}
_VARIANTS = {_AS_READ: (DePRL(), {}), **_CONTROLS}
_ERROR = Axis("consensus error", short, log=True)


def _grid(size: Size) -> list[Trial]:
    return [
        size.trial(algorithm, data, dirichlet, seed=seed, place={"variant": variant}, **changes)
        for data in size.data("cifar10", "cifar100", "mobiact")
        for variant, (algorithm, changes) in _VARIANTS.items()
        for dirichlet in (0.1, 0.3, 0.5)
        for seed in size.seeds
    ]


def _report(results: Results, report: Report) -> None:
    report.parts.append(
        "DePRL on a ring: (1/N) Σ |φᵢ − φ̄|² after mixing. *As read*, solid in the pictures: the rate falls from "
        "round to round, and all heads start equal. Dashed: the same with the first rate kept constant, or with every "
        f"head drawn by itself. {BANDS}"
    )
    rows = []
    for data in results.values("data"):
        lines = {variant: [] for variant in _VARIANTS}
        for place, dirichlet in enumerate(results.values("dirichlet")):
            for variant in _VARIANTS:
                runs = results.runs(data=data, dirichlet=dirichlet, variant=variant)
                control = variant != _AS_READ
                label = f"Dirichlet {dirichlet:g}" + (f", {variant}" if control else "")
                for line in along(label, place, runs, "round", "consensus_error"):
                    peak = int(line.y.argmax())
                    rows.append(
                        [data_title(data), f"{dirichlet:g}", variant, str(len(runs)), short(line.y[peak]),
                         f"{line.x[peak]:g}", short(line.y[-1]),
                         f"{line.y[-1] / line.y[peak]:.2f}" if line.y[peak] else NOTHING]
                    )  # fmt: skip
                    lines[variant].append(replace(line, dashed=control))
        if not any(lines.values()):
            continue
        report.parts.append(f"## {data_title(data)}")
        controls = [control for control in _CONTROLS if lines[control]]
        for control in controls:
            drawn = [*lines[_AS_READ], *lines[control]]
            report.add_picture(curves(f"{data}-{control.replace(' ', '-')}", drawn, ROUND, _ERROR))
        if not controls:
            report.add_picture(curves(data, lines[_AS_READ], ROUND, _ERROR))
    report.parts.append("## In numbers")
    header = ["data", "Dirichlet", "variant", "seeds", "highest", "in round", "at the end", "of the highest"]
    report.add_table(header, rows)
    report.add_csv(header, rows)


STUDIES = (Study("consensus", "Consensus error by heterogeneity, with two controls", _grid, _report),)
