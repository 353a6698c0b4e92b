"""What follows from an experiment on its data and device: nothing left open, who holds what, who mixes with whom."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from manyheads.algorithms import Algorithm, DePRL
from manyheads.algorithms.base import Rates
from manyheads.algorithms.checking import making
from manyheads.data import Dataset, Federation, federate, is_own_file, may_change
from manyheads.data.site_files import is_site_path
from manyheads.errors import UserError, flag
from manyheads.experiment import Experiment, flat
from manyheads.machine import local_rank
from manyheads.recipes import Recipe, recipe_for, shape_for, step_seconds
from manyheads.topology import Mixing, build_mixing, check_agreement, is_graph, parse_graph

SET_BY_COROLLARY = ("lr", "head_lr", "decay")
"""Options that have no effect under Corollary 1's schedule; a complete experiment still names its recipe's values."""


def resolve(experiment: Experiment, input_shape: tuple[int, ...], device: torch.device | None = None) -> Experiment:
    """The experiment with no value left open, and its specs in their canonical form.

    The shape of a sample chooses the recipe of data without a name; the precision is chosen only if a device is given.
    """
    name = experiment.data if isinstance(experiment.data, str) else ""
    # A graph must be valid even if the algorithm does not use it.
    graph = parse_graph(experiment.graph).spec if is_graph(experiment.graph) else experiment.graph
    changes: dict[str, Any] = {"graph": graph, **exchange_of(experiment)}
    if is_site_path(name) and experiment.split not in (None, "natural"):
        raise UserError(
            f"--split {experiment.split} does not go with a file for each worker, who keeps its own samples: leave"
            " it out."
        )
    if device is not None:
        changes["precision"] = experiment.precision or ("tf32" if device.type == "cuda" else "float32")
        check_precision(changes["precision"], device)
    recipe = recipe_for(name, input_shape)
    if experiment.schedule == "corollary":
        _check_rates(experiment, recipe)
    return replace(experiment.complete(recipe), **changes)


def usual_options(given: Mapping[str, Any], algorithm: type[Algorithm] = DePRL) -> dict[str, Any]:
    """The default of every option in one table, for a run with the data, net and batch size of ``given``."""
    data, model, batch_size = (given.get(name) for name in ("data", "model", "batch_size"))
    with making(algorithm, {}):
        begun = Experiment(algorithm=algorithm(), data=data if isinstance(data, str) else "")
    usual = flat(resolve(begun, shape_for(model)).describe())
    if batch_size is not None:
        usual["step_seconds"] = step_seconds(model, batch_size)
    if isinstance(data, dict) and given.get("split") == "natural":
        # A description of arrays does not say whether they were given by worker, which makes natural the default.
        usual["split"] = "natural"
    return usual


def federation_of(experiment: Experiment, dataset: Dataset, hosted: range | None = None) -> Federation:
    """Who holds what of a data set. ``hosted``: the data set has the samples of these workers only."""
    assert experiment.split is not None, "an experiment is completed before it is used"
    workers = range(experiment.workers) if hosted is None else hosted
    federation = federate(
        dataset,
        workers=len(workers),
        first=workers.start,
        split=experiment.split,
        test_split=experiment.test_split,
        relabel=experiment.relabel,
        validation=experiment.validation,
        seed=experiment.root,
    )
    notes = dataset.notes + federation.notes
    # Not for a site, which may well lack a class: renumbering would make its classes differ from the other sites'.
    if hosted is None and dataset.num_classes is not None:
        notes += _missing_classes(torch.cat([dataset.y_train, dataset.y_test]))
    own = not isinstance(experiment.data, str) or is_own_file(experiment.data)
    if own and dataset.user_train is not None and experiment.split != "natural" and len(workers) > 1:
        notes += (f"--split {experiment.split} deals a user's samples to several workers; natural keeps them together",)
    return replace(federation, data_digest=dataset.digest() if may_change(experiment.data) else None, notes=notes)


def _missing_classes(labels: Tensor) -> tuple[str, ...]:
    """What to say of classes without samples that are numbered below one with samples."""
    missing = (torch.bincount(labels) == 0).nonzero().flatten().tolist()
    if not missing:
        return ()
    if missing == [0]:
        return ("no sample is of class 0: if labels count from 1, subtract 1, or the net learns one class too many",)
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    cure = "renumber them with numpy.unique(y, return_inverse=True)[1], or the net learns classes that nobody has"
    return (f"no sample is of class {missing[0]}{more}: if labels have gaps, {cure}",)


def mixing_of(experiment: Experiment) -> Mixing:
    """Who mixes with whom in an experiment."""
    algorithm = experiment.algorithm
    mixing = build_mixing(
        # A server or no exchange at all needs no graph; a ring then only says who is present.
        experiment.graph if algorithm.exchange == "graph" else "ring",
        experiment.workers,
        weights=experiment.weights or "metropolis",
        redraw=experiment.redraw,
        link_failure=experiment.link_failure,
        worker_failure=experiment.worker_failure,
        seed=experiment.root,
        allow_row_stochastic=algorithm.row_stochastic,
    )
    # Checked here, before training, and not in build_mixing: a report must still be able to show such a run.
    check_agreement(mixing)
    return mixing


def exchange_of(experiment: Experiment) -> dict[str, Any]:
    """Graph, weights and failing links as the algorithm uses them, whatever a comparison gives for the others."""
    algorithm, graph = experiment.algorithm, experiment.graph
    if algorithm.exchange != "graph":
        return {"graph": algorithm.exchange, "weights": None, "redraw": False, "link_failure": 0.0}
    if not is_graph(graph):
        raise UserError(f"--graph {graph} is not a graph, but {algorithm.name} needs one: give ring, random:P, ...")
    if parse_graph(graph).weighted:
        if algorithm.row_stochastic:
            raise UserError(f"{algorithm.name} weighs all neighbours alike: give the links of --graph without weights.")
        return {"weights": None}
    return {"weights": "uniform" if algorithm.row_stochastic else experiment.weights or "metropolis"}


def rates_of(experiment: Experiment) -> Rates:
    """The optimiser's numbers, Corollary 1's where asked for: beta = sqrt(N/K), alpha = 1/(tau sqrt(K))."""
    recipe = experiment.recipe
    lr, head_lr, decay = recipe.lr, recipe.head_lr, recipe.decay
    if experiment.schedule == "corollary":
        # If heads never move by themselves, tau is 0 and their rate is not used.
        tau = max(1, experiment.algorithm.head_passes)
        lr, head_lr, decay = (experiment.workers / recipe.rounds) ** 0.5, 1 / (tau * recipe.rounds**0.5), 1.0
    return Rates(lr, head_lr, recipe.momentum, recipe.weight_decay, recipe.clip or None, decay)


def pick_device(name: str) -> torch.device:
    """The device called ``name``; auto is a GPU if there is one. The processes on a host take its GPUs in turn."""
    gpus = torch.cuda.device_count()
    if name == "auto" and not gpus:
        return torch.device("cpu")
    if name in ("auto", "cuda") and gpus:
        return torch.device("cuda", local_rank() % gpus)
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"unknown device '{name}'. Allowed: auto, cpu, cuda, cuda:K.")
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise UserError(f"device '{name}' was asked for, but torch sees {gpus} GPUs: use --device cpu.")
    return device


def _check_rates(experiment: Experiment, recipe: Recipe) -> None:
    """Refuse rates beside Corollary 1's, unless they are the recipe's, which a complete experiment names anyway."""
    for name in SET_BY_COROLLARY:
        value = getattr(experiment, name)
        if value not in (None, getattr(recipe, name)):
            raise UserError(f"{flag(name)} {value} is not used by --schedule corollary: leave one out.")


def check_precision(given: str, device: torch.device) -> None:
    """Refuse a number format that the device does not have."""
    if device.type != "cuda" and given in ("tf32", "bf16"):
        raise UserError(f"--precision {given} needs a GPU: use float32, or --device cuda.")
