"""The run directory: what a run leaves on disk, written as it goes and read back when it is used.

::

    experiment.json         what is computed, complete and canonical
    metrics.jsonl           a line for every evaluated round
    workers.jsonl           the same rounds, with the values of every worker
    partition.safetensors   who holds which sample, and the fingerprint of data of the user's own
    checkpoint/             the state, to continue from
    model.json              what it takes to build the net again
    models.safetensors      what every worker deploys, [workers, ...], at the end
    similarity.safetensors  cosines between the workers' data, heads and representations, [workers, workers]
    summary.json            the last record, written last
"""

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyheads.checkpoint import Snapshot, latest_round, newest, read
from manyheads.data.federation import saved_content
from manyheads.errors import UserError
from manyheads.experiment import Experiment
from manyheads.files import disk_errors, to_json, write_atomically, write_tensors
from manyheads.models import Split, build
from manyheads.randomness import torch_seed
from manyheads.record import Record
from manyheads.tree import Buffers, Params

_EXPERIMENT, _METRICS, _WORKERS, _SUMMARY = "experiment.json", "metrics.jsonl", "workers.jsonl", "summary.json"
_MODEL, _MODELS = "model.json", "models.safetensors"
PARTITION = "partition.safetensors"
_NAMED_DIFFERENCES = 3
_LOCK_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class RunDirectory:
    """A run directory that is being written."""

    path: Path

    @staticmethod
    def open(
        path: Path, experiment: Experiment, *, resume: bool, patience: float = 0.0, content: str | None = None
    ) -> "RunDirectory":
        """Make a run directory, or take up one of the same experiment; anything else is refused and left as it is.

        ``content`` is the fingerprint of data that are named by a file, which may have changed since.
        """
        if resume and not path.exists():
            raise UserError(f"--resume: there is no run in {path}. Leave --resume out to start one.")
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file: choose another --out.")
        directory = RunDirectory(path)
        with disk_errors(path):
            if not (path / _EXPERIMENT).exists() and any(not entry.name.startswith(".") for entry in _entries(path)):
                raise UserError(f"{path} is not empty and no run directory: choose another --out.")
            path.mkdir(parents=True, exist_ok=True)
        with directory.lock(patience):
            directory._take_up(experiment, content)
        return directory

    @contextmanager
    def lock(self, patience: float = 0.0) -> Iterator[None]:
        """Keep other processes out for the length of the block. A process that is killed keeps nobody out.

        One that is about to end may be waited for, ``patience`` seconds long.
        """
        deadline = time.monotonic() + patience
        with disk_errors(self.path):
            handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with disk_errors(self.path):
                while not _locked(handle):
                    if time.monotonic() >= deadline:
                        raise UserError(
                            f"another process is writing to {self.path}: wait for it, stop it, or choose another --out."
                        )
                    time.sleep(_LOCK_POLL_SECONDS)
            yield
        finally:
            os.close(handle)

    def finished(self, rounds: int) -> bool:
        """Whether the run has come to its end after at least so many rounds."""
        summary = _read_object(self.path / _SUMMARY)
        return summary is not None and summary.get("rounds", 0) >= rounds

    def cut_back(self, round: int) -> bool:
        """Drop the records of later rounds, and lines that a killed process left damaged; whether there were any."""
        cut = False
        for path in (self.path / _METRICS, self.path / _WORKERS):
            lines = list(_lines(path))
            kept = [line for line, record in lines if record is not None and record["round"] <= round]
            if len(kept) < len(lines):
                write_atomically(path, b"".join(kept))
                cut = True
        return cut

    def append(self, record: Record) -> None:
        """Add a round's record."""
        self._add_line(_METRICS, record.metrics())
        self._add_line(_WORKERS, {"round": record.round, **record.per_worker})

    def record(self, round: int) -> Record | None:
        """The record of a round as it was appended, for a run killed just before its summary; None: there is none."""
        metrics, workers = (
            next((found for _, found in _lines(self.path / name) if found and found["round"] == round), None)
            for name in (_METRICS, _WORKERS)
        )
        if metrics is None or workers is None:
            return None
        del workers["round"]
        return Record(**metrics, per_worker=workers)

    def save_models(self, params: Params, buffers: Buffers, description: dict[str, Any]) -> None:
        """Keep what every worker deploys, leaves [workers, ...], and what it takes to build the net again."""
        self.save_json(_MODEL, description)
        write_tensors(self.path / _MODELS, {**params, **buffers})

    def save_some_models(self, workers: range, params: Params, buffers: Buffers) -> None:
        """Keep what some workers deploy, until ``join_models``."""
        write_tensors(self.path / f".models-{workers.start:05d}.part", {**params, **buffers})

    def join_models(self, description: dict[str, Any]) -> None:
        """``save_models`` with what ``save_some_models`` has kept of all workers."""
        parts = sorted(self.path.glob(".models-*.part"))
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(part, framework="pt")) for part in parts]
            names = files[0].keys()
            self.save_models(
                {name: torch.cat([file.get_tensor(name) for file in files]) for name in names}, {}, description
            )
        for part in parts:
            part.unlink()

    def models(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Some of the leaves [workers, ...] that ``save_models`` has kept, one after another."""
        with safe_open(self.path / _MODELS, framework="pt") as file:
            for name in names:
                yield name, file.get_tensor(name)

    def finish(self, record: Record, extra: dict[str, Any]) -> None:
        """Write the summary: the last record and whatever else is worth knowing. It makes the run finished."""
        values = record.metrics()
        self.save_json(_SUMMARY, {"rounds": values.pop("round"), **values, **extra})

    def save_json(self, name: str, value: Any) -> None:
        """Write a JSON file into the directory."""
        write_atomically(self.path / name, (to_json(value, indent=2) + "\n").encode())

    def _add_line(self, name: str, value: dict[str, Any]) -> None:
        path = self.path / name
        with disk_errors(path), path.open("ab") as file:
            file.write((to_json(value) + "\n").encode())

    def _take_up(self, experiment: Experiment, content: str | None) -> None:
        """Write experiment.json, unless one is there: that one must be of the same run, on the same data."""
        assert experiment.rounds is not None, "an experiment is completed before it is run"
        for part in self.path.glob(".*.part"):
            part.unlink()
        path = self.path / _EXPERIMENT
        if path.exists():
            stored = _read_object(path)
            if stored is None:
                raise UserError(f"{path} is damaged: put it back, or choose another --out.")
            if differences := _differences(stored, experiment):
                raise UserError(
                    f"{self.path} holds another experiment ({'; '.join(differences[:_NAMED_DIFFERENCES])}):"
                    " choose another --out, or give the options it was started with."
                )
            if saved_content(self.path / PARTITION) not in (None, content):
                raise UserError(
                    f"{self.path} was begun on other data than {experiment.data} holds now: put them back,"
                    " or choose another --out."
                )
            if self.finished(experiment.rounds) or stored.get("rounds") == experiment.rounds:
                return
            if (done := latest_round(self.path / "checkpoint")) > experiment.rounds:
                raise UserError(
                    f"{self.path} has come to round {done}, beyond --rounds {experiment.rounds}: give at least {done},"
                    " or choose another --out."
                )
        write_atomically(path, experiment.to_json().encode())


class Run:
    """A run on disk, finished or not, for reading.

    >>> Run.open("runs/ring").model(worker=3)  # doctest: +SKIP
    """

    def __init__(self, path: Path, description: str, objects: dict[str, Any]) -> None:
        self.path, self._description, self._objects = path, description, objects
        self._damaged: dict[str, int] = {}
        self.notes: list[str] = []
        """What there was to say about the checkpoints when the state was read."""

    @staticmethod
    def open(path: str | Path, **objects: Any) -> "Run":
        """The run in a directory; what its experiment.json can only describe (a module, arrays) is given by name."""
        path = Path(path)
        try:
            return Run(path, (path / _EXPERIMENT).read_text(), objects)
        except (OSError, UnicodeDecodeError):
            raise UserError(f"{path} is no run directory (no {_EXPERIMENT} in it): give the --out of a run.") from None

    @cached_property
    def experiment(self) -> Experiment:
        """What was computed."""
        return Experiment.from_json(self._description, **self._objects)

    def metrics(self) -> list[dict[str, Any]]:
        """The record of every evaluated round, without damaged lines."""
        return self._records(_METRICS)

    def workers(self) -> list[dict[str, Any]]:
        """The values of every worker in every evaluated round, without damaged lines."""
        return self._records(_WORKERS)

    @property
    def damaged_lines(self) -> int:
        """How many lines ``metrics`` and ``workers`` left out when they last read."""
        return sum(self._damaged.values())

    def summary(self) -> dict[str, Any] | None:
        """The summary of a finished run; None: it is not finished."""
        return _read_object(self.path / _SUMMARY)

    def state(self) -> Snapshot:
        """The state of all workers in the newest good checkpoint."""
        folder = self.path / "checkpoint"
        manifest, self.notes = newest(folder)
        if manifest is None:
            raise UserError(f"{self.path} has no checkpoint to read: train it for some rounds.")
        return read(folder, manifest, range(manifest.num_workers))

    def describe_model(self) -> dict[str, Any]:
        """What it takes to build the net again, and in a site whose models it has."""
        described = _read_object(self.path / _MODEL)
        if described is None or not (self.path / _MODELS).exists():
            raise UserError(f"{self.path} has no models yet: they are kept when the run comes to its end.")
        return described

    def model(self, worker: int) -> Split:
        """The net a worker deploys, on the CPU and in eval mode. Reads that worker's rows only."""
        # What does not shape the net need not be given to use it.
        unused = dict.fromkeys(("loss", "metric", "transform"))
        experiment = Experiment.from_json(self._description, **{"data": "", **unused, **self._objects})
        if not 0 <= worker < experiment.workers:
            raise UserError(f"worker {worker} is not in this run: give 0 to {experiment.workers - 1}.")
        described, path = self.describe_model(), self.path / _MODELS
        # A site has the models of its own workers only.
        row, rows = worker - described.get("first_worker", 0), described.get("num_workers", experiment.workers)
        if not 0 <= row < rows:
            raise UserError(
                f"{self.path} does not have the model of worker {worker}: give the run of that worker's site."
            )
        assert experiment.model is not None, "experiment.json is complete"
        # The first weights are overwritten: they must not use up the caller's random numbers.
        with torch_seed(0):
            net = build(
                experiment.model,
                tuple(described["input_shape"]),
                described["num_outputs"],
                head=experiment.head,
                norm=experiment.norm,
            )
        net = experiment.algorithm.prepare(net.to(experiment.dtype))
        try:
            with safe_open(path, framework="pt") as file:
                net.load_state_dict({name: file.get_slice(name)[row] for name in file.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read ({error}): train the run again, or put the file back.") from None
        except RuntimeError:
            raise UserError(f"the model does not fit the weights in {path}: give the one that was trained.") from None
        return net.eval()

    def _records(self, name: str) -> list[dict[str, Any]]:
        found = [record for _, record in _lines(self.path / name)]
        good = [record for record in found if record is not None]
        self._damaged[name] = len(found) - len(good)
        return good


def _locked(handle: int) -> bool:
    """Whether the file is ours alone now."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _entries(path: Path) -> Iterator[Path]:
    return path.iterdir() if path.exists() else iter(())


def _read_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None: there is none, or it is damaged."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
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


def _differences(stored: dict[str, Any], experiment: Experiment) -> list[str]:
    """What keeps an experiment from continuing the stored one, an option each."""
    there, here = _options(stored), _options(json.loads(experiment.to_json()))
    if replace(experiment, rounds=here["rounds"] + 1).run_id == experiment.run_id:
        there["rounds"] = here["rounds"]
    names = [name for name in here | there if there.get(name) != here.get(name)]
    if "algorithm" in names:
        # Their own options differ anyway.
        names = [name for name in names if name in {spec.name for spec in fields(Experiment)}]
    return [f"{name} {_shown(there.get(name))} there, {_shown(here.get(name))} here" for name in names]


def _options(description: dict[str, Any]) -> dict[str, Any]:
    """A description as one flat table, the algorithm by its name and its options."""
    own = description.get("algorithm")
    options = dict(own) if isinstance(own, dict) else {}
    return {**description, "algorithm": options.pop("name", None), **options}


def _shown(value: Any) -> str:
    return f"{value.get('kind')} {value.get('sha256', '')[:8]}".strip() if isinstance(value, dict) else str(value)
