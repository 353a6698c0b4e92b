"""Records: what is kept of a study's runs, small enough to be committed. Weights stay where the runs were made.

A record is a run directory without its weights: ``experiment.json``, ``metrics.jsonl``, the last line of
``workers.jsonl``, ``sizes.json`` (train and test samples of every worker) and ``summary.json``, so that ``manyheads
report`` reads it as well.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from manyheads.errors import UserError
from manyheads.files import disk_errors, make_folder, write_atomically
from manyheads.json_text import to_json, with_floats
from manyheads.report.collect import Finished, find_runs
from manyheads.store import Run
from manyheads.store.layout import (
    EXPERIMENT,
    METRICS,
    PARTITION,
    SIMILARITY,
    SIZES,
    SUMMARY,
    WORKERS,
    read_description,
    read_lines,
    read_object,
)
from manyheads.studies.trial import Trial

FOLDER = "records"
_FILES = (EXPERIMENT, METRICS, WORKERS, SIZES, SIMILARITY, SUMMARY)
"""The summary last: it makes a record whole."""

_MOST_LINES = 100
"""Evaluated rounds that are kept of a run."""
_DIGITS = 6


class Records:
    """The records in a folder of results."""

    def __init__(self, results: Path) -> None:
        self.folder = results / FOLDER

    def path(self, trial: Trial) -> Path:
        return self.folder / trial.name

    def have(self, trial: Trial) -> bool:
        """Whether a trial's run is recorded, with everything that the trial needs."""
        path = self.path(trial)
        try:
            stored, summary = read_description(path / EXPERIMENT), read_object(path / SUMMARY)
        except UserError:
            return False
        if summary is None or not trial.fits(stored):
            return False
        rounds, evaluated = summary["rounds"], summary.get("evaluated_rounds", 0)
        return (
            (trial.new is not None or evaluated >= rounds // trial.every)
            and (not trial.theory or "mean_theory_m" in summary)
            and (not trial.similarity or (path / SIMILARITY).exists())
            and _is_whole(path, rounds)
        )

    def missing(self, trials: Sequence[Trial]) -> list[Trial]:
        """The trials that are not recorded, in their order with one exception.

        New workers come right after the run they build on if that is missing too: it is then made once, and its
        weights need not be kept for long.
        """
        left = [trial for trial in trials if not self.have(trial)]
        following = {trial.name: list[Trial]() for trial in left if trial.new is None}
        for trial in left:
            if trial.new is not None and trial.source.name in following:
                following[trial.source.name].append(trial)
        leading = [trial for trial in left if trial.new is None or trial.source.name not in following]
        return [one for trial in leading for one in (trial, *following.get(trial.name, ()))]

    def read(self, trial: Trial) -> Finished | None:
        """A trial's recorded run; None: it is not recorded."""
        if not self.have(trial):
            return None
        (found,) = find_runs(self.path(trial)).runs
        # Older records of new workers have a number derived from the seed instead.
        return replace(found, options={**found.options, "seed": trial.place["seed"]})

    def keep(self, directory: Path, trial: Trial) -> Path:
        """Record a finished run directory."""
        run = Run.open(directory)
        metrics, workers, summary = run.metrics(), run.workers(), run.summary()
        assert summary is not None, "only finished runs are recorded"
        # Which folder of this machine the run lay in is nobody's concern.
        notes = [note.replace(f"{directory.parent}/", "") for note in summary["notes"]]
        described = {**summary, "notes": notes, "evaluated_rounds": len(metrics), **_means(metrics)}
        files = {
            EXPERIMENT: (directory / EXPERIMENT).read_bytes(),
            METRICS: _lines(_thinned(metrics)),
            WORKERS: _lines(workers[-1:]),
            SIZES: _lines([_sizes(directory / PARTITION)]),
            SUMMARY: _lines([described]),
        }
        if trial.similarity:
            files[SIMILARITY] = (directory / SIMILARITY).read_bytes()
        _write(self.path(trial), files)
        return self.path(trial)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a record, replacing an earlier one. While it changes it has no summary, so that half a record is none."""
    make_folder(folder)
    with disk_errors(folder):
        for name in reversed(_FILES):
            (folder / name).unlink(missing_ok=True)
    for name in _FILES:
        if name in files:
            write_atomically(folder / name, files[name])


def sizes(run: Finished) -> dict[str, list[int]]:
    """Samples of every worker in a recorded run: ``train`` and ``test``."""
    found = read_object(run.path / SIZES)
    assert found is not None, "a record without them is none"
    return found


def _is_whole(record: Path, rounds: int) -> bool:
    """Whether the files beside a record's summary are whole: no line is damaged and the last round is there."""
    for name in (METRICS, WORKERS):
        kept = [row and row["round"] for _, row in read_lines(record / name)]
        if None in kept or kept[-1:] != [rounds]:
            return False
    return read_object(record / SIZES) is not None


def _thinned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most _MOST_LINES rounds, evenly spaced, with the last one."""
    step = -(-len(rows) // _MOST_LINES)
    return [row for place, row in enumerate(rows) if (len(rows) - 1 - place) % step == 0]


def _means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Means of the terms of M(k) over all rounds that have them; these cannot be computed from thinned rows later."""
    names = sorted({name for row in rows for name in row if name.startswith("theory_")})
    return {f"mean_{name}": float(np.mean([row[name] for row in rows if name in row])) for name in names}


def _sizes(partition: Path) -> dict[str, list[int]]:
    with safe_open(partition, "np") as file:
        return {part: np.diff(file.get_tensor(f"{part}.offsets")).tolist() for part in ("train", "test")}


def _lines(rows: Iterable[dict[str, Any]]) -> bytes:
    return "".join(to_json(with_floats(row, _rounded)) + "\n" for row in rows).encode()


def _rounded(number: float) -> float:
    """With as many digits as anybody reads."""
    return float(f"{number:.{_DIGITS}g}")
