"""A trial: one run that a study needs, what it computes and where it stands in the study's table."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from manyheads.algorithms import REGISTRY, Algorithm
from manyheads.data import Dataset
from manyheads.derived import resolve
from manyheads.engine.phase import PrecisionName
from manyheads.errors import UserError
from manyheads.experiment import Experiment, Runtime, flat, option_defaults
from manyheads.grid import SEEDS
from manyheads.new_workers import NewWorkers

GRAPHS = {"ring": "ring", "random": "random:0.25", "full": "full"}
"""The paper's graphs as we spell them."""

_NOT_IN_NAMES = {"data", "algorithm", "split", "graph", "workers", "seed", "validation"}
"""Options that every name states in its own way, and validation, which is the same in all trials."""

_NOT_COMPARED = {"precision", "step_seconds"}
"""Options in which a record may differ from its trial: the precision, and the simulated time of a step."""

_NOT_OF_NEW_WORKERS = {"algorithm", "seed", "decay", "schedule", "graph", "weights", "redraw"}
"""What new workers do not take over from the run whose representation they use."""


@dataclass(frozen=True, eq=False)
class Trial:
    """One run. With ``new`` it is that of new workers who use what the experiment has learned."""

    experiment: Experiment
    """Complete."""
    place: Mapping[str, Any]
    """Where the run stands: data, dirichlet, graph, algorithm, workers, seed and what else the study varies."""
    new: NewWorkers | None = None
    every: int = 10
    """Rounds between evaluations."""
    theory: bool = False
    """Whether the terms of M(k) are measured with each evaluation."""
    similarity: bool = False
    """Whether the similarities between workers are kept."""
    label: str = ""
    """Its name, if one made of its options would be too long."""

    @property
    def data(self) -> str:
        data = self.experiment.data
        return data if isinstance(data, str) else data.name

    @property
    def rounds(self) -> int:
        """Rounds until the end; passes of new workers come after those of the run they build on."""
        return self.experiment.recipe.rounds + (self.new.head_epochs if self.new else 0)

    @cached_property
    def source(self) -> "Trial":
        """The run whose representation new workers use; without new workers the trial itself."""
        if self.new is None:
            return self
        return replace(self, new=None)

    @cached_property
    def name(self) -> str:
        """The name of its record: made of words and not of a hash, so that it stays the same when options are added."""
        if self.label:
            return self.label
        experiment = self.experiment
        parts = [self.data, experiment.algorithm.name, experiment.split, experiment.graph, str(experiment.workers)]
        parts += [f"{name}{value}" for name, value in self._changes()]
        parts.append(f"seed{experiment.seed}")
        if self.new is not None:
            parts.append(f"new{self.new.workers}-{self.new.split}")
        return "-".join(re.sub(r"[^A-Za-z0-9.-]", "", part.replace("_", "-")) for part in parts)

    def runtime(self, base: Runtime) -> Runtime:
        """Where and how it runs."""
        return replace(base, eval_every=self.every, theory_every=self.every if self.theory else 0)

    def fits(self, stored: Mapping[str, Any]) -> bool:
        """Whether a stored experiment.json is of this trial. Options that are newer than the file are ignored."""
        wanted = _options(self.experiment)
        if self.new is not None:
            new = {"workers": self.new.workers, "split": self.new.split, "rounds": self.new.head_epochs}
            own = {*option_defaults(type(self.experiment.algorithm)), *_NOT_OF_NEW_WORKERS}
            wanted = {name: value for name, value in wanted.items() if name not in own} | new
        found = _compared(stored)
        return all(found[name] == value for name, value in wanted.items() if name in found)

    def _changes(self) -> Iterable[tuple[str, Any]]:
        """The options in which the experiment differs from its data set's recipe and its algorithm's defaults."""
        plain = _plain_options(type(self.experiment.algorithm), self.experiment.data)
        for name, value in sorted(_options(self.experiment).items()):
            if name not in _NOT_IN_NAMES and plain[name] != value:
                yield name, value


@dataclass(frozen=True)
class Size:
    """How large studies are: as in the paper, or small enough for two cores and a minute."""

    workers: int = 128
    new_workers: int = 64
    rounds: int = 100
    every: int = 10
    seeds: tuple[int, ...] = SEEDS
    stand_in: str | None = None
    """The data set that takes the place of all others."""
    precision: PrecisionName = "float32"

    @property
    def quick(self) -> bool:
        return self.stand_in is not None

    def data(self, *names: str) -> tuple[str, ...]:
        """The data sets to use for some."""
        return names if self.stand_in is None else (self.stand_in,)

    def trial(
        self,
        algorithm: Algorithm | str,
        data: str,
        dirichlet: float | str,
        *,
        seed: int,
        graph: str = "ring",
        place: Mapping[str, Any] | None = None,
        every: int | None = None,
        theory: bool = False,
        similarity: bool = False,
        **changes: Any,
    ) -> Trial:
        """One run with the paper's settings but for ``changes``; ``graph`` is ring, random or full."""
        chosen = REGISTRY[algorithm]() if isinstance(algorithm, str) else algorithm
        settings = {"workers": self.workers, "rounds": self.rounds, "precision": self.precision, **changes}
        experiment = complete(
            Experiment(
                algorithm=chosen,
                data=data,
                split=f"dirichlet:{dirichlet}",
                graph=GRAPHS[graph],
                seed=seed,
                validation=0.0,
                **settings,
            )
        )
        where = {
            "data": data,
            "dirichlet": dirichlet,
            "graph": graph,
            "algorithm": chosen.name,
            "workers": experiment.workers,
            "seed": seed,
        }
        every = min(every or self.every, experiment.recipe.rounds)
        return Trial(experiment, {**where, **(place or {})}, every=every, theory=theory, similarity=similarity)


PAPER = Size()
QUICK = Size(workers=8, new_workers=4, rounds=4, every=2, seeds=(1,), stand_in="digits")


def complete(experiment: Experiment) -> Experiment:
    """The experiment with no value left open; a data set that has a name is not read for it."""
    return resolve(experiment, experiment.data.input_shape if isinstance(experiment.data, Dataset) else ())


def joined(trial: Trial, new: NewWorkers, **place: Any) -> Trial:
    """New workers on what a trial's run has learned."""
    return replace(trial, new=new, place={**trial.place, **place})


def only(trials: Iterable[Trial], conditions: Iterable[str]) -> list[Trial]:
    """The trials that conditions such as ``algorithm=deprl,d-psgd`` allow."""
    kept = list(trials)
    known = sorted({key for trial in kept for key in trial.place})
    wanted: dict[str, list[str]] = {}
    for condition in conditions:
        key, equals, values = condition.partition("=")
        if not equals or key not in known:
            raise UserError(f"--only {condition} names nothing here: give one of {', '.join(known)}, as in seed=1.")
        wanted.setdefault(key, []).extend(values.split(","))
    for key, values in wanted.items():
        allowed = sorted({str(trial.place[key]) for trial in kept if key in trial.place})
        for value in values:
            if value not in allowed:
                raise UserError(f"--only {key}={value}: {key} is one of {', '.join(allowed) or 'none'} here.")
        kept = [trial for trial in kept if str(trial.place.get(key)) in values]
    return kept


def without_repeats(trials: Iterable[Trial]) -> list[Trial]:
    """Every run once, with everything that any of its trials needs; new workers build on that one."""
    found: dict[str, Trial] = {}
    alike = defaultdict[str, list[Trial]](list)
    for trial in trials:
        found.setdefault(trial.name, trial)
        alike[trial.source.name].append(trial)
    return [
        replace(
            trial,
            every=min(other.every for other in alike[trial.source.name]),
            theory=any(other.theory for other in alike[trial.source.name]),
            similarity=trial.new is None and any(other.similarity for other in alike[trial.source.name]),
        )
        for trial in found.values()
    ]


@cache
def _plain_options(kind: Any, data: str | Dataset) -> dict[str, Any]:
    """The options of an experiment with nothing given but algorithm and data."""
    return _options(complete(Experiment(algorithm=kind(), data=data)))


def _options(experiment: Experiment) -> dict[str, Any]:
    """Every option that is a word or a number, those of the algorithm among them."""
    return _compared(experiment.describe())


def _compared(description: Mapping[str, Any]) -> dict[str, Any]:
    options = flat(description)
    # Without arrays and functions, whose descriptions may differ between machines.
    return {name: value for name, value in options.items() if name not in _NOT_COMPARED and not isinstance(value, dict)}
