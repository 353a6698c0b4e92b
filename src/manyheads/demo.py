"""``python -m manyheads.demo``: personal heads against one model for all, where every worker names classes its own way.

The same is a single command, which is shown; what this adds is the picture of how they learn.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from manyheads.cli import main as manyheads

if TYPE_CHECKING:
    from manyheads.report.collect import Finished

FOLDER = Path("runs", "demo")

COMMAND = [
    "compare", "deprl", "d-psgd", "local", "--data", "digits", "--relabel", "--split", "dirichlet:1", "--workers", "32",
    "--graph", "ring", "--tune", "0.5", "1", "2", "4", "--eval-every", "2", "--out", str(FOLDER),
]  # fmt: skip

_INTRODUCTION = """\
32 workers on a ring learn to read digits, and every worker names the ten classes in an order of its own. DePRL shares
a representation and keeps heads private; D-PSGD shares all of the net; local training shares nothing. Each makes three
passes over a worker's own samples a round, with rates chosen on held-out samples out of the same grid.
"""


def main() -> int:
    """Run the comparison, or what is missing of it, and print the path of its picture in the last line."""
    print(f"{_INTRODUCTION}\n$ manyheads {' '.join(COMMAND)}", flush=True)
    if status := manyheads(COMMAND):
        return status
    from manyheads.figures import learning_curves
    from manyheads.report import collect

    comparison = collect(FOLDER)
    curves = [(system.label, mean_curve(comparison.cells[i, 0])) for i, system in enumerate(comparison.systems)]
    picture = FOLDER / "learning-curves.png"
    learning_curves(curves, picture)
    print(picture)
    return 0


def mean_curve(runs: "Sequence[Finished]") -> list[dict[str, float]]:
    """Accuracy and majority floor by round, means over seeds."""
    from manyheads.report.numbers import at_end, curve

    found, floor = curve(runs, "round", "accuracy_mean"), at_end(runs, "majority_floor")
    assert found is not None and floor is not None, "digits have classes"
    return [
        {"round": round, "accuracy_mean": accuracy, "majority_floor": floor.mean}
        for round, accuracy in zip(found.x.tolist(), found.y.tolist(), strict=True)
    ]


if __name__ == "__main__":
    sys.exit(main())
