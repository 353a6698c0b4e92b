"""What lies where in the folder of a run or a comparison, and how JSON is read that a killed process damaged."""

from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType
from typing import Any

from manyheads.algorithms import Local
from manyheads.errors import UserError
from manyheads.experiment import FUNCTIONS, Experiment
from manyheads.json_text import fits, parse_json, read_json
from manyheads.recipes import Recipe
from manyheads.record import Record

EXPERIMENT = "experiment.json"
"""What is computed, complete and canonical."""
CODE = "code.json"
"""Hashes of the user's own code in the experiment, where there is any."""
METRICS = "metrics.jsonl"
"""A line for every evaluated round."""
WORKERS = "workers.jsonl"
"""The same rounds, with the values of every worker."""
PARTITION = "partition.safetensors"
"""Who holds which sample, and the fingerprint of data that may change under their name."""
CHECKPOINT = "checkpoint"
"""A folder: the state, to continue from."""
MODEL = "model.json"
"""What it takes to build the net again and to use it, and the hash of the models."""
MODELS = "models.safetensors"
"""What every worker deploys, [workers, ...], at the end."""
CONSTANTS = "constants.safetensors"
"""What all nets have alike and no worker trains, where there is any."""
SIMILARITY = "similarity.safetensors"
"""Cosines between the workers' data, heads and representations, [workers, workers]."""
SUMMARY = "summary.json"
"""The last record, written last: it makes the run finished."""
SITE = "site.json"
"""In the folder of a site: whose workers these are, and who was away."""
TUNING = "tuning"
"""In the folder of a comparison: the runs whose rates were not chosen."""
EARLIER = "earlier"
"""Within that, the runs which the last tuning did not try: with other factors, or another seed."""
SIZES = "sizes.json"
"""In a study's record of a run: train and test samples of every worker."""

_OBJECTS = ("data", "model", *FUNCTIONS)
"""Fields of an experiment that may hold what a file can only describe."""
_COUNT, _POSITIVE = range(2**63), range(1, 2**63)
_METRIC = (float, NoneType)
"""null: it was not finite."""
_OPTION = (str, bool, float)
"""Only types; an Experiment checks the words and numbers themselves."""
_RECORD = {
    **{
        spec.name: {int: _COUNT, str: str}.get(spec.type, _METRIC)
        for spec in fields(Record)
        if spec.name != "round" and spec.default is spec.default_factory is MISSING
    },
    # What is counted always has a value.
    "bytes_sent_per_worker": float,
    "seconds": float,
}
_NEEDED: dict[str, dict[str, Any]] = {
    EXPERIMENT: {
        **dict.fromkeys((spec.name for spec in fields(Recipe)), _OPTION),
        **dict.fromkeys(("norm", "workers", "split", "relabel", "graph", "schedule", "seed"), _OPTION),
        "algorithm": dict,
        "data": (str, dict),
        "model": (str, dict),
        "precision": (str, NoneType),
    },
    METRICS: {"round": _COUNT, **_RECORD},
    WORKERS: {"round": _COUNT},
    MODEL: {
        "input_shape": [_POSITIVE],
        "num_outputs": _POSITIVE,
        # null: a regression; inputs that were made of other numbers than bytes.
        "num_classes": (_POSITIVE, NoneType),
        "pixels": ({"scale": _POSITIVE, "mean": [float], "std": [float]}, NoneType),
        "models_sha256": str,
    },
    SUMMARY: {"rounds": _POSITIVE, **_RECORD},
    SITE: {"workers": [_COUNT], "away": dict, "disturbances": [str]},
    SIZES: {"train": [_COUNT], "test": [_COUNT]},
}
"""File -> the keys that it, or every line of it, must have, and their kinds."""
_NOT_IN_ALL = {spec.name: _METRIC for spec in fields(Record) if spec.default is None}
_ALLOWED: dict[str, dict[str, Any]] = {
    METRICS: _NOT_IN_ALL,
    MODEL: {"first_worker": _COUNT, "num_workers": _POSITIVE},
    SUMMARY: {"notes": [str], "runtime": dict, "title": str, "evaluated_rounds": _COUNT, **_NOT_IN_ALL},
}
"""Keys that may be missing, and their kinds."""


def read_description(path: Path) -> dict[str, Any]:
    """An experiment.json as it stands, also where no Experiment can be made of it. A damaged one is refused."""
    values = read_object(path)
    if values is None or not isinstance(values["algorithm"].get("name"), str):
        raise UserError(f"{path} is damaged or not a manyheads experiment: put it back, or move its folder away.")
    known = {spec.name for spec in fields(Experiment)} - {"algorithm"}
    described = {name for name in _OBJECTS if isinstance(values.get(name), dict)}
    plain = {name: value for name, value in values.items() if name in known - described}
    try:
        # Local, which allows any number of workers, stands in for the algorithm, which may be the user's own.
        Experiment(algorithm=Local(), **plain)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return values


def read_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None: there is none, or it is damaged, or is not what a file of that name holds."""
    return _checked(read_json(path), path.name)


def finished_rounds(folder: Path) -> int:
    """Rounds after which the run in a folder has come to its end; 0: it has not, or is being extended."""
    done, asked = ((read_object(folder / name) or {}).get("rounds", 0) for name in (SUMMARY, EXPERIMENT))
    return done if done >= asked else 0


def read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Every line of a jsonl file and the record in it; None: the line is damaged."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            yield line, _checked(parse_json(line), path.name) if line.endswith(b"\n") else None


def _checked(value: Any, name: str) -> dict[str, Any] | None:
    """An object, if it is what a file of that name holds."""
    needed = _NEEDED.get(name, {})
    if not isinstance(value, dict) or not needed.keys() <= value.keys():
        return None
    kinds = needed | _ALLOWED.get(name, {})
    return value if all(fits(value[key], kinds[key]) for key in kinds if key in value) else None
