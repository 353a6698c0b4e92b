"""The grid of a comparison: experiments made complete, each once, their places in a folder and their labels.

Runs of one seed share partition, graph and first weights by construction: all of them are functions of the seed and of
options that the runs have in common.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from manyheads.compatibility import check_theory, check_training
from manyheads.data import load
from manyheads.derived import federation_of, mixing_of, pick_device, resolve
from manyheads.errors import UserError
from manyheads.experiment import Experiment, Runtime, flat
from manyheads.initial import initial_model
from manyheads.jobs import Job
from manyheads.recipes import follow_from_others
from manyheads.report.naming import shown, words
from manyheads.store.layout import EXPERIMENT
from manyheads.topology import is_graph, parse_graph

SEEDS = (1, 12, 123, 1234)
"""The seeds that results are averaged over by default: the DePRL paper's."""


def distinct(experiments: Iterable[Experiment], runtime: Runtime, *, tuned: bool = False) -> list[Experiment]:
    """Complete experiments, each once: those that differ only in options their algorithm ignores are one.

    Mistakes in them show here, before anything is run. ``tuned``: their rates are yet to be chosen.
    """
    device, load_once = pick_device(runtime.device), cache(lambda name: load(name, runtime.data_dir))
    found: dict[str, Experiment] = {}
    checked = set()
    for experiment in _redrawn_if_random(list(experiments)):
        data = experiment.data
        dataset = load_once(data) if isinstance(data, str) else data
        complete = resolve(experiment, dataset.input_shape, device)
        before = found.setdefault(complete.run_id, complete)
        if before.rounds != complete.rounds:
            given = f"--rounds {before.rounds} and {complete.rounds}"
            raise UserError(f"{given}: give one number, as a run's records hold all rounds up to its last.")
        mixing_of(complete)  # for its errors: a random graph may not be connected with one seed
        # Of the rest, what one seed passes the others pass as well.
        if (setting := replace(complete, seed=0).run_id) not in checked:
            checked.add(setting)
            federation = federation_of(complete, dataset)
            model = initial_model(complete, federation)
            check_training(complete, model, federation)
            check_theory(runtime, model)
            if tuned and complete.validation and not any(federation.validation.sizes):
                raise not_to_be_tuned(complete)
    return list(found.values())


def _redrawn_if_random(experiments: Sequence[Experiment]) -> list[Experiment]:
    """In a grid of graphs, redraw concerns those that are random. If none is, it is left to be refused."""
    random = [is_graph(each.graph) and parse_graph(each.graph).random for each in experiments]
    if not any(random):
        return list(experiments)
    return [each if drawn else replace(each, redraw=False) for each, drawn in zip(experiments, random, strict=True)]


def not_to_be_tuned(experiment: Experiment) -> UserError:
    return UserError(f"--validation {experiment.validation:g} leaves no worker a sample to tune on: give more.")


def plan(experiments: Sequence[Experiment], folder: Path) -> list[Job]:
    """A job for each of some complete experiments, in ``folder/ALGORITHM-RUN_ID``."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: choose another --out.")
    if (folder / EXPERIMENT).exists():
        raise UserError(f"{folder} holds a single run: choose another --out for many.")
    return [
        Job(experiment, folder / directory_name(experiment), label)
        for experiment, label in zip(experiments, labels(experiments), strict=True)
    ]


def directory_name(experiment: Experiment) -> str:
    """Where a run lies within the folder of a comparison."""
    return f"{experiment.algorithm.name}-{experiment.run_id}"


def labels(experiments: Sequence[Experiment]) -> list[str]:
    """For each experiment its algorithm, and its values of the options in which that algorithm's experiments differ."""
    tables = [flat(experiment.describe()) for experiment in experiments]
    implied = follow_from_others(tables)
    found = []
    for table in tables:
        alike = [other for other in tables if other["algorithm"] == table["algorithm"]]
        differing = [
            name for name in table if name not in implied and any(other[name] != table[name] for other in alike)
        ]
        values = [f"{words(name)} {shown(table[name])}" for name in differing]
        found.append(", ".join([table["algorithm"], *values]))
    return found
