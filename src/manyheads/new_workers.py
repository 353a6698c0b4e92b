"""New workers, who had no part in a finished run, take the representation that it has learned and train only heads."""

from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from manyheads.algorithms import Join
from manyheads.algorithms.base import State, merge
from manyheads.algorithms.phases import REPRESENTATION
from manyheads.checks import normalise_fields, positive
from manyheads.data import Dataset, is_brought_by_workers, is_own_file, load, may_change
from manyheads.data.federation import Federation, saved_data_digest
from manyheads.data.pixels import Pixels
from manyheads.data.site_files import is_site_path
from manyheads.errors import UserError
from manyheads.experiment import Experiment, Runtime, flat
from manyheads.machine import expanded
from manyheads.models.split import constants_of
from manyheads.record import Record
from manyheads.rounds import records
from manyheads.session import Session, open_session
from manyheads.store import Run
from manyheads.store.layout import PARTITION
from manyheads.tree import Params, fingerprint, repeat, row_forms, select
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
    head_lr: float | None = None
    """Learning rate of the heads in every pass. Default: the run's --head-lr, before any decay."""
    frozen: Literal["train", "eval"] | None = None
    """Mode of the representation while heads train. Default: the run's --frozen; train, if its algorithm has none."""

    def __post_init__(self) -> None:
        normalise_fields(self)
        positive(self, "head_epochs", "head_lr")


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What a run leaves to new workers."""

    experiment: Experiment
    name: str
    """What messages call the run: its directory."""
    rounds: int
    representations: Params
    """Those of the workers in ``held``, with their statistics, [W, ...]."""
    constants: Params
    held: range
    input_shape: tuple[int, ...]
    pixels: Pixels | None
    data_digest: str | None
    """The fingerprint of the run's data; None: not known."""

    @staticmethod
    def from_session(session: Session, state: State, name: str) -> "Learned":
        """What a run that is not on disk has learned, from its session and last state."""
        leaves = select({**state.params, **state.buffers}, REPRESENTATION)
        return Learned(
            experiment=session.experiment,
            name=name,
            rounds=session.ctx.rounds,
            representations={name: leaf.cpu() for name, leaf in leaves.items()},
            constants={name: leaf.cpu() for name, leaf in constants_of(session.ctx.model).items()},
            held=session.ctx.network.workers,
            input_shape=session.everyone.input_shape,
            pixels=session.everyone.pixels,
            data_digest=session.everyone.data_digest,
        )

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the weights; as these are many, it is computed once for all who join."""
        return fingerprint({**self.representations, **self.constants})


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
    if not isinstance(new, NewWorkers):
        raise UserError(f"{type(new).__name__} is not NewWorkers: give manyheads.NewWorkers(...).")
    if new.data is not None:
        # The run's own data are then not needed; they may be arrays that only Python can give.
        run = run.given(data=new.data)
    if not run.finished:
        raise UserError(f"the run in {run.path} is not finished: continue it with the command that began it.")
    state = run.state()
    described = run.describe_model()
    learned = Learned(
        experiment=run.experiment,
        name=str(run.path),
        rounds=state.round,
        representations=select({**state.params, **state.buffers}, REPRESENTATION),
        constants=run.constants(),
        held=run.hosted(described),
        input_shape=tuple(described["input_shape"]),
        pixels=Pixels(**described["pixels"]) if described["pixels"] else None,
        data_digest=saved_data_digest(run.path / PARTITION),
    )
    return open_join_from(learned, new, runtime)


def open_join_from(learned: Learned, new: NewWorkers, runtime: Runtime) -> Session:
    """A session in which new workers train heads on what was learned, one pass a round."""
    source, name = learned.experiment, learned.name
    if not select({**learned.representations, **learned.constants}, REPRESENTATION):
        raise UserError(f"{name} has learned no representation, since its head is the whole net: give another run.")
    # If each worker has a file of its own, new workers may bring other files, and more of them.
    same = new.data is None and may_change(source.data) and not is_site_path(source.data)
    if same and is_own_file(source.data) and not expanded(str(source.data)).exists():
        raise UserError(f"{name} was trained on {source.data}, which cannot be found from here: give --data.")
    _check_split(source, new, runtime)
    session = open_session(_experiment(learned, new), runtime, constants=learned.constants)
    if same and learned.data_digest not in (None, session.everyone.data_digest):
        raise UserError(
            f"{name} was not trained on the data that {source.data} holds now: put the old data back, or give --data."
        )
    taken, given = learned.input_shape, session.everyone.input_shape
    if given != taken:
        # A net that flattens its input would accept other shapes too, and give nonsense.
        raise UserError(
            f"samples are {list(given)}, but the nets of {name} take {list(taken)}: give --data of that shape."
        )
    _check_pixels(learned, session.everyone)
    if "head" not in session.ctx.model.groups:
        raise UserError(f"the nets of {name} have no head for new workers to train: give another run.")
    trained = counted(learned.rounds, "round")
    session.notes.append(f"Representation after {trained} of {name}: {_whose(learned.held, new.representation)}.")
    initial = merge(session.ctx.initial, _given_to(session, learned, new.representation))
    teacher = flat(replace(source, rounds=learned.rounds).describe())
    return replace(session, ctx=replace(session.ctx, initial=initial), teacher=teacher)


def _check_pixels(learned: Learned, given: Federation) -> None:
    """Refuse samples that were made of bytes in another way than those which the representation was learned on."""
    bytes_are = f"the nets of {learned.name} take bytes as {learned.pixels}"
    if given.pixels is None:
        if learned.pixels is not None and not learned.pixels.can_give(x := given.train.x):
            raise UserError(
                f"{bytes_are}, but x of {given.name} goes up to {x.abs().max():g}: give x as bytes (uint8), or as such"
                " inputs."
            )
    elif learned.pixels is None:
        raise UserError(
            f"x of {given.name} holds bytes, but the nets of {learned.name} were not trained on bytes: give x as"
            " floats like its train samples."
        )
    elif given.pixels != learned.pixels:
        raise UserError(f"{bytes_are}, those of {given.name} become {given.pixels}: give x as floats made so.")


def _whose(held: range, which: Literal["own", "mean"]) -> str:
    """Whose representation new workers take, in words; a site has only those of its own workers."""
    if len(held) == 1:
        return f"of worker {held.start}"
    if which == "mean":
        return f"the mean of {len(held)} workers"
    first = f"{held.start} + " if held.start else ""
    return f"of worker {first}i mod {len(held)}"


def _check_split(source: Experiment, new: NewWorkers, runtime: Runtime) -> None:
    """Refuse new data without users if the run's split, which the new workers inherit, is by users."""
    dealt_so = source.split == "natural" and new.split is None and new.workers > 1
    if not dealt_so or new.data is None or is_brought_by_workers(new.data):
        return
    data = new.data if isinstance(new.data, Dataset) else load(new.data, runtime.data_dir)
    if data.user_train is None:
        raise UserError(
            f"the run's workers have samples of their own (--split natural), but {data.name} does not say whose its"
            f" samples are: give --workers 1, who has them all, or deal them to {new.workers} with --split iid."
        )


def _experiment(learned: Learned, new: NewWorkers) -> Experiment:
    source = learned.experiment
    return replace(
        source,
        algorithm=Join(
            learned_by=source.algorithm.name,
            # Runs that differ only in their seed are the same teacher; a run's id says nothing about its rounds.
            teacher=f"{replace(source, seed=0).run_id}-{learned.rounds}",
            learned=learned.fingerprint,
            representation=new.representation,
            frozen=new.frozen or vars(source.algorithm).get("frozen", Join.frozen),
        ),
        data=source.data if new.data is None else new.data,
        workers=new.workers,
        split=new.split or (None if new.data is not None and is_brought_by_workers(new.data) else source.split),
        seed=source.seed if new.seed is None else new.seed,
        rounds=new.head_epochs,
        head_lr=source.head_lr if new.head_lr is None else new.head_lr,
        # Double precision is kept; the other formats are left to the device.
        precision="float64" if source.precision == "float64" else None,
        # A few passes are too short for falling rates and for absent workers.
        decay=1.0,
        schedule="decay",
        worker_failure=0.0,
    )


def _given_to(session: Session, learned: Learned, which: Literal["own", "mean"]) -> Params:
    """The representation of each new worker, [W, ...]."""
    initial, leaves = session.ctx.initial, learned.representations
    wanted = select({**initial.params, **initial.buffers}, REPRESENTATION)
    if row_forms(wanted) != row_forms(leaves):
        data = session.everyone.name
        raise UserError(
            f"the representation of {learned.name} does not fit the samples of {data}: give its own --data."
        )
    ids = torch.tensor(session.ctx.ids)
    if which == "own":
        rows = {name: leaf[ids % len(leaf)] for name, leaf in leaves.items()}
    else:
        rows = repeat({name: _mean(leaf) for name, leaf in leaves.items()}, len(ids))
    return session.ctx.engine.place(rows)


def _mean(leaf: Tensor) -> Tensor:
    """The mean over workers. Counters of batches, the only leaves that are not floats, are not averaged."""
    return leaf.double().mean(0).to(leaf.dtype) if leaf.is_floating_point() else leaf[0]
