"""A run that writes into a directory without being trained."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from manyheads.checkpoint import Checkpoints
from manyheads.data import load
from manyheads.derived import federation_of
from manyheads.errors import UserError
from manyheads.experiment import Experiment
from manyheads.recipes import RECIPES
from manyheads.record import Record
from manyheads.snapshot import Snapshot
from manyheads.store import RunDirectory

EXPERIMENT = Experiment(workers=4, rounds=50).complete(RECIPES["digits"])
FEDERATION = federation_of(EXPERIMENT, load("digits"))


def record(round: int, **values: Any) -> Record:
    numbers = dict.fromkeys(
        (
            "accuracy_mean",
            "accuracy_std",
            "accuracy_worst10",
            "accuracy_before_mixing",
            "loss",
            "train_loss",
            "consensus_error",
            "consensus_error_relative",
            "consensus_error_before_mixing",
            "bytes_sent_per_worker",
            "bytes_received_per_worker",
            "seconds",
            "simulated_seconds",
        ),
        round / 100,
    )
    return Record(
        **{
            "round": round,
            "algorithm": "deprl",
            "run_id": EXPERIMENT.run_id,
            "accuracy_validation": None,
            "majority_floor": 0.1,
            "workers_without_test": 0,
            "bytes_on_wire": 0,
            "peak_memory_bytes": 1,
            "per_worker": {"accuracy": [0.5, None, 0.25, round / 10]},
            **numbers,
            **values,
        }
    )


def start(path: Path, experiment: Experiment = EXPERIMENT, resume: bool = False) -> RunDirectory:
    with ExitStack() as held:
        return RunDirectory.open(path, experiment, FEDERATION, held, resume=resume, patience=0.0)


def save_checkpoint(path: Path, round: int, experiment: Experiment = EXPERIMENT) -> Snapshot:
    n = experiment.workers
    state = Snapshot(round, {"head.w": torch.rand(n, 3)}, {}, np.arange(n), np.arange(n) + 1, 7, 1.5)
    checkpoints = Checkpoints(path / "checkpoint", run_id=experiment.run_id, num_workers=n, workers=range(n))
    checkpoints.write_rows(state)
    checkpoints.complete(round, state.seconds)
    return state


def rounds(records: list[dict[str, Any]]) -> list[int]:
    return [entry["round"] for entry in records]


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file() and file.name != ".lock"}


@contextmanager
def refused(path: Path, pattern: str) -> Iterator[None]:
    """A UserError of one line that overwrites nothing."""
    before = contents(path) if path.is_dir() else None
    with pytest.raises(UserError, match=pattern) as caught:
        yield
    assert "\n" not in str(caught.value)
    assert before is None or contents(path) == before


@pytest.fixture(scope="session")
def shelf() -> SimpleNamespace:
    """The functions above, for tests."""
    return SimpleNamespace(
        experiment=EXPERIMENT,
        record=record,
        start=start,
        save_checkpoint=save_checkpoint,
        rounds=rounds,
        contents=contents,
        refused=refused,
    )
