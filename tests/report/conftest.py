"""Run directories as training leaves them, with made-up numbers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from manyheads.algorithms import REGISTRY, get_algorithm
from manyheads.derived import mixing_of
from manyheads.experiment import Experiment
from manyheads.metrics.theorem import assess
from manyheads.recipes import RECIPES
from manyheads.report import open_comparison, write

LEVELS = {name: 0.95 - 0.03 * place for place, name in enumerate([*REGISTRY, "join"])}
"""The accuracy each algorithm comes to."""

WriteRun = Callable[..., Path]


@pytest.fixture(scope="session")
def write_run() -> WriteRun:
    return _write_run


@pytest.fixture(scope="session")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on three systems and two seeds, beside an unfinished run. Not to be written into."""
    folder = tmp_path_factory.mktemp("reported")
    for seed in (1, 2):
        _write_run(folder / f"deprl{seed}", "deprl", seed=seed, similarity=True, theory=True, clock=True, level=0.9)
        _write_run(folder / f"ditto{seed}", "ditto", seed=seed, clock=True, level=0.7)
        _write_run(folder / f"local{seed}", "local", seed=seed, clock=True, level=0.8)
    _write_run(folder / "late", seed=3, finished=False)
    assert write(open_comparison(folder)) == folder / "report.html"
    return folder


def _write_run(
    path: Path,
    algorithm: str = "deprl",
    own: dict[str, Any] | None = None,
    *,
    finished: bool = True,
    similarity: bool = False,
    theory: bool = False,
    clock: bool = False,
    level: float | None = None,
    **options: Any,
) -> Path:
    """A run directory in the form of design.md's contract; ``level`` is its last accuracy."""
    kind = get_algorithm(algorithm)
    if kind.exchange != "graph":
        options |= {"graph": kind.exchange, "weights": None}
    else:
        options = {"weights": "uniform" if kind.row_stochastic else "metropolis", **options}
    options = {"workers": 8, "rounds": 10, "split": "dirichlet:0.1", **options}
    experiment = Experiment(algorithm=kind(**(own or {})), **options).complete(RECIPES["digits"])
    rounds, workers = experiment.recipe.rounds, experiment.workers
    rng = np.random.default_rng([experiment.seed, list(LEVELS).index(algorithm)])
    level = LEVELS[algorithm] + 0.01 * rng.standard_normal() if level is None else level
    ability = 0.06 * rng.standard_normal(workers)
    sends = {"local": 0, "dispfl": 30_000}.get(algorithm, 50_000)
    path.mkdir(parents=True)
    (path / "experiment.json").write_text(experiment.to_json())
    records, lines = [], []
    for round in range(1, rounds + 1):
        accuracy = np.clip(
            level + ability - 0.4 * np.exp(-round / rounds * 6) + 0.01 * rng.standard_normal(workers), 0, 1
        )
        record = {
            "round": round,
            "algorithm": algorithm,
            "run_id": experiment.run_id,
            "accuracy_mean": accuracy.mean(),
            "accuracy_std": accuracy.std(),
            "accuracy_worst10": np.sort(accuracy)[: -(-workers // 10)].mean(),
            "accuracy_before_mixing": accuracy.mean() + 0.004,
            "accuracy_validation": accuracy.mean(),
            "majority_floor": 0.55 + 0.01 * (experiment.seed % 5),
            "workers_without_test": 0,
            "loss": 0.1,
            "train_loss": 0.2,
            "consensus_error": 0.0 if kind.exchange == "server" else 2.0 * np.exp(-round / 4) + 0.01,
            "consensus_error_relative": 0.0 if kind.exchange == "server" else 0.1 * np.exp(-round / 4) + 0.01,
            "consensus_error_before_mixing": 2.5 * np.exp(-round / 4) + 0.01,
            "bytes_sent_per_worker": float(sends * round),
            "bytes_received_per_worker": float(sends * round),
            "bytes_on_wire": 0,
            "seconds": 0.11 * round,
            "simulated_seconds": 0.5 * round * (1 + (sends > 0)) if clock else None,
            "peak_memory_bytes": 10**8,
        }
        if theory:
            names = ("grad_phi", "grad_theta", "grad_theta_mean", "consensus", "m")
            record |= {f"theory_{name}": float(np.exp(-round / (5 + place))) for place, name in enumerate(names)}
        records.append(record)
        lines.append({"round": round, "accuracy": accuracy.tolist(), "train_loss": [0.2] * workers})
    for name, rows in (("metrics.jsonl", records), ("workers.jsonl", lines)):
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if similarity:
        data = rng.dirichlet(np.full(10, 0.3), workers)
        heads = data + 0.2 * rng.standard_normal(data.shape)
        near = 5 + rng.standard_normal((workers, 40)) * 0.2
        maps = {"data": data, "heads": heads, "representations": near}
        cosines = {name: _cosines(rows).astype(np.float32) for name, rows in maps.items()}
        save_file(cosines, path / "similarity.safetensors")
    if finished:
        runtime = {"manyheads": "0.1.0", "torch": "2.6.0", "python": "3.12.1", "device": "cpu", "engine": "batched"}
        last = {"rounds": rounds, **{name: value for name, value in records[-1].items() if name != "round"}}
        if kind.exchange == "graph":
            last |= assess(mixing_of(experiment)).numbers
        summary = {
            **last,
            "root": experiment.root,
            "notes": ["7 workers hold fewer than 3 classes."],
            "runtime": runtime,
        }
        (path / "summary.json").write_text(json.dumps(summary))
    return path


def _cosines(rows: np.ndarray) -> np.ndarray:
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit @ unit.T
