"""The paper's tables, as numbers."""

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources

DATA = {"harbox": "mobiact"}
"""Data sets that cannot be had, and what takes their place."""

STAND_IN = (
    "`mobiact` replaces HARBox (different people, phones and activities), so its rows do not reproduce the paper's."
)

_TITLES = {
    "cifar10": "CIFAR-10, VGG-11",
    "cifar100": "CIFAR-100, ResNet-18",
    "fashion-mnist": "Fashion-MNIST, AlexNet",
    "mobiact": "MobiAct for HARBox, DNN",
}


@dataclass(frozen=True)
class Cell:
    """One accuracy of tables 1 to 4, in percent."""

    data: str
    """As we call it."""
    dirichlet: float
    graph: str
    """ring, random or full; algorithms with a server stand under ring."""
    algorithm: str
    accuracy: float
    std: float


@dataclass(frozen=True)
class SpeedCell:
    """One row of table 5."""

    data: str
    workers: int
    algorithm: str
    final_accuracy: float
    """In percent."""
    convergence_time: float
    """In seconds."""
    time_to_accuracy: float


@cache
def accuracies(table: int) -> tuple[Cell, ...]:
    """The cells of table 1, 2, 3 or 4 in the paper's order."""
    return tuple(
        Cell(
            DATA.get(row["dataset"], row["dataset"]),
            float(row["dirichlet"]),
            row["graph"],
            row["algorithm"],
            float(row["accuracy"]),
            float(row["std"]),
        )
        for row in _rows(f"table{table}_")
    )


@cache
def speeds() -> tuple[SpeedCell, ...]:
    """The rows of table 5 in the paper's order."""
    return tuple(
        SpeedCell(
            DATA.get(row["dataset"], row["dataset"]),
            int(row["workers"]),
            row["algorithm"],
            float(row["final_accuracy"]),
            float(row["convergence_time_s"]),
            float(row["time_to_accuracy_s"]),
        )
        for row in _rows("table5_")
    )


def data_title(data: str) -> str:
    """A data set and its net as the reports name them."""
    return _TITLES.get(data, data)


def _rows(prefix: str) -> list[dict[str, str]]:
    folder = resources.files("manyheads.studies") / "paper"
    (file,) = (file for file in folder.iterdir() if file.name.startswith(prefix))
    return list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
