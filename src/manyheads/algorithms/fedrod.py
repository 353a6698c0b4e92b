"""FedRoD: a generic head trained for balanced classes, and a personal head that adds to it.

The net has a representation phi, a generic head g and a personal head h_i. A round: the server sends phi and g; each
worker that takes part makes ``epochs`` passes in which every mini-batch moves

1. phi and g by the balanced softmax loss CE(g(phi(x)) + log n_i, y), n_i its own class counts;
2. h_i by CE(g(phi(x)) + h_i(phi(x)), y), through which no gradient reaches phi or g.

The server averages phi and g. Each worker is scored with the sum of both heads.

Sent: phi and g up and down, by those who take part. h_i never leaves its worker.

Reference: Chen, Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022
(the linear version). Differences: h_i starts at zero, so that the first personal scores are the generic ones; classes
that a worker does not have are masked out instead of log 0.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyheads.algorithms.base import Context, Log, State, amount, merge, run_phases
from manyheads.algorithms.phases import HEAD, REPRESENTATION, WHOLE
from manyheads.algorithms.server import ServerAlgorithm
from manyheads.engine.phase import Phase, cross_entropy
from manyheads.errors import UserError
from manyheads.models.split import Split
from manyheads.tree import Params, select

GENERIC = "generic"
_ABSENT = -1e4
"""Stands for log 0: nothing is left of it after a softmax in any precision."""


@dataclass(frozen=True, kw_only=True)
class FedRoD(ServerAlgorithm):
    epochs: int = 3
    """Passes over the local samples."""
    steps: int | None = None
    """Mini-batch steps, instead of passes."""

    name: ClassVar[str] = "fedrod"
    title: ClassVar[str] = "FedRoD"
    private: ClassVar[frozenset[str]] = HEAD

    def prepare(self, model: Split) -> Split:
        if not any(weight.requires_grad and weight.ndim > 1 for weight in model.get_submodule("head").parameters()):
            raise UserError(
                "fedrod adds a second head to the first, but this net's head has no weights to train: give another"
                " --head."
            )
        return model.with_head(GENERIC, detach=HEAD)

    def init(self, ctx: Context) -> State:
        heads = select(ctx.initial.params, HEAD)
        layers = [name.rpartition(".")[0] for name, leaf in heads.items() if leaf.ndim > 2]
        # Only the last layer: a head that is zero throughout would never move.
        last = {name: leaf for name, leaf in heads.items() if name.startswith(f"{layers[-1]}.")}
        return merge(ctx.initial, {name: torch.zeros_like(leaf) for name, leaf in last.items()})

    def local(self, state: State, round: int, ctx: Context) -> tuple[State, Log]:
        assert ctx.class_counts is not None
        counts = ctx.class_counts
        log_counts = torch.where(counts > 0, counts.clamp(min=1).log(), torch.full_like(counts, _ABSENT))
        phase = Phase(
            "body",
            WHOLE | {GENERIC},
            amount(self.epochs, self.steps),
            ctx.rates.sgd(round),
            two_losses,
            constants={"log_counts": log_counts},
        )
        return run_phases(state, [phase], round, ctx, self.rows(round, ctx))

    def mix(self, state: State, round: int, ctx: Context) -> State:
        return self.average(state, REPRESENTATION | {GENERIC}, round, ctx)


def two_losses(outputs: dict[str, Tensor], y: Tensor, constants: Params) -> Tensor:
    """Balanced softmax for the generic scores plus cross entropy for the summed ones, [samples]."""
    generic, log_counts = outputs[GENERIC], constants["log_counts"]
    # A net may give more scores than there are classes; nobody has samples of the others.
    balanced = cross_entropy(generic[:, : log_counts.shape[1]] + log_counts, y)
    return balanced + cross_entropy(generic.detach() + outputs["head"], y)
