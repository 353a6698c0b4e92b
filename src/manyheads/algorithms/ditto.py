"""Ditto: a global model by FedAvg, and beside it a personal model that is pulled towards it.

A round: the server sends w; each worker that takes part

1. moves a copy of w for ``epochs`` passes over its own samples, as in FedAvg;
2. moves its personal model v_i for ``epochs`` passes on F_i(v) + (lam / 2) |v - w|^2, w as it was received.

The server averages the copies. Each worker is scored with v_i.

Sent: w up and down, by those who take part. v_i never leaves its worker.

Reference: Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021. Differences:
passes instead of two steps; the two models train one after the other, on batches in the same order. As in the
official code the personal phase has neither momentum nor clip, and the pull is on parameters alone, not on BatchNorm
statistics.
"""

from dataclasses import dataclass
from typing import ClassVar

from manyheads.algorithms.base import Context, Log, State, amount, run_phases
from manyheads.algorithms.phases import WHOLE, train_whole
from manyheads.algorithms.server import ServerAlgorithm
from manyheads.engine.phase import SGD, Phase
from manyheads.tree import add_prefix, select, strip_prefix

PERSONAL = "personal"


@dataclass(frozen=True, kw_only=True)
class Ditto(ServerAlgorithm):
    lam: float = 1.0
    """Strength of the pull towards the received global model."""
    epochs: int = 3
    """Passes over the local samples, for each of the two models."""
    steps: int | None = None
    """Mini-batch steps, instead of passes."""

    name: ClassVar[str] = "ditto"
    title: ClassVar[str] = "Ditto"
    private: ClassVar[frozenset[str]] = frozenset({PERSONAL})
    num_models: ClassVar[int] = 2
    extra_rows: ClassVar[float] = 1.0

    def init(self, ctx: Context) -> State:
        params, buffers = ctx.initial.params, ctx.initial.buffers
        return State({**params, **add_prefix(params, PERSONAL)}, {**buffers, **add_prefix(buffers, PERSONAL)})

    def local(self, state: State, round: int, ctx: Context) -> tuple[State, Log]:
        rows, passes = self.rows(round, ctx), amount(self.epochs, self.steps)
        received = State(select(state.params, WHOLE), select(state.buffers, WHOLE))
        shared, log = train_whole(received, round, ctx, passes, rows)
        rates = ctx.rates.sgd(round)
        phase = Phase(
            "body",
            WHOLE,
            passes,
            SGD(rates.lr, weight_decay=rates.weight_decay),
            ctx.objective,
            proximal=(received.params, self.lam),
            name=PERSONAL,
        )
        personal, more = run_phases(self.models(state, ctx), [phase], round, ctx, rows)
        return State(
            {**shared.params, **add_prefix(personal.params, PERSONAL)},
            {**shared.buffers, **add_prefix(personal.buffers, PERSONAL)},
        ), {**log, **more}

    def mix(self, state: State, round: int, ctx: Context) -> State:
        return self.average(state, WHOLE, round, ctx)

    def models(self, state: State, ctx: Context) -> State:
        return State(strip_prefix(state.params, PERSONAL), strip_prefix(state.buffers, PERSONAL))
