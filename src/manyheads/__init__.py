"""Personalised decentralised learning: one shared representation, many private heads, no server."""

import os
import sys
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if sys.platform == "win32":
    raise ImportError("manyheads needs Linux or macOS: on Windows, install and run it in WSL.")

# Else the last bits of a product depend on where in memory its factors lie, and a worker's rows lie elsewhere with
# another number of threads or processes, and after a checkpoint. MKL looks when torch multiplies for the first time.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

if TYPE_CHECKING:
    from manyheads.algorithms import DPSGD, DePRL, DisPFL, Ditto, FedAvg, FedRep, FedRoD, Local
    from manyheads.data.arrays import from_arrays, from_workers
    from manyheads.data.dataset import Dataset
    from manyheads.errors import UserError
    from manyheads.experiment import Experiment, Runtime
    from manyheads.new_workers import NewWorkers, join
    from manyheads.record import Record
    from manyheads.rounds import train
    from manyheads.store import Run

__all__ = ["DPSGD", "DePRL", "DisPFL", "Ditto", "FedAvg", "FedRep", "FedRoD", "Local"]
_PLACES = dict.fromkeys(__all__, "algorithms") | {
    "Dataset": "data.dataset",
    "Experiment": "experiment",
    "NewWorkers": "new_workers",
    "Record": "record",
    "Run": "store",
    "Runtime": "experiment",
    "UserError": "errors",
    "from_arrays": "data.arrays",
    "from_workers": "data.arrays",
    "join": "new_workers",
    "train": "rounds",
}
__all__ += ["Dataset", "Experiment", "NewWorkers", "Record", "Run", "Runtime", "UserError"]
__all__ += ["from_arrays", "from_workers", "join", "train"]


def __getattr__(name: str) -> object:
    """Load a public name on first use: ``import manyheads`` and ``manyheads --help`` stay instant."""
    if name not in _PLACES:
        raise AttributeError(f"module 'manyheads' has no attribute '{name}'")
    from importlib import import_module

    value = getattr(import_module(f"manyheads.{_PLACES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not: what a notebook completes."""
    return sorted({*globals(), *__all__})
