"""What is measured about a round: every field of its record; a loss that is not finite ends the run."""

import resource
import sys
from collections.abc import Collection, Mapping, Sequence
from math import isfinite, nan
from typing import Literal

import torch
from torch import Tensor

from manyheads.algorithms.base import Log, State
from manyheads.algorithms.phases import WHOLE
from manyheads.checkpoint import latest_round
from manyheads.data.shards import Shards
from manyheads.engine.phase import SGD, Epochs, Phase
from manyheads.errors import Diverged
from manyheads.metrics.accuracy import by_samples, summarise
from manyheads.metrics.similarity import mean_cosines
from manyheads.metrics.spread import consensus
from manyheads.record import Record
from manyheads.session import Session
from manyheads.store.layout import CHECKPOINT
from manyheads.tree import flatten

Values = dict[str, float | None]
"""Fields of a record by name."""
PerWorker = dict[str, list[float | None]]
"""The values of every worker by name; None for a worker without samples."""

_LARGE_INPUT = 1e6
"""Inputs above this are a likelier cause of divergence than the rates."""


def checked_loss(log: Log, entered: State, round: int, session: Session) -> float:
    """The mean loss of the last phase; a loss that is not finite ends the run. ``entered``: what was trained from."""
    if not log:
        return float("nan")
    together = session.ctx.network.gather(torch.stack([work.loss for work in log.values()], dim=1)).T.contiguous()
    # NaN means that the worker saw no sample. Losses that are not a number come as infinity.
    seen = together.masked_fill(together.isnan(), 0.0).tolist()
    check_finite(
        {f"phase '{phase}'": losses for phase, losses in zip(log, seen, strict=True)}, log, round, session, entered
    )
    return float(together[-1].nanmean())


def check_finite(
    losses: Mapping[str, Sequence[float | None]], log: Log, round: int, session: Session, entered: State | None = None
) -> None:
    """End the run if a worker's loss is not finite, before anything of the round is kept.

    ``losses``: of all workers, by where they were measured. ``entered``: the state they trained from, if still at hand.
    """
    for where, values in losses.items():
        for worker, value in enumerate(values):
            if value is not None and not isfinite(value):
                what = f"the loss of worker {worker} is not a number in round {round + 1}, {where}"
                advice = _rates_advice(log, session)
                if entered is not None and not _all_finite(entered, session)[worker]:
                    # Too high rates may still be the cause: evaluation does not see everything that is trained.
                    what += ", and its weights were not finite before it trained"
                    advice = f"look at what init and mix of {session.experiment.algorithm.name} give, or {advice}"
                elif entered is not None and round == 0 and not _finite_at_rate_0(worker, entered, session):
                    what += ", and would be none with a learning rate of 0 either"
                    advice = "look for what gives NaN or infinity in the net's forward, its gradient or the loss"
                raise Diverged(f"{what}: {_scaled(advice, session)}.")


def _all_finite(state: State, session: Session) -> list[bool]:
    """For every worker, whether all its weights are finite."""
    rows = [flatten(leaf).isfinite().all(1) for leaf in state.params.values()]
    return session.ctx.network.gather(torch.stack(rows).all(0).double().cpu()).bool().tolist()


def _finite_at_rate_0(worker: int, entered: State, session: Session) -> bool:
    """Whether a pass at a learning rate of 0 leaves a worker's loss and weights finite: 0 times NaN is NaN."""
    ctx, hosted = session.ctx, session.ctx.network.workers
    finite = torch.ones(len(hosted), dtype=torch.float64)
    if worker in hosted:
        row = hosted.index(worker)
        net = session.experiment.algorithm.models(entered, ctx)
        phase = Phase("rate 0", WHOLE, Epochs(1), SGD(0.0), ctx.objective)
        fit = ctx.engine.fit(net.params, net.buffers, phase, 0, workers=torch.tensor([row]))
        leaves = [fit.loss[row], *(leaf[row] for leaf in fit.params.values())]
        finite[row] = all(bool(leaf.isfinite().all()) for leaf in leaves)
    return bool(ctx.network.gather(finite)[worker])


def _rates_advice(phases: Collection[str], session: Session) -> str:
    """What to do about rates that are too large."""
    rates = session.ctx.rates
    if session.experiment.schedule == "corollary":
        advice = f"give more --rounds, which lower the corollary's rates (now {rates.lr:g} and {rates.head_lr:g})"
    else:
        # All phases are named, as a loss may diverge in one because the phase before it went wrong.
        heads = {phase == "head" for phase in phases} or {False}
        used = {"--head-lr" if head else "--lr": rates.sgd(0, head=head).lr for head in sorted(heads, reverse=True)}
        advice = f"train with a lower {' or '.join(used)} (now {' and '.join(f'{rate:g}' for rate in used.values())})"
    return f"{advice}, or a {'lower ' if rates.clip else ''}--clip"


def _scaled(advice: str, session: Session) -> str:
    """The same after what to do about inputs that are too large; and which checkpoint is left."""
    largest = float(torch.linalg.vector_norm(session.federation.train.x, torch.inf))
    if largest > _LARGE_INPUT:
        advice = f"scale x, which goes up to {largest:.2g} in size, to about 1, or {advice}"
    out = session.runtime.out
    kept = 0 if out is None else latest_round(session.folder(out) / CHECKPOINT)
    return f"{advice}; the checkpoint of round {kept} is kept" if kept else advice


def measure(session: Session, before: State, trained: State, mixed: State, end: State) -> tuple[Values, PerWorker]:
    """Every number of a record that comes from a state, and the values of each worker.

    ``before`` and ``mixed``: the states that mixing took and gave; ``trained``: what local training gave; ``end``: the
    last of the round, which is ``mixed`` or, with order mix-train, ``trained``.
    """
    ctx, federation = session.ctx, session.federation
    values: Values = {
        "accuracy_validation": None,
        "consensus_error": nan,
        "consensus_error_relative": nan,
        "consensus_error_before_mixing": nan,
    }
    if ctx.network.may_gather_private:
        if not ctx.missing(end):
            apart = consensus(mixed.params, ctx.network)
            values["consensus_error"], values["consensus_error_relative"] = apart.variance, apart.relative
            values["consensus_error_before_mixing"] = consensus(before.params, ctx.network).variance
        if session.processes.count == 1:
            # Heads never go through the network. With several processes they are compared at the end, on disk.
            values |= mean_cosines(session.experiment.algorithm.models(end, ctx).params)

    def score(state: State, shards: Shards, wanted: Literal["metric", "loss"]) -> tuple[Tensor, Tensor]:
        models = session.experiment.algorithm.models(state, ctx)
        own = getattr(ctx.engine.evaluate(models.params, models.buffers, shards), wanted)
        # In one message, and nothing that is not wanted: others need not know how many samples a worker has.
        here = torch.stack([each.double().cpu() for each in (own, torch.tensor(shards.sizes) > 0)], dim=1)
        found, tested = ctx.network.gather(here).unbind(1)
        return found, tested > 0

    accuracy = score(end, federation.test, "metric")
    scores = {
        # Where nothing is exchanged the two are the same state.
        "accuracy_before_mixing": accuracy if before is end else score(before, federation.test, "metric"),
        "train_loss": score(trained, federation.train, "loss"),
    }
    if session.experiment.validation > 0:
        scores["accuracy_validation"] = score(end, federation.validation, "metric")
    values["accuracy_mean"], values["accuracy_std"], values["accuracy_worst10"] = summarise(*accuracy)
    scored, tested = accuracy
    if ctx.network.may_gather_private:
        counts = ctx.network.gather(torch.tensor(federation.test.sizes))
        values["accuracy_by_samples"] = by_samples(scored, counts)
    values["workers_without_test"] = int((~tested).sum())
    values |= {name: summarise(*found)[0] for name, found in scores.items()}
    return values, {name: _listed(*found) for name, found in {"accuracy": accuracy, **scores}.items()}


def make_record(session: Session, round: int, values: Values, per_worker: PerWorker) -> Record:
    """The record of a round (counted from 1): what was measured, and what the run has sent and held so far."""
    network = session.ctx.network
    # A site that is away counts as NaN, not as 0: nobody here knows what it has sent.
    sent, received = network.gather(network.traffic.table().double()).nanmean(0).tolist()
    return Record(
        round=round,
        algorithm=session.experiment.algorithm.name,
        run_id=session.experiment.run_id,
        majority_floor=session.majority_floor,
        bytes_sent_per_worker=sent,
        bytes_received_per_worker=received,
        bytes_on_wire=session.processes.total(network.traffic.on_wire),
        peak_memory_bytes=peak_memory(session.device),
        per_worker=per_worker,
        **values,  # pyright: ignore[reportArgumentType]
    )


def _listed(values: Tensor, there: Tensor) -> list[float | None]:
    """Values [N], with None for the workers without samples, where ``there`` [N] is False."""
    return [value if has else None for value, has in zip(values.tolist(), there.tolist(), strict=True)]


def peak_memory(device: torch.device) -> int:
    """The most memory this process has held, in bytes: on the GPU if it trains there, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
