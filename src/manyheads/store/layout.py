"""What lies where in a run directory, and how its JSON files are read, which a killed process may leave damaged."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXPERIMENT = "experiment.json"
"""What is computed, complete and canonical."""
METRICS = "metrics.jsonl"
"""A line for every evaluated round."""
WORKERS = "workers.jsonl"
"""The same rounds, with the values of every worker."""
PARTITION = "partition.safetensors"
"""Who holds which sample, and the fingerprint of data of the user's own."""
CHECKPOINT = "checkpoint"
"""A folder: the state, to continue from."""
MODEL = "model.json"
"""What it takes to build the net again."""
MODELS = "models.safetensors"
"""What every worker deploys, [workers, ...], at the end."""
CONSTANTS = "constants.safetensors"
"""What all nets have alike and no worker trains, where there is any."""
SIMILARITY = "similarity.safetensors"
"""Cosines between the workers' data, heads and representations, [workers, workers]."""
SUMMARY = "summary.json"
"""The last record, written last: it makes the run finished."""

_NEEDED = {"algorithm": dict, "workers": int, "rounds": int, "seed": int, "split": str, "graph": str}
"""What every experiment.json has."""


def read_description(path: Path) -> dict[str, Any] | None:
    """An experiment.json as it stands, with what no Experiment can be made of; None: it is damaged, or none of ours."""
    values = read_object(path) or {}
    ours = "data" in values and all(isinstance(values.get(name), kind) for name, kind in _NEEDED.items())
    return values if ours and isinstance(values["algorithm"].get("name"), str) else None


def read_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None: there is none, or it is damaged."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Every line of a jsonl file and the record in it; None: the line is damaged."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            whole = line.endswith(b"\n") and isinstance(record, dict) and isinstance(record.get("round"), int)
            yield line, record if whole else None
