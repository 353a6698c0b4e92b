"""Records as runs leave them, with made-up numbers."""

import json
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from manyheads.record import Record
from manyheads.studies.records import Records
from manyheads.studies.trial import Trial

THEORY = ("grad_phi", "grad_theta", "grad_theta_mean", "consensus", "m")


def write_record(records: Records, trial: Trial, accuracy: float = 0.8, **values: Any) -> None:
    """A record of a trial that came to an accuracy; ``values`` go over those of its summary."""
    experiment = trial.experiment
    workers, rounds = experiment.workers, trial.source.rounds
    description = json.loads(experiment.to_json())
    if trial.new is not None:
        workers, rounds = trial.new.workers, trial.new.head_epochs
        description |= {"algorithm": {"name": "join"}, "workers": workers, "split": trial.new.split, "rounds": rounds}
        # New workers have a seed of their own.
        description["seed"] = experiment.seed + 1
    folder = records.path(trial)
    folder.mkdir(parents=True)
    shown = [round for round in range(1, rounds + 1) if round % trial.every == 0 or round == rounds]
    rows = []
    for round in shown:
        row = {
            **dict.fromkeys((spec.name for spec in fields(Record) if spec.type in (int, float)), 0),
            "round": round,
            "algorithm": description["algorithm"]["name"],
            "run_id": experiment.run_id,
            "accuracy_validation": None,
            "accuracy_mean": accuracy - 0.3 * np.exp(-round / rounds * 6),
            "accuracy_before_mixing": accuracy + 0.01,
            "majority_floor": 0.5,
            "consensus_error": round * np.exp(-round / rounds * 5),
            "train_loss": 1 / round,
            "simulated_seconds": 2.0 * round / workers,
            "seconds": 0.5 * round,
        }
        if trial.theory:
            row |= {f"theory_{name}": 1 / round for name in THEORY}
        rows.append(row)
    last = {**rows[-1], "accuracy_mean": accuracy}
    rows[-1] = last
    means = {f"mean_theory_{name}": 0.05 if name == "consensus" else 0.1 for name in THEORY} if trial.theory else {}
    about = {"notes": [], "runtime": {"device": "cpu", "engine": "batched", "torch": "2.6.0"}}
    summary = {**last, **means, "rounds": rounds, "evaluated_rounds": len(shown), **about, **values}
    summary.pop("round")
    (folder / "experiment.json").write_text(json.dumps(description))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "workers.jsonl").write_text(json.dumps({"round": rounds, "accuracy": [accuracy] * workers}) + "\n")
    (folder / "sizes.json").write_text(json.dumps({"train": [20] * workers, "test": [10] + [20] * (workers - 1)}))
    if trial.similarity:
        maps = np.random.default_rng(0).random((workers, workers)).astype(np.float32)
        save_file(dict.fromkeys(("data", "heads", "representations"), maps), folder / "similarity.safetensors")
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.fixture(scope="session")
def records_lab() -> SimpleNamespace:
    """The function above, for tests."""
    writer: Callable[..., None] = write_record
    return SimpleNamespace(write=writer)
