"""New workers: what a finished run has learned, given to workers that had no part in it and train only their heads."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from manyheads.algorithms import Join
from manyheads.algorithms.base import State, merge
from manyheads.algorithms.phases import REPRESENTATION
from manyheads.checks import positive, settle
from manyheads.data import Dataset, is_by_worker, is_own_file, load, may_change
from manyheads.data.federation import is_other_data
from manyheads.data.sites import is_per_worker
from manyheads.errors import UserError
from manyheads.experiment import Experiment, Runtime
from manyheads.record import Record
from manyheads.rounds import records
from manyheads.session import Session, open_session
from manyheads.store import Run
from manyheads.store.layout import PARTITION
from manyheads.tree import Params, fingerprint, repeat, row_shapes, select
from manyheads.units import counted


@dataclass(frozen=True, kw_only=True)
class NewWorkers:
    """Who joins, and what they do. None means: as in the run."""

    data: str | Dataset | None = None
    """Data set of the new workers. Default: the run's."""
    workers: int = 64
    """Number of new workers."""
    split: str | None = None
    """Who holds what: dirichlet:A, iid, shards:K or natural. Default: as in the run."""
    seed: int | None = None
    """Seed of the new workers, who differ from a run's even with the same seed. Default: the run's."""
    representation: Literal["own", "mean"] = "own"
    """Whether worker i takes the representation of the run's worker i mod N, or the mean of all."""
    head_epochs: int = 10
    """Passes over the local samples that move the heads."""

    def __post_init__(self) -> None:
        settle(self)
        positive(self, "head_epochs")


def join(run: Run, new: NewWorkers | None = None, runtime: Runtime | None = None) -> Generator[Record, None, None]:
    """Let new workers train heads on what a finished run has learned, yielding a Record for every pass.

    >>> for record in join(Run.open("runs/mine"), NewWorkers(workers=8)):
    ...     print(record.round, record.accuracy_mean)  # doctest: +SKIP
    """
    yield from records(open_join(run, new or NewWorkers(), runtime or Runtime()))


def open_join(run: Run, new: NewWorkers, runtime: Runtime) -> Session:
    """A session in which new workers train heads on what a finished run has learned, one pass a round."""
    if not isinstance(run, Run):
        raise UserError(f"{type(run).__name__} is not a Run: give manyheads.Run.open(path).")
    if new.data is not None:
        # Who brings data need not have the run's, which may be arrays that only Python can give.
        run = run.given(data=new.data)
    source = run.experiment
    if not run.finished:
        raise UserError(f"the run in {run.path} is not finished: continue it with the command that began it.")
    learned = run.state()
    leaves = select({**learned.params, **learned.buffers}, REPRESENTATION)
    constants = run.constants()
    if not select({**learned.params, **constants}, REPRESENTATION):
        raise UserError(f"{run.path} has learned no representation, since its head is the whole net: give another run.")
    # Of files for a worker each there may be others, and more, than the run has had.
    same = new.data is None and may_change(source.data) and not is_per_worker(source.data)
    if same and is_own_file(source.data) and not Path(str(source.data)).expanduser().exists():
        raise UserError(f"{run.path} was trained on {source.data}, which cannot be found from here: give --data.")
    _check_split(source, new, runtime)
    session = open_session(_experiment(source, {**leaves, **constants}, new), runtime, constants=constants)
    if same and is_other_data(run.path / PARTITION, session.everyone.content):
        raise UserError(
            f"{run.path} was not trained on the data that {source.data} holds now: put the old data back, or give"
            " --data."
        )
    taken, given = (tuple(run.describe_model()["input_shape"]), session.everyone.input_shape)
    if given != taken:
        # A net that flattens its input would take others as well, and make nonsense of them.
        raise UserError(
            f"samples are {list(given)}, but the nets of {run.path} take {list(taken)}: give --data of that shape."
        )
    if "head" not in session.ctx.model.groups:
        raise UserError(f"the nets of {run.path} have no head for new workers to train: give another run.")
    trained = counted(learned.round, "round")
    session.notes.append(f"Representation after {trained} of {run.path}: {_whose(run.hosted(), new.representation)}.")
    initial = merge(session.ctx.initial, _given_to(session, leaves, new.representation, run))
    return replace(session, ctx=replace(session.ctx, initial=initial))


def _whose(held: range, which: Literal["own", "mean"]) -> str:
    """Whose representation new workers take, in words; a site holds those of its own workers alone."""
    if len(held) == 1:
        return f"of worker {held.start}"
    if which == "mean":
        return f"the mean of {len(held)} workers"
    first = f"{held.start} + " if held.start else ""
    return f"of worker {first}i mod {len(held)}"


def _check_split(source: Experiment, new: NewWorkers, runtime: Runtime) -> None:
    """Refuse to deal data as in the run where that is by users and they name none: nobody here has asked for it."""
    dealt_so = source.split == "natural" and new.split is None and new.workers > 1
    if not dealt_so or new.data is None or is_by_worker(new.data):
        return
    data = new.data if isinstance(new.data, Dataset) else load(new.data, runtime.data_dir)
    if data.user_train is None:
        raise UserError(
            f"the run's workers have samples of their own (--split natural), but {data.name} does not say whose its"
            f" samples are: give --workers 1, who has them all, or deal them to {new.workers} with --split iid."
        )


def _experiment(source: Experiment, leaves: Mapping[str, Tensor], new: NewWorkers) -> Experiment:
    return replace(
        source,
        algorithm=Join(
            learned_by=source.algorithm.name,
            teacher=replace(source, seed=0).run_id,
            learned=fingerprint(leaves),
            representation=new.representation,
        ),
        data=source.data if new.data is None else new.data,
        workers=new.workers,
        split=new.split or (None if new.data is not None and is_by_worker(new.data) else source.split),
        seed=source.seed if new.seed is None else new.seed,
        rounds=new.head_epochs,
        # Weights in double precision stay so; what else there is depends on the device.
        precision="float64" if source.precision == "float64" else None,
        # Ten passes are no time for rates to fall, nor for workers to be away.
        decay=1.0,
        schedule="decay",
        worker_failure=0.0,
    )


def _given_to(session: Session, leaves: Params, which: Literal["own", "mean"], run: Run) -> Params:
    """The representation of each new worker, [W, ...]."""
    initial: State = session.ctx.initial
    wanted = select({**initial.params, **initial.buffers}, REPRESENTATION)
    if row_shapes(wanted) != row_shapes(leaves):
        data = session.everyone.name
        raise UserError(f"the representation of {run.path} does not fit the samples of {data}: give its own --data.")
    ids = torch.tensor(session.ctx.ids)
    if which == "own":
        rows = {name: leaf[ids % len(leaf)] for name, leaf in leaves.items()}
    else:
        rows = repeat({name: _mean(leaf) for name, leaf in leaves.items()}, len(ids))
    return session.ctx.engine.place(rows)


def _mean(leaf: Tensor) -> Tensor:
    """Over workers. Counters of batches, the only leaves that are no floats, are not averaged."""
    return leaf.double().mean(0).to(leaf.dtype) if leaf.is_floating_point() else leaf[0]
