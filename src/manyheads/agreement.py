"""What the processes of a run must agree on before it begins: options, code, data, versions, who has whose data."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

import manyheads
from manyheads.data import Dataset
from manyheads.data.site_files import ONE_KIND, is_site_path, seen
from manyheads.errors import UserError
from manyheads.experiment import Experiment, Runtime, flat
from manyheads.models.split import Split, constants_of, statistics
from manyheads.network.processes import Processes
from manyheads.own_code import changed, hashes
from manyheads.sites import Sites, place, whose
from manyheads.topology import brief

_SAME_WEIGHTS = 1e-5
_SAME_OPTIONS = "give all of them the same options, data and versions."
_ONE_DATA = (
    "give all processes the same data; to leave the data at their sites, save each worker's there as"
    " site-{worker}.npz (docs/sites.md)."
)
_ONE_MODEL = (
    "give all of them the same; if each process draws the weights of a module for itself, give its class or a factory"
    " instead, whose weights follow from the seed."
)
NOT_IN_SITES = "Every site keeps its data and heads: neither consensus error nor simulated time is known."


def meet_sites(experiment: Experiment, runtime: Runtime, processes: Processes) -> Sites | None:
    """Who hosts whom, if the data are in one file for each worker; None: they are not."""
    # The processes are the same for all runs of a script: nothing of an earlier run over sites may be left.
    processes.tells_why, processes.whose = True, None
    data = experiment.data if isinstance(experiment.data, str) else "arrays"
    # Processes in sites and others have different things to say next, and would misunderstand each other.
    for this, its, that, first in _beside_the_first(processes, data):
        if is_site_path(its) != is_site_path(first):
            raise UserError(f"{this} was started with data {its}, {that} with data {first}: {_SAME_OPTIONS}")
    if not is_site_path(data):
        return None
    # Error messages can name files and samples, and the text of a crash can contain anything: other sites see neither.
    processes.tells_why = False
    if experiment.algorithm.evaluate != "own":
        raise UserError("--evaluate mean-model needs all models in one place, but sites keep theirs: leave it out.")
    if experiment.test_split != "shared" and processes.count > 1:
        # Each process would deal its own workers' samples among them, and the accuracies would depend on who is where.
        raise UserError(
            f"--test-split {experiment.test_split} deals everybody's test samples, but sites keep theirs: leave it out."
        )
    placement = place(processes.gather_json(seen(data, experiment.workers)))
    processes.whose = whose(placement, data)
    return Sites(placement, experiment.workers, runtime.site_timeout)


def check_alike(
    processes: Processes, experiment: Experiment, runtime: Runtime, dataset: Dataset, *, in_sites: bool
) -> None:
    """Refuse processes that were started with different options, on different data or with different versions.

    Sites have data and folders of their own: only the kind of their samples is compared.
    """
    settings = ["engine", "eval_every", "theory_every", "checkpoint_every", "deterministic"]
    if in_sites:
        settings.append("site_timeout")
        samples, cures = dataset.kind, {"samples": ONE_KIND}
    else:
        settings.append("out")
        samples, cures = {"sha256": dataset.digest()}, {"data": _ONE_DATA, "samples": _ONE_DATA}
    own = {
        **flat(experiment.describe()),
        **{name: str(getattr(runtime, name)) for name in settings},
        "samples": samples,
        "version": f"{manyheads.__version__} with torch {torch.__version__}",
    }
    for this, other, that, first in _beside_the_first(processes, own):
        for name, value in first.items():
            if (its := other.get(name)) != value:
                cure = cures.get(name, _SAME_OPTIONS)
                # Arrays and modules are described by a hash, which means nothing to people.
                if isinstance(value, dict) or isinstance(its, dict):
                    cure = _ONE_MODEL if name == "model" else cure
                    raise UserError(f"{this} does not have the same {name} as {that}: {cure}")
                its, value = (brief(str(each)) for each in (its, value))
                raise UserError(f"{this} was started with {name} {its}, {that} with {name} {value}: {cure}")


def check_same_code(processes: Processes, experiment: Experiment) -> None:
    """Refuse processes in which the user's own code differs, as when each host keeps a copy of it."""
    for this, other, that, first in _beside_the_first(processes, hashes(experiment)):
        if name := changed(first, other):
            raise UserError(f"{this} does not have the same code in its {name} as {that}: give all of them the same.")


def check_same_weights(processes: Processes, model: Split) -> None:
    """Refuse processes whose nets start from different weights, as when each host reads its own file of weights.

    Different kinds of machines may draw weights that differ in their last bits; that is allowed.
    """
    leaves = {**model.state_dict(), **constants_of(model)}
    norms = {name: _norm(leaf) for name, leaf in leaves.items()}
    for this, other, that, first in _beside_the_first(processes, norms):
        for name in first | other:
            both = first.get(name, -1), other.get(name, -1)
            if not np.isclose(*both, rtol=_SAME_WEIGHTS, atol=0, equal_nan=True):
                raise UserError(
                    f"the net of {this} does not start from the same weights as that of {that} ({name} differs):"
                    " give all of them the same model."
                )


def agree_on_statistics(processes: Processes, model: Split) -> None:
    """Take for statistics, which are mixed, all buffers that were seen to move in any process.

    Each has tried the net on its own samples, and all must send the same leaves.
    """
    moving = {name for names in processes.gather_json(model.moving) for name in names}
    model.moving = tuple(name for name in statistics(model) if name in moving)


def _norm(leaf: Tensor) -> float:
    """The norm of a tensor whose later numbers count more: that of the same rows in another order is another."""
    flat = leaf.detach().double().flatten()
    return torch.linalg.vector_norm(flat * torch.linspace(1, 2, len(flat)).to(flat)).item()


def _beside_the_first(processes: Processes, own: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """Every other process as people know it and what it has, beside process 0 and what that has."""
    first, *others = processes.gather_json(own)
    for rank, other in enumerate(others, start=1):
        yield processes.called([rank]), other, processes.called([0]), first
