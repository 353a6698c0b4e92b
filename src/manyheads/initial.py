"""The weights that a run begins with: functions of the seed, the same for every algorithm."""

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from manyheads.algorithms.base import State
from manyheads.data import Federation
from manyheads.engine.phase import Engine
from manyheads.errors import UserError
from manyheads.experiment import Experiment
from manyheads.files import DTYPES
from manyheads.models.split import Split, constants_of, drawn_layers, hold_still, statistics
from manyheads.randomness import every_seed, key
from manyheads.tree import Params, forms, stack


def num_outputs(federation: Federation) -> int:
    """Outputs the net needs: one per class, or one per number of a regression target."""
    if federation.num_classes is not None:
        return federation.num_classes
    y = federation.train.y
    return 1 if y.ndim == 1 else y.shape[1]


def few_of(values: Tensor, count: int = 4) -> Tensor:
    """Some samples or targets to try things on, [count, ...], evenly spaced over all of them."""
    return values[torch.linspace(0, len(values) - 1, count, dtype=torch.float64).round().long()]


def initial_model(experiment: Experiment, federation: Federation) -> Split:
    """The net with its first weights, a function of the seed, in the experiment's precision."""
    if 0 in federation.input_shape:
        raise UserError(f"samples of shape {list(federation.input_shape)} hold no numbers: give x with features.")
    seed, example = key(experiment.root, "weights"), few_of(federation.train.x)
    model = experiment.build_net(federation.input_shape, num_outputs(federation), seed=seed, example=example)
    hold_still(model)
    for name, leaf in {**model.state_dict(), **constants_of(model)}.items():
        if leaf.dtype not in DTYPES:
            raise UserError(
                f"the model's {name} is {leaf.dtype}, which a checkpoint cannot hold: give it another type, or, if"
                " every net makes this buffer for itself, persistent=False."
            )
    # A user's module may be on a GPU. It belongs where the samples are, until an engine moves both.
    return model.cpu()


def take_constants(model: Split, constants: Mapping[str, Tensor]) -> None:
    """Replace the weights that no worker trains by those of a run."""
    if forms(constants_of(model)) != forms(constants):
        raise UserError(
            "the run's weights with requires_grad=False do not fit this model and data: give those of the run."
        )
    for name, leaf in constants.items():
        model.get_buffer(name).copy_(leaf)


def first_state(model: Split, num_workers: int, engine: Engine) -> State:
    """The same weights for every worker, in the memory of one: states are never written into."""
    # Contiguous, as a checkpoint restores them: another layout could give other last bits until the run is continued.
    plain = torch.contiguous_format
    params = {name: p.detach().clone(memory_format=plain) for name, p in model.named_parameters()}
    buffers = {name: b.clone(memory_format=plain) for name, b in statistics(model).items()}

    def everyone(leaves: Params) -> Params:
        return {name: leaf.expand(num_workers, *leaf.shape) for name, leaf in engine.place(leaves).items()}

    return State(everyone(params), everyone(buffers))


def random_heads(model: Split, seed: int, ids: tuple[int, ...]) -> Params:
    """A head of its own for each worker."""

    def draw(worker: int) -> Params:
        head = copy.deepcopy(model.get_submodule("head"))
        with every_seed(key(seed, "heads", worker=worker)):
            for layer in drawn_layers(head):
                cast(Any, layer).reset_parameters()
        return {f"head.{name}": p.detach() for name, p in head.named_parameters()}

    return stack(draw(worker) for worker in ids)
