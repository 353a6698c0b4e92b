"""A run directory that is being written: by one process at a time, to one experiment, whole files or none."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from torch import Tensor

from manyheads.checkpoint import latest_round
from manyheads.data.federation import Federation, saved_other_partition, saved_with_other_data
from manyheads.errors import Transient, UserError
from manyheads.experiment import Experiment, flat
from manyheads.files import (
    disk_errors,
    locked,
    read_sealed,
    sync,
    wait_until,
    write_atomically,
    write_sealed,
    write_tensors,
)
from manyheads.json_text import to_json, write_json
from manyheads.own_code import changed, hashes
from manyheads.record import Record
from manyheads.snapshot import covers
from manyheads.store.layout import (
    CHECKPOINT,
    CODE,
    CONSTANTS,
    EXPERIMENT,
    METRICS,
    MODEL,
    MODELS,
    PARTITION,
    SUMMARY,
    TUNING,
    WORKERS,
    finished_rounds,
    read_description,
    read_lines,
    read_object,
)
from manyheads.topology import brief

_NAMED_DIFFERENCES = 3


@dataclass(frozen=True)
class RunDirectory:
    """A run directory that is being written."""

    path: Path

    @staticmethod
    def open(
        path: Path, experiment: Experiment, federation: Federation, held: ExitStack, *, resume: bool, patience: float
    ) -> "RunDirectory":
        """Make a run directory, or continue one of the same experiment; anything else is refused and left as it is.

        It is locked until ``held`` is closed. ``federation``: what the run's data and split are now.
        """
        if resume and not path.exists():
            raise UserError(f"--resume: there is no {path}. Leave --resume out to start a run there.")
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file: choose another --out.")
        directory = RunDirectory(path)
        with disk_errors(path):
            if not (path / EXPERIMENT).exists() and any(path.glob("[!.]*")):
                raise UserError(f"{path} is not empty and not a run directory: choose another --out.")
        held.enter_context(locked(path, patience))
        directory._begin_or_check(experiment, federation)
        return directory

    def check(self, experiment: Experiment, federation: Federation) -> None:
        """Refuse if the directory is of another experiment, other data or other code.

        Until there is something to continue from, code may change: its first mistakes show in the first round.
        """
        if differences := _differences(read_description(self.path / EXPERIMENT), experiment):
            raise UserError(
                f"{self.path} holds another experiment ({'; '.join(differences[:_NAMED_DIFFERENCES])}):"
                " choose another --out, or give the options it was started with."
            )
        partition, begun = self.path / PARTITION, finished_rounds(self.path) or latest_round(self.path / CHECKPOINT)
        if saved_with_other_data(partition, federation.data_digest):
            raise UserError(
                f"{self.path} was not begun on the data that {experiment.data} holds now: put the old data back, or"
                " choose another --out."
            )
        if begun and saved_other_partition(partition, federation):
            raise UserError(
                f"{partition} deals the samples otherwise than these options do: put the old file back, or choose"
                " another --out."
            )
        # Otherwise one learning curve would be of two different algorithms.
        name = self.changed_code(experiment)
        if name and begun:
            raise UserError(
                f"{self.path} was begun with different code in its {name}: put the old code back, choose another --out,"
                f" or remove the folders that were begun with the old code, in a comparison's {TUNING} too: only those"
                " are run again."
            )

    def changed_code(self, experiment: Experiment) -> str | None:
        """The field of the experiment whose own code differs from what the run was begun with; None: none does."""
        return changed(read_object(self.path / CODE) or {}, hashes(experiment))

    def cut_back(self, round: int) -> int:
        """Drop the records of later rounds, and lines that a killed process left damaged; gives the last round left."""
        last = []
        for path in (self.path / METRICS, self.path / WORKERS):
            lines = list(read_lines(path))
            kept = [(line, record) for line, record in lines if record is not None and record["round"] <= round]
            if len(kept) < len(lines):
                write_atomically(path, b"".join(line for line, _ in kept))
            last.append(max((record["round"] for _, record in kept), default=0))
        return min(last)

    def append(self, record: Record) -> None:
        """Add a round's record."""
        self._add_line(METRICS, record.metrics())
        self._add_line(WORKERS, {"round": record.round, **record.per_worker})

    def sync(self) -> None:
        """Make sure that the records so far survive a power cut."""
        for path in (self.path / METRICS, self.path / WORKERS):
            with disk_errors(path):
                if path.exists():
                    sync(path)

    def record(self, round: int) -> Record | None:
        """The record of a round as it was appended, for a run killed just before its summary; None: there is none."""
        metrics, workers = (
            next((found for _, found in read_lines(self.path / name) if found and found["round"] == round), None)
            for name in (METRICS, WORKERS)
        )
        if metrics is None or workers is None:
            return None
        del workers["round"]
        return Record(**metrics, per_worker=workers)

    def keep_constants(self, constants: Mapping[str, Tensor], *, begun: bool) -> None:
        """Keep the weights that no worker trains; if the run has ``begun``, they must be those kept already."""
        path = self.path / CONSTANTS
        kept = read_sealed(path) if begun else None
        if kept is None:
            path.unlink(missing_ok=True)
            if constants:
                write_sealed(path, constants)
        elif kept.keys() != constants.keys() or not all(
            np.array_equal(kept[name], constants[name], equal_nan=True) for name in kept
        ):
            raise UserError(
                f"{self.path} was begun with different weights under requires_grad=False: give the model it was"
                " begun with, or choose another --out."
            )

    def save_models(self, leaves: Mapping[str, Tensor | Sequence[Tensor]], description: dict[str, Any]) -> None:
        """Keep what every worker deploys, leaves [workers, ...], and then what it takes to build the net again.

        The hash of the models goes with it, so that damage to them is noticed when they are used.
        """
        digest = write_tensors(self.path / MODELS, leaves)
        write_json(self.path / MODEL, {**description, "models_sha256": digest})

    def save_some_models(self, leaves: Mapping[str, Tensor], workers: range) -> None:
        """Keep what some workers deploy, until ``join_models``."""
        write_tensors(self.path / f".models-{workers.start:05d}-{workers.stop - 1:05d}.part", leaves)

    def join_models(self, description: dict[str, Any], num_workers: int, patience: float) -> None:
        """``save_models`` with what ``save_some_models`` has kept of all workers.

        ``patience``: seconds that what another host has kept may take to show here.
        """
        whole = wait_until(lambda: covers(self._some_models(), num_workers), patience)
        found = self._some_models()
        if not whole:
            raise Transient(
                f"{self.path} holds the models of {sum(map(len, found))} of {num_workers} workers:"
                " choose an --out on a disk that all processes see."
            )
        parts = found.values()
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(part, framework="pt")) for part in parts]
            # Rows are read from the parts only as they are written, as all models together may not fit into memory.
            leaves = {name: [file.get_tensor(name) for file in files] for name in files[0].keys()}  # noqa: SIM118
            self.save_models(leaves, description)
        for part in parts:
            part.unlink()

    def models(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Some of the leaves [workers, ...] that ``save_models`` has kept, one after another."""
        with safe_open(self.path / MODELS, framework="pt") as file:
            for name in names:
                yield name, file.get_tensor(name)

    def finish(self, record: Record, extra: dict[str, Any]) -> None:
        """Write the summary: the last record and whatever else is worth knowing. It makes the run finished."""
        values = record.metrics()
        write_json(self.path / SUMMARY, {"rounds": values.pop("round"), **values, **extra})

    def _some_models(self) -> dict[range, Path]:
        """The workers of each part that ``save_some_models`` has kept, in their order, and its file."""
        found = {}
        for part in self.path.glob(".models-*.part"):
            first, last = map(int, part.stem.split("-")[1:])
            found[range(first, last + 1)] = part
        return dict(sorted(found.items(), key=lambda item: item[0].start))

    def _add_line(self, name: str, value: dict[str, Any]) -> None:
        path = self.path / name
        with disk_errors(path), path.open("ab") as file:
            file.write((to_json(value) + "\n").encode())

    def _begin_or_check(self, experiment: Experiment, federation: Federation) -> None:
        """Write experiment.json, unless one is there: that one must be of the same run, on the same data."""
        for part in self.path.glob(".*.part"):
            part.unlink()
        path = self.path / EXPERIMENT
        if path.exists():
            self.check(experiment, federation)
            rounds, done = experiment.recipe.rounds, latest_round(self.path / CHECKPOINT)
            if done > rounds > finished_rounds(self.path):
                raise UserError(
                    f"{self.path} has reached round {done}, beyond --rounds {rounds}: give at least {done}, or"
                    " choose another --out."
                )
        else:
            self.write_experiment(experiment)
        # After experiment.json, so that a process killed in between leaves a valid run directory.
        self._keep_code(experiment)

    def write_experiment(self, experiment: Experiment) -> None:
        """Write experiment.json with the rounds that are asked for now; called once nothing can be refused any more."""
        write_atomically(self.path / EXPERIMENT, experiment.to_json().encode())

    def _keep_code(self, experiment: Experiment) -> None:
        """Write the hashes of the user's code, unless the run is finished or they are there already."""
        new = self.changed_code(experiment) or not (self.path / CODE).exists()
        if new and (now := hashes(experiment)) and not finished_rounds(self.path):
            write_json(self.path / CODE, now)


def _differences(stored: dict[str, Any], experiment: Experiment) -> list[str]:
    """What keeps an experiment from continuing the stored one, an option each."""
    there, here = flat(stored), flat(experiment.describe())
    if not experiment.uses_rounds:
        there["rounds"] = here["rounds"]
    names = [name for name in here | there if there.get(name) != here.get(name)]
    if "algorithm" in names:
        # The options of two algorithms differ anyway.
        names = [name for name in names if name in {spec.name for spec in fields(Experiment)}]
    why = {"rounds": ", on which its numbers depend"}
    return [
        f"{name} {_shown(there.get(name))} there, {_shown(here.get(name))} here{why.get(name, '')}" for name in names
    ]


def _shown(value: Any) -> str:
    if isinstance(value, dict) and "kind" in value:
        return f"{value['kind']} {value.get('sha256', '')[:8]}".strip()
    return "not given" if value is None else brief(str(value))
