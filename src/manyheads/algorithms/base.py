"""What an algorithm is, and what it may use: its state, its context, and the few moves that algorithms share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from manyheads.checks import normalise_fields, shown
from manyheads.engine.batches import Source, num_batches
from manyheads.engine.phase import SGD, Engine, Epochs, Objective, Phase, Steps
from manyheads.errors import UserError, unknown
from manyheads.models.split import Split
from manyheads.network.base import Network
from manyheads.randomness import generator
from manyheads.tree import Buffers, Params, group, select
from manyheads.units import some


@dataclass(frozen=True)
class Work:
    """What one local phase was like for the hosted workers."""

    loss: Tensor
    """Mean loss over the samples each worker saw, [W]; NaN where it saw none, infinite where it is no number."""
    steps: Tensor
    """Mini-batches each worker trained on, [W] int64."""
    share: float = 1.0
    """The part of a whole net's training step that each of them takes, for the simulated clock."""


FORWARD = 1 / 3
"""The part of a training step that its forward pass takes: little more is left while the representation is frozen."""

Log = dict[str, Work]
"""The local phases of a round by name, in the order they ran."""


@dataclass(frozen=True)
class State:
    """Everything a run must keep from one round to the next, stacked over workers."""

    params: Params
    buffers: Buffers


Exchange = Literal["graph", "server", "none"]


@dataclass(frozen=True)
class Rates:
    """The optimiser of every phase and how its rates change over rounds."""

    lr: float
    head_lr: float
    momentum: float
    weight_decay: float
    clip: float | None
    decay: float

    def sgd(self, round: int, *, head: bool = False) -> SGD:
        """The optimiser in a round: its rate is ``lr * decay**round``."""
        rate = (self.head_lr if head else self.lr) * self.decay**round
        return SGD(rate, self.momentum, self.weight_decay, self.clip)


@dataclass(frozen=True)
class Context:
    """What an algorithm may use; it never learns how many processes, which device or which engine run it."""

    engine: Engine
    network: Network
    exchange: Exchange
    """The algorithm's own: with whom its workers exchange anything."""
    model: Split
    rates: Rates
    objective: Objective
    class_counts: Tensor | None
    """Train samples per class as each hosted worker names them, [W, C]; None for regression."""
    sizes: np.ndarray
    """Train samples of every worker, [N]."""
    ids: tuple[int, ...]
    """Ids of the hosted workers."""
    source: Source
    """How mini-batches are cut out of a worker's samples."""
    rounds: int
    seed: int
    initial: State
    """Every worker's first weights, equal for all."""
    random_heads: Callable[[], Params]
    """Draws a different first head for each worker."""
    share_statistics: bool
    """Whether BatchNorm statistics are mixed with the representation."""

    def present(self, round: int) -> Tensor | None:
        """Rows of the hosted workers that take part in a round on the graph; None: all of them."""
        return self.rows(self.network.present(round))

    def participants(self, round: int, fraction: float) -> np.ndarray:
        """Who takes part in a server round, [N] bool: at least one of those present, drawn anew each round."""
        # Halves upwards, where round() would go to the even number.
        count = max(1, int(fraction * self.network.num_workers + 0.5))
        order = generator(self.seed, "participation", round=round).permutation(self.network.num_workers)
        present = self.network.present(round)
        chosen = np.zeros(self.network.num_workers, dtype=bool)
        chosen[order[present[order]][:count]] = True
        return chosen

    def rows(self, taking_part: np.ndarray) -> Tensor | None:
        """The hosted rows among some workers [N] bool; None: all of them."""
        here = taking_part[list(self.ids)]
        return None if here.all() else torch.from_numpy(np.flatnonzero(here))

    def steps(self, amount: Epochs | Steps, rows: Tensor | None) -> Tensor:
        """Mini-batches each hosted worker trains on in a phase that ``rows`` (None: all) take part in, [W] int64."""
        steps = torch.tensor([num_batches(int(self.sizes[worker]), amount, self.source) for worker in self.ids])
        return steps if rows is None else torch.zeros_like(steps).index_copy(0, rows, steps[rows])

    def statistics(self, state: State, groups: Iterable[str]) -> Buffers:
        """The BatchNorm statistics that travel with some groups; counters and masks never do."""
        if not self.share_statistics:
            return {}
        return {name: leaf for name, leaf in select(state.buffers, groups).items() if name in self._statistics}

    @cached_property
    def _statistics(self) -> frozenset[str]:
        # A buffer that never changes, such as an encoding of positions, is the same for all. One that holds infinities
        # is a mask, which the products on a GPU would turn into NaN.
        moving = {name: leaf for name, leaf in self.initial.buffers.items() if name in self.model.moving}
        return frozenset(n for n, leaf in moving.items() if leaf.is_floating_point() and leaf[:1].isfinite().all())

    def mix(self, state: State, groups: Iterable[str], round: int) -> State:
        """Average some groups, and the statistics that travel with them, with the neighbours."""
        if self.exchange != "graph":
            # The network does have a graph, a ring that only says who is present: nobody has asked to mix over it.
            raise UserError(
                f"mix: the algorithm's exchange is '{self.exchange}', so there are no neighbours: write exchange:"
                " ClassVar[str] = 'graph' in its class, or average over a server."
            )
        sent = self._sent(state, groups)
        return merge(state, self.network.mix(sent, round)) if sent else state

    def average(self, state: State, groups: Iterable[str], weights: np.ndarray) -> State:
        """Average some groups, and the statistics that travel with them, over all workers by their weights [N]."""
        weights = np.asarray(weights)
        if weights.shape != (self.network.num_workers,) or not (weights >= 0).all() or not 0 < weights.sum() < np.inf:
            given = some([*map(str, weights.flatten().tolist())])
            raise UserError(
                f"average: weights [{given}] do not fit {self.network.num_workers} workers: give each of"
                " them a number of at least 0, and at least one a number above 0."
            )
        sent = self._sent(state, groups)
        return merge(state, self.network.average(sent, weights)) if sent else state

    def _sent(self, state: State, groups: Iterable[str]) -> Params:
        """The leaves of some groups that are sent; none if the groups are empty, as when the whole net is its head."""
        groups = self.known(groups, state)
        return {**select(state.params, groups), **self.statistics(state, groups)}

    def known(self, groups: Iterable[str], state: State, what: str = "group") -> frozenset[str]:
        """Check that groups are the net's or the state's: a misspelt one would be empty, and go unnoticed."""
        there = {*self.model_groups, *map(group, state.params)}
        named = frozenset([groups] if isinstance(groups, str) else groups)
        for name in sorted(named - there):
            raise unknown(what, name, there)
        return named

    @property
    def model_groups(self) -> frozenset[str]:
        """The groups that a net's parameters can be in, empty or not."""
        return frozenset({"representation", *self.model.head_names})

    def missing(self, state: State) -> set[str]:
        """Groups of the net that a state lacks, as when it holds only copies of the net under other names."""
        return set(self.model.groups).difference(map(group, state.params))

    def mean_model(self, state: State) -> State:
        """The mean of all workers' models in every row: for scores, not for training."""
        buffers = {name: leaf for name, leaf in state.buffers.items() if name in self._statistics}
        means = self.network.mean({**state.params, **buffers})
        rows = {name: means[name].to(leaf.dtype).expand_as(leaf) for name, leaf in {**state.params, **buffers}.items()}
        return merge(state, rows)


class Algorithm(ABC):
    """A frozen dataclass whose fields are the hyper-parameters. A round is ``local`` and ``mix``, in its ``order``.

    The ``round`` that they are given counts from 0, so that the first rates are ``lr * decay**0``; records, files and
    messages count from 1, because they describe finished rounds. What most algorithms have in common is here; each adds
    the rest.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    """Its options. Every algorithm is a dataclass; this base, which has no options, is not."""
    name: ClassVar[str] = ""
    """What commands and folders call it: each has its own, of lower-case letters, digits, ``-``, ``_`` and ``.``."""
    title: ClassVar[str] = ""
    """What people call it: each has its own, as only this tells two rows of a table apart."""
    private: ClassVar[frozenset[str]] = frozenset()
    """Groups that never leave their worker."""
    exchange: ClassVar[Exchange] = "graph"
    """With whom a worker exchanges anything: its neighbours, a parameter server, or nobody."""
    row_stochastic: ClassVar[bool] = False
    """Whether it can use a P whose rows sum to 1 but whose columns need not."""
    uses_rounds: ClassVar[bool] = False
    """Whether a schedule of its own depends on the number of rounds, which is then part of the run id."""
    provenance: ClassVar[frozenset[str]] = frozenset()
    """Options that follow from the run it builds on, and so differ with every seed: runs are compared without them."""
    stream: ClassVar[str] = ""
    """A word that keeps its random numbers apart from those of other runs with the same seed; empty: none is needed."""
    num_models: ClassVar[int] = 1
    """Models that a worker trains in a round, one after the other."""
    extra_rows: ClassVar[float] = 0.0
    """What a worker's state holds besides its net (masks, a second model), in nets: for the memory plan."""

    # Fixed for most algorithms, options of some.
    order: Literal["train-mix", "mix-train"] = "train-mix"
    """Whether a round trains and then mixes, or mixes first."""
    evaluate: Literal["own", "mean-model"] = "own"
    """Whose model a worker is scored with: its own, or the mean of all, which needs all models in one place."""

    def __post_init__(self) -> None:
        """Convert and check its options; an algorithm's own checks come after this, and may rely on the types."""
        normalise_fields(self)

    @property
    def uses_sizes(self) -> bool:
        """Whether it needs every worker's number of samples, which is then shared even where data stay at sites."""
        return self.exchange == "server"

    @property
    def head_passes(self) -> int:
        """Passes, or mini-batch steps, that move heads by themselves in a round: the tau of Corollary 1's rates."""
        return 0

    def prepare(self, model: Split) -> Split:
        """The net it trains, made out of the one the user chose; one that it cannot train is refused here."""
        return model

    def init(self, ctx: Context) -> State:
        """The state that a run begins with: all that a worker has, every leaf [W, ...]."""
        return ctx.initial

    def rows(self, round: int, ctx: Context) -> Tensor | None:
        """Rows of the hosted workers that take part in a round; None: all of them."""
        return ctx.present(round)

    @abstractmethod
    def local(self, state: State, round: int, ctx: Context) -> tuple[State, Log]:
        """What every worker does by itself: the state after it, and what its phases were like."""

    @abstractmethod
    def mix(self, state: State, round: int, ctx: Context) -> State:
        """What workers do together: the state after they have averaged what they share."""

    def models(self, state: State, ctx: Context) -> State:
        """What each worker would deploy."""
        return state


def merge(state: State, new: Params) -> State:
    """The state with some leaves replaced, parameters and statistics alike."""
    params = {name: new.get(name, leaf) for name, leaf in state.params.items()}
    buffers = {name: new.get(name, leaf) for name, leaf in state.buffers.items()}
    return State(params, buffers)


def check_share(option: str, value: float, *, zero: bool = False) -> None:
    """Refuse a share outside (0, 1], or [0, 1] where none at all makes sense."""
    if not 0 <= value <= 1 or (value == 0 and not zero):
        raise UserError(f"--{option} {value} is outside {'[' if zero else '('}0, 1]: give a fraction within it.")


def epochs_by_steps(options: Iterable[str]) -> dict[str, str]:
    """Each option that counts mini-batch steps -> the one that counts passes, which it replaces when it is given."""
    names = list(options)
    pairs = {name: name.removesuffix("steps") + "epochs" for name in names if name.endswith("steps")}
    return {steps: epochs for steps, epochs in pairs.items() if epochs in names}


def amount(epochs: int, steps: int | None) -> Epochs | Steps:
    """Epochs, unless a number of mini-batch steps is given."""
    return Epochs(epochs) if steps is None else Steps(steps)


def run_phases(
    state: State, phases: Iterable[Phase], round: int, ctx: Context, rows: Tensor | None
) -> tuple[State, Log]:
    """Run phases one after another: the state after them and what each was like. Empty phases are skipped.

    ``rows``: those of the hosted workers who train; None: all, if nobody is absent from the round.
    """
    log: Log = {}
    owned = {group(name) for name in state.params}
    if not (rows is None or (isinstance(rows, Tensor) and rows.dtype == torch.int64)):
        # A boolean mask would be taken for the rows 0 and 1.
        raise UserError(f"rows {shown(rows)} are not row numbers: give what ctx.present(round) returns.")
    if (present := ctx.present(round)) is not None:
        asked = range(len(ctx.ids)) if rows is None else rows.tolist()
        for row in sorted(set(asked).difference(present.tolist())):
            raise UserError(
                f"rows {shown(rows)} take in row {row}, whose worker is absent from round {round + 1}: give what"
                " ctx.present(round) returns."
            )
    for phase in phases:
        # A phase on a copy of the net, in a group of its own, would move nothing, and that would go unnoticed.
        for name in sorted(ctx.known(phase.update, state) - ctx.model_groups):
            raise UserError(
                f"a phase trains groups of the net ({', '.join(sorted(ctx.model_groups))}), and '{name}' is not one"
                f" of them: give run_phases the copy of the net in '{name}' as a state, with the params"
                f" strip_prefix(params, '{name}')."
            )
        if not phase.update & owned or phase.amount.count == 0:
            continue
        phase.check_rows(state.params, len(ctx.ids))
        name = phase.name or phase.stream
        if name in log:
            # It would replace the other in the log, whose work and loss would then not count.
            raise UserError(f"two phases of a round are called '{name}': give each its own name, Phase(name=...).")
        fit = ctx.engine.fit(state.params, state.buffers, phase, round, workers=rows)
        state = State(fit.params, fit.buffers)
        still = "representation" in owned - phase.update
        log[name] = Work(fit.loss, ctx.steps(phase.amount, rows), FORWARD if still else 1.0)
    return state, log
