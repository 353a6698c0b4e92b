"""Write the golden losses anew: `python tests/golden/regenerate.py`, after a change of numbers that is meant.

Say in CHANGELOG.md why they changed.
"""

import json
from pathlib import Path

from manyheads.algorithms import REGISTRY
from manyheads.experiment import Experiment, Runtime
from manyheads.rounds import train

STORED = Path(__file__).with_name("losses.json")


def losses(algorithm: str) -> dict[str, list[float]]:
    """An algorithm's losses and accuracies on digits, every value written out so that no recipe changes them."""
    experiment = Experiment(
        algorithm=REGISTRY[algorithm](),
        data="digits",
        model="mlp:32",
        workers=4,
        split="dirichlet:0.3",
        graph="ring",
        rounds=3,
        seed=1,
        batch_size=32,
        lr=0.05,
        head_lr=0.05,
        momentum=0.9,
        weight_decay=1e-4,
        clip=2.0,
        decay=0.9,
        precision="float64",
    )
    records = list(train(experiment, Runtime(device="cpu", threads=1)))
    return {name: [getattr(record, name) for record in records] for name in ("loss", "train_loss", "accuracy_mean")}


if __name__ == "__main__":
    STORED.write_text(json.dumps({name: losses(name) for name in REGISTRY}, indent=1) + "\n")
