"""What the processes of a run must agree on before it begins: options, data, versions, and who has whose data."""

import json

import numpy as np
import torch

import manyheads
from manyheads.algorithms.base import Algorithm
from manyheads.data import Dataset, Federation
from manyheads.data.federation import mean_floor
from manyheads.data.sites import ONE_KIND, is_per_worker, seen
from manyheads.errors import UserError
from manyheads.experiment import Experiment, Runtime
from manyheads.models.split import Split, constants_of
from manyheads.network.base import Network
from manyheads.network.processes import Processes
from manyheads.network.sites import Sites, place

_SAME_WEIGHTS = 1e-5
NOT_IN_SITES = "Every site keeps its data and heads: neither consensus error nor simulated time is known."


def meet_sites(experiment: Experiment, runtime: Runtime, processes: Processes) -> Sites | None:
    """Who hosts whom, where every worker has a file of its own; None: the data are not in such files."""
    if not (isinstance(experiment.data, str) and is_per_worker(experiment.data)):
        return None
    # A message can name files and samples, and the text of a crash anything.
    processes.tells_why = False
    if experiment.algorithm.evaluate != "own":
        raise UserError("--evaluate mean-model needs all models in one place, and sites keep theirs: leave it out.")
    files = processes.texts(json.dumps(seen(experiment.data, experiment.workers)))
    return Sites(place([json.loads(text) for text in files]), experiment.workers, runtime.site_timeout)


def sizes_in_sites(federation: Federation, algorithm: Algorithm, network: Network) -> np.ndarray:
    """Train samples of each worker, [N]: those of others only where a server weighs workers by them, else 0."""
    own = torch.tensor(federation.train.sizes)
    if algorithm.server and algorithm.weighting == "samples":
        return network.gather(own).numpy()
    sizes = np.zeros(network.num_workers, dtype=np.int64)
    sizes[network.workers.start : network.workers.stop] = own
    return sizes


def floor_in_sites(federation: Federation, network: Network) -> float | None:
    """The majority floor of all workers, from one number of each."""
    return None if federation.num_classes is None else mean_floor(network.gather(federation.majority_floors()))


def compare(
    processes: Processes, experiment: Experiment, runtime: Runtime, dataset: Dataset, *, in_sites: bool
) -> None:
    """Refuse processes that were started with different options, on different data or with different versions.

    Sites have data and folders of their own: of their data only what kind of samples they are is compared.
    """
    options = experiment.describe()
    settings = ["engine", "eval_every", "theory_every", "checkpoint_every", "deterministic"]
    if in_sites:
        data = {"samples": dataset.kind}
    else:
        settings.append("out")
        data = {"content of the data": dataset.digest()[:12]}
    own = {
        **options,
        **options["algorithm"],
        **{name: str(getattr(runtime, name)) for name in settings},
        **data,
        "algorithm": experiment.algorithm.name,
        "version": f"{manyheads.__version__} with torch {torch.__version__}",
    }
    first, *others = map(json.loads, processes.texts(json.dumps(own)))
    for rank, other in enumerate(others, start=1):
        for name, value in first.items():
            if other.get(name) != value:
                cure = (
                    ONE_KIND if in_sites and name in data else "give all of them the same options, data and versions."
                )
                raise UserError(
                    f"process {rank} was started with {name} {other.get(name)}, process 0 with {name} {value}: {cure}"
                )


def compare_weights(processes: Processes, model: Split) -> None:
    """Refuse processes whose nets do not begin alike, as files of weights that each reads for itself may bring about.

    Machines of different kinds may draw last bits otherwise, which is no matter.
    """
    leaves = {**model.state_dict(), **constants_of(model)}
    norms = {name: torch.linalg.vector_norm(leaf.double()).item() for name, leaf in leaves.items()}
    first, *others = map(json.loads, processes.texts(json.dumps(norms)))
    for rank, other in enumerate(others, start=1):
        for name in first | other:
            both = first.get(name, -1), other.get(name, -1)
            if not np.isclose(*both, rtol=_SAME_WEIGHTS, atol=0, equal_nan=True):
                raise UserError(
                    f"process {rank}'s net does not begin with the weights of process 0's ({name} differs): give all of"
                    " them the same model."
                )
