"""``python -m manyheads.demo``: personal heads against one model for all, where every worker names classes its own way.

The same is a single command, which is shown; what this adds is the picture of how they learn.
"""

import sys
from pathlib import Path

from manyheads.cli import main as manyheads

FOLDER = Path("runs", "demo")

COMMAND = [
    "compare", "deprl", "d-psgd", "local", "--data", "digits", "--workers", "32", "--graph", "ring", "--relabel",
    "--split", "dirichlet:1", "--tune", "0.5", "1", "2", "--seeds", "1", "--out", str(FOLDER),
]  # fmt: skip

_INTRODUCTION = """\
32 workers on a ring learn to read digits, and every worker names the ten classes in an order of its own. DePRL shares a
representation and keeps heads private; D-PSGD shares all of the net; local shares nothing. Each makes three passes over
its own samples a round, with rates chosen on held-out samples from the same grid.
"""


def main() -> int:
    """Run the comparison, or what is missing of it, and print the path of its picture in the last line."""
    print(f"{_INTRODUCTION}\n$ manyheads {' '.join(COMMAND)}", flush=True)
    if status := manyheads(COMMAND):
        return status
    from manyheads.figures import learning_curves
    from manyheads.report import collect

    comparison = collect(FOLDER)
    curves = [(system.label, comparison.cells[i, 0][0].metrics) for i, system in enumerate(comparison.systems)]
    picture = FOLDER / "learning-curves.png"
    learning_curves(curves, picture)
    print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
