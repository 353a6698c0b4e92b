"""The paper's tables, as numbers."""

import csv
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import NamedTuple

_STAND_INS = {"harbox": "mobiact"}
"""Data sets that cannot be had, and what takes their place."""

REPLACED = {"mobiact": "HARBox"}
"""Data sets that take the place of others -> what people call those."""

STAND_IN = (
    "`mobiact` replaces HARBox (different people, phones and activities), so its rows do not reproduce the paper's."
)

_TITLES = {
    "cifar10": "CIFAR-10, VGG-11",
    "cifar100": "CIFAR-100, ResNet-18",
    "fashion-mnist": "Fashion-MNIST, AlexNet",
    "mobiact": "MobiAct for HARBox, DNN",
}


class Place(NamedTuple):
    """Where an accuracy stands in tables 1 to 4."""

    data: str
    """As we call it."""
    dirichlet: float
    graph: str
    """ring, random or full; algorithms with a server stand under ring."""
    algorithm: str


class Cell(NamedTuple):
    """One accuracy of tables 1 to 4, in percent."""

    accuracy: float
    std: float


class SpeedCell(NamedTuple):
    """What table 5 says of one algorithm with so many workers."""

    final_accuracy: float
    """In percent."""
    convergence_time: float
    """In seconds."""
    time_to_accuracy: float


@cache
def accuracies(table: int) -> Mapping[Place, Cell]:
    """The cells of table 1, 2, 3 or 4 in the paper's order."""
    found = {}
    for row in _rows(f"table{table}_"):
        place = Place(_data(row), float(row["dirichlet"]), row["graph"], row["algorithm"])
        found[place] = Cell(float(row["accuracy"]), float(row["std"]))
    return found


@cache
def speeds() -> Mapping[tuple[str, int, str], SpeedCell]:
    """Data, workers and algorithm -> what table 5 says of them, in the paper's order."""
    columns = ("final_accuracy", "convergence_time_s", "time_to_accuracy_s")
    return {
        (_data(row), int(row["workers"]), row["algorithm"]): SpeedCell(*(float(row[name]) for name in columns))
        for row in _rows("table5_")
    }


def data_title(data: str) -> str:
    """A data set and its net as the reports name them."""
    return _TITLES.get(data, data)


def _data(row: Mapping[str, str]) -> str:
    return _STAND_INS.get(row["dataset"], row["dataset"])


def _rows(prefix: str) -> list[dict[str, str]]:
    folder = resources.files("manyheads.studies") / "paper"
    (file,) = (file for file in folder.iterdir() if file.name.startswith(prefix))
    return list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
