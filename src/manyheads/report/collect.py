"""The finished runs under a folder, as they lie on disk."""

import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from manyheads.algorithms import find_algorithm
from manyheads.data import is_own_file
from manyheads.data.federation import saved_data_digest
from manyheads.data.site_files import is_site_path
from manyheads.errors import UserError
from manyheads.report.naming import shown
from manyheads.store import Run
from manyheads.store.layout import CODE, EXPERIMENT, MODEL, PARTITION, SIMILARITY, TUNING, read_object
from manyheads.topology import is_graph

_SIMILARITIES = ("data", "heads", "representations")


@dataclass(frozen=True, eq=False)
class Finished:
    """One finished run."""

    path: Path
    algorithm: str
    own: dict[str, Any]
    """The algorithm's own options."""
    options: dict[str, Any]
    """Everything else in experiment.json."""
    metrics: list[dict[str, Any]]
    workers: dict[str, Any]
    """The values of every worker after the last round."""
    summary: dict[str, Any]
    damaged: int
    """Lines that could not be read."""

    @property
    def seed(self) -> int:
        return self.options["seed"]

    @property
    def recorded(self) -> int:
        """The last round of ``metrics``."""
        return max((record["round"] for record in self.metrics), default=0)

    @property
    def cut_off(self) -> bool:
        """Whether ``metrics`` end before the run did, as in a partial copy."""
        return self.recorded < self.summary["rounds"]

    @property
    def on_graph(self) -> bool:
        """Whether workers mix with neighbours: not with a server, not with nobody."""
        return is_graph(self.options["graph"])

    @cached_property
    def code(self) -> dict[str, Any]:
        """What the user's own code in it is known by."""
        return read_object(self.path / CODE) or {}

    @cached_property
    def similarity(self) -> dict[str, np.ndarray]:
        """Cosines between the workers, [N, N] each, of those that were kept."""
        path = self.path / SIMILARITY
        try:
            maps = load_file(path) if path.exists() else {}
        except (OSError, SafetensorError, TypeError, AttributeError) as error:
            # The last two: a type that numpy does not have.
            raise UserError(f"{path} cannot be read ({error}): put it back, or remove it.") from None
        shape, there = (self.options["workers"],) * 2, [name for name in _SIMILARITIES if name in maps]
        return {name: maps[name] for name in there if maps[name].shape == shape and maps[name].dtype.kind == "f"}


@dataclass(frozen=True)
class Found:
    """What lies under a folder."""

    runs: list[Finished]
    """Each experiment once, in the order of their paths."""
    unfinished: int
    repeated: int
    """Runs left out because another run is of the same experiment."""
    parted: list[Path]
    """Sites that ended their run apart from those whose result is used here."""


def find_runs(folder: Path, among: Collection[Path] | None = None) -> Found:
    """Read all runs under a folder, or some ``among`` them.

    A folder that holds no finished run, or something else that looks like one, is refused.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give one that manyheads train or compare wrote.")
    paths = [path for path in _run_folders(folder) if among is None or path in among]
    if not paths and any(_run_folders(folder / TUNING)):
        raise UserError(
            f"{folder} only holds runs that --tune has tried so far: start the command that began it again, which goes"
            " on."
        )
    if not paths:
        what = "holds no run" if any(folder.iterdir()) else "is empty"
        raise UserError(f"{folder} {what}: give a folder that manyheads train or compare wrote.")
    sites: dict[str, list[Finished]] = {}
    seen: set[tuple[str, int]] = set()
    unfinished: set[str] = set()
    repeated = 0
    names = _Names()
    for path in paths:
        opened = names.given(Run.open(path))
        description = opened.description
        name = json.dumps(description, sort_keys=True)
        if (run := _finished(opened)) is None:
            # All sites of a run count as one, which is finished as soon as one of them is.
            unfinished.add(name if is_site_path(description["data"]) else str(path))
        elif (site := (name, _first_worker(path))) in seen:
            # The same experiment has the same numbers: counting it twice would make the deviation look smaller.
            repeated += 1
        else:
            seen.add(site)
            sites.setdefault(name, []).append(run)
    if not sites:
        which = "the run" if len(unfinished) == 1 else f"each of the {len(unfinished)} runs"
        raise UserError(f"{which} under {folder} is unfinished: start the command that began it again.")
    # Every site has the records of all workers, so one site stands for all that ended the run together. If they ended
    # it in several groups, take the largest group, and of that one that was never away: it has all rounds.
    runs = [
        min(ended, key=lambda run: (run.summary["workers_without_test"], -len(run.metrics))) for ended in sites.values()
    ]
    parted = [
        run.path
        for shown, ended in zip(runs, sites.values(), strict=True)
        for run in ended
        # Sites that ended together have the same values of every worker, to the bit; their means may differ.
        if run.workers and shown.workers and run.workers != shown.workers
    ]
    return Found(runs, len(unfinished - sites.keys()), repeated, parted)


class _Names:
    """What data files and objects of Python are called: one content has one name, and each content its own."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def given(self, run: Run) -> Run:
        """A run whose options have these names."""
        named: dict[str, Any] = {
            # ``kind`` alone is shown of it.
            name: {"kind": self._name(shown(value), value["sha256"]), "sha256": value["sha256"]}
            for name, value in run.description.items()
            if isinstance(value, dict) and isinstance(value.get("sha256"), str)
        }
        data = run.description["data"]
        if is_own_file(data) and not is_site_path(data) and (digest := saved_data_digest(run.path / PARTITION)):
            named["data"] = self._name(data, digest)
        return Run(run.path, {**run.description, **named}, {}) if named else run

    def _name(self, usual: str, content: str) -> str:
        """The name that the first run with the content has, unless others have it with another content."""
        taken = usual in self._known.values()
        return self._known.setdefault(content, f"{usual} {content[:8]}" if taken else usual)


def rejected(folder: Path) -> list[Finished]:
    """The runs whose rates were not chosen when a folder's comparison was tuned; unfinished ones have no summary."""
    runs = map(Run.open, _run_folders(folder / TUNING))
    return [_finished(run) or _as_compared(run, {}) for run in runs]


def _run_folders(folder: Path) -> Iterator[Path]:
    """Every run directory, in the order of their paths, without looking inside one.

    Runs whose rates were not chosen are left out, as they are not part of the comparison.
    """
    for root, folders, files in os.walk(folder):
        if EXPERIMENT in files:
            yield Path(root)
            folders.clear()
        folders[:] = sorted(set(folders) - {TUNING})


def _first_worker(path: Path) -> int:
    """The first worker whose model a run directory has, by which the sites of a run differ."""
    return (read_object(path / MODEL) or {}).get("first_worker", 0)


def _finished(run: Run) -> Finished | None:
    """A run as it is compared; None: it is not finished."""
    return _as_compared(run, run.summary() or {}) if run.finished else None


def _as_compared(run: Run, summary: dict[str, Any]) -> Finished:
    options = dict(run.description)
    own = dict(options.pop("algorithm"))
    metrics, workers = run.metrics(), run.workers()
    last = workers[-1] if workers and workers[-1]["round"] == summary.get("rounds") else {}
    if any(isinstance(values, list) and len(values) != options["workers"] for values in last.values()):
        raise UserError(f"{run.path} holds values of other workers than its {EXPERIMENT} says: put that back.")
    name = own.pop("name")
    kind = find_algorithm(name)
    for told in kind.provenance if kind else ():
        own.pop(told, None)
    return Finished(run.path, name, own, options, metrics, last, summary, run.damaged_lines)
