"""A run on disk, finished or not, as those who use it read it: its records, its state, the nets it has trained."""

import json
from collections import Counter
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyheads.algorithms import attribute_of
from manyheads.checkpoint import latest_round, newest, place_of
from manyheads.checks import check_text
from manyheads.errors import UserError
from manyheads.experiment import FUNCTIONS, Experiment
from manyheads.files import read_sealed, sha256
from manyheads.machine import expanded
from manyheads.models import Split
from manyheads.models.split import statistics
from manyheads.snapshot import Snapshot, read
from manyheads.store.layout import (
    CHECKPOINT,
    CONSTANTS,
    EXPERIMENT,
    METRICS,
    MODEL,
    MODELS,
    SUMMARY,
    WORKERS,
    finished_rounds,
    read_description,
    read_lines,
    read_object,
)
from manyheads.tree import forms
from manyheads.units import counted

_ANEW = f"put it back, or delete {SUMMARY} and continue the run, which writes it again."

_NAMED_RUNS = 6


class Run:
    """A run on disk, finished or not, for reading.

    >>> Run.open("runs/ring").model(worker=3)  # doctest: +SKIP
    """

    def __init__(self, path: Path, description: dict[str, Any], objects: dict[str, Any]) -> None:
        self.path, self.description, self._objects = path, description, objects
        self._damaged: dict[str, int] = {}
        self._sound: str | None = None
        """The hash of the models when they were last looked through: they are read worker by worker."""

    def __repr__(self) -> str:
        return f"Run.open({str(self.path)!r})"

    @staticmethod
    def open(path: str | Path, **objects: Any) -> "Run":
        """The run in a directory.

        Give by name what its experiment.json can only describe: a module, arrays, an unregistered algorithm.
        """
        path = expanded(path)
        check_text("the folder", str(path))
        if not (path / EXPERIMENT).exists():
            inside = sorted(found.parent.name for found in path.glob(f"*/{EXPERIMENT}"))
            more = f" and {len(inside) - _NAMED_RUNS} more" if len(inside) > _NAMED_RUNS else ""
            there = f"one of those in it, {', '.join(inside[:_NAMED_RUNS])}{more}" if inside else "the --out of a run"
            raise UserError(f"{path} is not a run directory (no {EXPERIMENT} in it): give {there}.")
        return Run(path, read_description(path / EXPERIMENT), objects)

    def given(self, **objects: Any) -> "Run":
        """The same run, with these objects added to those that it was opened with, which take precedence."""
        return Run(self.path, self.description, {**objects, **self._objects})

    @cached_property
    def experiment(self) -> Experiment:
        """What was computed."""
        return Experiment.from_json(json.dumps(self.description), **self._objects)

    def metrics(self) -> list[dict[str, Any]]:
        """The record of every evaluated round, without damaged lines."""
        return self._records(METRICS)

    def workers(self) -> list[dict[str, Any]]:
        """The values of every worker in every evaluated round, without damaged lines."""
        return self._records(WORKERS)

    @property
    def damaged_lines(self) -> int:
        """How many lines ``metrics`` and ``workers`` left out when they last read."""
        return sum(self._damaged.values())

    def summary(self) -> dict[str, Any] | None:
        """The summary, of the rounds that had been asked for when it was written; None: there is none yet."""
        return read_object(self.path / SUMMARY)

    @property
    def finished(self) -> bool:
        """Whether it has come to the end of the rounds that were last asked for."""
        return finished_rounds(self.path) >= self.description["rounds"]

    def state(self) -> Snapshot:
        """The state of all workers in the newest checkpoint; if that is damaged, an older one does not replace it."""
        folder = self.path / CHECKPOINT
        manifest, damage = newest(folder)
        if damage:
            raise UserError(f"{self.path}: {damage[0]}: {_ANEW}")
        if manifest is None:
            raise UserError(f"{self.path} has no checkpoint to read: train it for some rounds.")
        return read(place_of(folder, manifest.round), manifest, range(manifest.num_workers))

    def describe_model(self) -> dict[str, Any]:
        """What it takes to build the net again and to use it, and in a site whose models it has."""
        path = self.path / MODEL
        missing = [file for file in (path, self.path / MODELS) if not file.exists()]
        if missing and self.finished:
            raise UserError(f"{missing[0]} is missing: {_ANEW}")
        if missing:
            raise UserError(f"{self.path} has no models yet: continue it to its end{self._sooner()}.")
        if (ended := self.summary()) is not None and not finished_rounds(self.path):
            has = f"was finished with {counted(ended['rounds'], 'round')} and has gone on since"
            raise UserError(f"{self.path} {has}: continue it to its end{self._sooner()}.")
        described = read_object(path)
        if described is None or not self._makes_sense(described):
            raise UserError(f"{path} is damaged: {_ANEW}")
        return described

    def hosted(self, described: dict[str, Any]) -> range:
        """The workers that this directory has the models of, by its ``describe_model``: all, or in a site its own."""
        first = described.get("first_worker", 0)
        return range(first, first + described.get("num_workers", self.description["workers"]))

    def constants(self) -> dict[str, Tensor]:
        """What all workers' nets have alike and none trains, as requires_grad=False asks for."""
        return read_sealed(self.path / CONSTANTS) or {}

    def model(self, worker: int) -> Split:
        """The net a worker deploys, on the CPU and in eval mode. Only that worker's rows are held."""
        # What does not shape the net need not be given to use it.
        experiment = self.given(data="", **dict.fromkeys(FUNCTIONS)).experiment
        if not isinstance(worker, Integral) or not 0 <= worker < experiment.workers:
            raise UserError(f"worker {worker!r} is not in this run: give 0 to {experiment.workers - 1}.")
        described, path = self.describe_model(), self.path / MODELS
        hosted = self.hosted(described)
        if worker not in hosted:
            raise UserError(
                f"{self.path} does not have the model of worker {worker}: give the run of that worker's site."
            )
        # Whatever the seed: the first weights are overwritten.
        net = experiment.build_net(tuple(described["input_shape"]), described["num_outputs"], seed=0)
        try:
            self._check_models(described)
            with safe_open(path, framework="pt") as file:
                rows = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                if any(row.get_shape()[:1] != [len(hosted)] for row in rows.values()):
                    raise UserError(f"{path} holds the models of other workers than {MODEL} says: {_ANEW}")
                weights = {name: row[hosted.index(worker)] for name, row in rows.items()}
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read ({error}): {_ANEW}") from None
        weights |= self.constants()
        if forms({**dict(net.named_parameters()), **statistics(net)}) != forms(weights):
            raise UserError(f"the model does not fit the weights in {path}: give the one that was trained.")
        net.load_state_dict(weights, strict=False)
        return net.eval()

    def _makes_sense(self, described: dict[str, Any]) -> bool:
        """Whether the values of a model.json go together."""
        pixels = described["pixels"] or {"mean": [0], "std": [1]}
        return (
            self.hosted(described).stop <= self.description["workers"]
            and described["num_classes"] in (None, described["num_outputs"])
            and {len(pixels["mean"]), len(pixels["std"])} <= {1, *described["input_shape"][:1]}
            and 0 not in pixels["std"]
        )

    def _check_models(self, described: dict[str, Any]) -> None:
        """Refuse models that are not as they were written."""
        written, path = described["models_sha256"], self.path / MODELS
        if written != self._sound and sha256(path) != written:
            raise UserError(f"{path} is damaged: {_ANEW}")
        self._sound = written

    def _sooner(self) -> str:
        """How to let an unfinished run end where it stands; empty: it cannot, or has not trained yet."""
        given, own = self._objects.get("algorithm"), self.description["algorithm"]
        uses_rounds = attribute_of(own["name"], own, "uses_rounds") if given is None else given.uses_rounds
        if self.description["schedule"] == "corollary" or uses_rounds:
            return ""
        kept = latest_round(self.path / CHECKPOINT)
        shown = max((record["round"] for record in self.metrics()), default=0)
        # A run must end with an evaluated round: the last one there is, or one more, which will be evaluated.
        if not (end := shown if shown >= kept else kept + 1):
            return ""
        how = f"--rounds {end}, in Python replace(experiment, rounds={end}), and the same out"
        return f", or let it end with round {end}, by {how}"

    def _records(self, name: str) -> list[dict[str, Any]]:
        found = [record for _, record in read_lines(self.path / name)]
        good = [record for record in found if record is not None]
        # A line that was copied from another run is damage too. Those of workers do not say whose they are.
        for whose, _ in Counter(record.get("run_id") for record in good).most_common(1):
            good = [record for record in good if record.get("run_id") == whose]
        self._damaged[name] = len(found) - len(good)
        return good
