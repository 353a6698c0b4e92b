"""``python -m manyheads.demo``: personal heads against one model for all, where every worker names classes its own way.

The same is a single command, which is shown; the picture is the one of its report that tells how they learn.
"""

import sys
from pathlib import Path

from manyheads.cli import main as manyheads

FOLDER = Path("runs", "demo")

COMMAND = [
    "compare", "deprl", "d-psgd", "local", "--data", "digits", "--relabel", "--split", "dirichlet:1", "--workers", "32",
    "--graph", "ring", "--seeds", *"12345678", "--tune", "0.5", "1", "2", "4", "--eval-every", "2",
    "--out", str(FOLDER),
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
    print(FOLDER / "figures" / "learning-rounds.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
