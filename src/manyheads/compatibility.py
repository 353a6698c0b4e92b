"""Whether net, data, measurements and the user's own functions fit together, checked before anything is trained."""

import copy
import warnings

import torch
from torch import Tensor, nn

from manyheads.algorithms.base import Algorithm, Context, State
from manyheads.data import Federation
from manyheads.engine.phase import Loss, cross_entropy
from manyheads.engine.workload import Transform
from manyheads.errors import UserError, user_code
from manyheads.experiment import Experiment, Runtime
from manyheads.initial import few_of
from manyheads.models.norm import has_batchnorm
from manyheads.models.split import Split
from manyheads.randomness import every_seed, generator, torch_seed
from manyheads.tree import group
from manyheads.units import counted

_DRAWS = 8
"""How often a transform is tried: enough to catch one that flips a coin without its generator."""


def check_training(experiment: Experiment, model: Split, federation: Federation) -> list[str]:
    """Refuse a net, data and functions that do not fit together; returns what to say of those that do."""
    _check_head(experiment, model)
    check_batch_size(experiment, model)
    loss = experiment.own("loss")
    if federation.num_classes is None and loss is None:
        raise UserError(
            "the targets are floats, not classes: give whole numbers, or a --loss (and a --metric) of your own."
        )
    if loss is not None and model.head_names != ("head",):
        raise UserError(
            f"{experiment.algorithm.name} trains two heads with its own losses, which are for classes: leave your"
            " loss out, or choose another algorithm."
        )
    x, y = few_of(federation.train.x, 3).to(experiment.dtype), few_of(federation.train.y, 3)
    y = y.to(experiment.dtype) if y.is_floating_point() else y
    net, notes = copy.deepcopy(model).eval(), []
    looked_up = _lookups(net)
    with torch.no_grad(), user_code("the model"):
        # A copy: a net may change its inputs in place.
        output = net(x.clone())
    if federation.pixels is not None:
        _check_lookups(looked_up)
    if loss is None:
        _check_scores(output, federation)
        notes = _note_spare_scores(output, federation)
    for name, function in (("loss", loss), ("metric", experiment.own("metric"))):
        if function is not None:
            _check_per_sample(name, function, output, y)
    _check_gradients(loss or cross_entropy, net, x, y)
    if (transform := experiment.own("transform")) is not None:
        _check_transform(transform, experiment, federation)
    return notes


def check_batch_size(experiment: Experiment, model: Split) -> None:
    """Refuse mini-batches of one sample for a net that cannot be trained on them."""
    if has_batchnorm(model) and experiment.batch_size == 1:
        raise UserError("--batch-size 1 with BatchNorm would skip every batch: give at least 2, or --norm group.")


def note_lone_samples(model: Split, federation: Federation, *, everybody: bool) -> list[str]:
    """What to say of workers whose only batch is one sample, which BatchNorm cannot be trained on.

    Refused if nobody could train; ``everybody``: these are all workers, and not those of one site.
    """
    lone = sum(size == 1 for size in federation.train.sizes)
    if not lone or not has_batchnorm(model):
        return []
    if everybody and lone == len(federation.ids):
        raise UserError(
            "every worker has one train sample, and BatchNorm needs two: give fewer --workers, or --norm group."
        )
    return [
        f"{counted(lone, 'worker')} with one train sample will not train: BatchNorm needs two, --norm group does not."
    ]


def shares_nothing(algorithm: Algorithm, model: Split) -> bool:
    """Whether the algorithm exchanges something, but all that this net trains is private to it."""
    return algorithm.exchange != "none" and algorithm.private.issuperset(model.groups)


def check_theory(runtime: Runtime, model: Split, *, in_sites: bool = False) -> None:
    """Refuse to measure M(k) where it is not defined, or where that would show what is private."""
    if runtime.theory_every and model.head_names != ("head",):
        raise UserError("--theory-every needs a net with one head, but this algorithm's has two: leave it out.")
    if runtime.theory_every and in_sites:
        raise UserError("--theory-every compares the gradients of heads, which stay at their sites: leave it out.")


def check_theory_state(runtime: Runtime, ctx: Context, state: State) -> None:
    """Refuse to measure M(k) of a state without the net that it is a measure of: it would be 0."""
    if runtime.theory_every and ctx.missing(state):
        lacks = " and ".join(sorted(ctx.missing(state)))
        raise UserError(
            f"--theory-every needs the net in the state, but this algorithm's has no {lacks}: leave it out."
        )


def _check_head(experiment: Experiment, model: Split) -> None:
    """Refuse a head that leaves nothing to share, unless it is asked for."""
    held = any(name.startswith("representation.") for name in model.constants)
    if experiment.head == "all" or held or not shares_nothing(experiment.algorithm, model):
        return
    layers = model.get_submodule("head").named_modules()
    later = [model.head_prefix + name for name, layer in layers if name and list(layer.parameters(recurse=False))][1:]
    hint = f"a later layer as --head ({', '.join(later[-5:])})" if later else "a net with more layers"
    raise UserError(
        f"the head is the whole net, so {experiment.algorithm.name} would share nothing: give {hint}, or say --head"
        " all."
    )


def _lookups(net: Split) -> dict[str, int]:
    """The largest number that each embedding of a net is asked for, by layer; filled while the net runs."""
    largest: dict[str, int] = {}

    def watch(name: str, layer: nn.Embedding) -> None:
        def ask(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if layer.num_embeddings > 2 and inputs and inputs[0].numel():
                largest[name] = max(largest.get(name, 0), int(inputs[0].max()))

        layer.register_forward_pre_hook(ask)

    for name, layer in net.named_modules():
        if isinstance(layer, nn.Embedding):
            watch(name, layer)
    return largest


def _check_lookups(looked_up: dict[str, int]) -> None:
    """Refuse bytes that are meant as indices of words: scaled like pixels, they have all become word 0."""
    for name, largest in looked_up.items():
        if largest <= 1:
            raise UserError(
                f"x holds bytes, which are taken as pixels from 0 to 1, but {name} looks them up in a table: give"
                " whole numbers of another type, such as int64."
            )


def _check_scores(output: Tensor, federation: Federation) -> None:
    """Refuse a net that does not give every sample a score for each class, as the loss for classes needs."""
    shape, classes = list(output.shape[1:]), federation.num_classes or 0
    if len(shape) == 1 and shape[0] >= classes:
        return
    lowest = min((int(part.y.min()) for part in (federation.train, federation.test) if len(part.y)), default=0)
    labels = f" (labels run from {lowest} to {classes - 1}: number them from 0)" if lowest > 0 else ""
    raise UserError(
        f"the model gives {'x'.join(map(str, shape)) or 'one'} outputs for {classes} classes: give it {classes}"
        f"{labels}, or a --loss of your own."
    )


def _note_spare_scores(output: Tensor, federation: Federation) -> list[str]:
    """What to say of a net with scores for classes that are not there, as one made for other data has."""
    count, classes = output.shape[1], federation.num_classes
    if count == classes:
        return []
    return [
        f"The model gives {count} outputs for {classes} classes, and {count - (classes or 0)} are never right: give it"
        f" {classes}, or, if more classes are to come, say num_classes={count} in the data."
    ]


def _check_per_sample(name: str, function: Loss, output: Tensor, y: Tensor) -> None:
    """Try the user's own loss or metric on a few samples: each must get a number that depends on it alone."""
    # torch warns of shapes that broadcast, which is what this finds out.
    with torch.no_grad(), warnings.catch_warnings(action="ignore"), user_code(f"the {name}"):
        together, alone = (function(output[:count], y[:count]) for count in (len(y), 1))
    for found, count in ((together, len(y)), (alone, 1)):
        if not isinstance(found, Tensor) or found.shape != (count,):
            raise UserError(
                f"the {name} gives {_shape(found)} for output {_shape(output[:count])} and target {_shape(y[:count])}:"
                f" it must give one number per sample, [{count}], not their mean or sum."
            )
    if not torch.allclose(together[:1].double(), alone.double(), rtol=1e-3, atol=1e-6, equal_nan=True):
        # The usual cause: shapes [n, 1] and [n] broadcast, so that every sample is compared with every other.
        raise UserError(
            f"the {name} of a sample depends on the other samples: compute each by itself, and check that the shapes"
            f" of output {_shape(output)} and target {_shape(y)} match."
        )


def _check_gradients(loss: Loss, net: Split, x: Tensor, y: Tensor) -> None:
    """Refuse a net or a loss through which no gradient reaches a group: engines would fail there, or learn nothing.

    Single parameters may have no gradient, such as those of unused branches.
    """
    if not torch.is_grad_enabled():
        raise UserError(
            "torch computes no gradients here: train outside of no_grad() and inference_mode(), or call"
            " torch.set_grad_enabled(True)."
        )
    # In train mode: some nets compute no gradients in eval mode.
    with torch_seed(0), user_code("the model"):
        output = net.train()(x)
    if not output.requires_grad:
        raise UserError("no gradient reaches the model: remove detach() and no_grad() from its forward.")
    with user_code("the loss"):
        losses = loss(output, y)
    if not losses.requires_grad:
        raise UserError("no gradient passes through the loss: compute it with torch's functions, without detach().")
    names, parameters = zip(*net.named_parameters(), strict=True)
    with user_code("the gradient of the loss"):
        gradients = torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not None and gradient.layout != torch.strided:
            raise UserError(f"the gradient of {name} is sparse: leave sparse=True out of the layer.")
    reached = {group(name) for name, gradient in zip(names, gradients, strict=True) if gradient is not None}
    for missed in net.groups:
        if missed not in reached:
            raise UserError(
                f"no gradient reaches the {missed}: remove detach() and no_grad() from the model's forward, or set"
                " requires_grad=False on what is not to be trained."
            )


def _check_transform(transform: Transform, experiment: Experiment, federation: Federation) -> None:
    """Try the user's own transform on a few samples: a wrong shape would go unnoticed, by broadcasting.

    It is tried twice with every generator: what it draws from elsewhere could not be repeated.
    """
    x = few_of(federation.train.x, 3).to(experiment.dtype)
    draws = [*range(_DRAWS), *range(_DRAWS)]
    with every_seed(0), user_code("the transform"):
        # A copy: a transform may change its inputs in place.
        found = [transform(x.clone(), generator(experiment.root, "transform/trial", epoch=draw)) for draw in draws]
    for given in found:
        if not isinstance(given, Tensor) or given.shape != x.shape:
            raise UserError(
                f"the transform gives {_shape(given)} for {len(x)} samples: it must give a tensor of their shape, "
                f"{list(x.shape)}."
            )
        if not given.isfinite().all():
            raise UserError("the transform gives NaN or infinite numbers: give finite ones for every sample.")
    if not all(map(torch.equal, found[:_DRAWS], found[_DRAWS:])):
        raise UserError(
            "the transform gives different numbers when it is called again with the same generator: draw all of"
            " them from that generator; torch's functions take"
            " torch.Generator().manual_seed(int(generator.integers(2**63)))."
        )


def _shape(found: object) -> str:
    """What is not a tensor by its type."""
    return str(list(found.shape)) if isinstance(found, Tensor) else type(found).__name__
