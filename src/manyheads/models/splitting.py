"""Any nn.Module made into a representation and a head, by the name of its head."""

import copy
from collections import OrderedDict

import torch
from torch import Tensor, nn

from manyheads.errors import UserError, first_line, unknown
from manyheads.models.dropout import Dropout
from manyheads.models.layers import (
    children,
    has_hooks,
    owns_parameters,
    refuse_sparse,
    replace_layers,
    unshare_layers,
)
from manyheads.models.norm import own_batchnorm
from manyheads.models.split import Split, statistics
from manyheads.models.straight import straightened
from manyheads.models.trials import alike, attempt, unwritten, watched
from manyheads.randomness import torch_seed


def split(module: nn.Module, head: str | None, example: Tensor, *, known: bool = False) -> Split:
    """Split a copy of a module by the dotted name of its head; ``example`` is a batch [B, ...] of at least two samples.

    Inside an nn.Sequential the head is everything from the named layer on; elsewhere the named module must be the last
    thing that forward applies, which is tried on the example. None: the last child that owns parameters, looked for
    inside one that alone does. ``all`` and ``none``: everything is the head, or nothing is. torch's Dropout and
    BatchNorm are replaced by ours. ``known``: it has been tried before, and only layers without a shape are run.
    """
    with torch.no_grad():
        if any(map(nn.parameter.is_lazy, (*module.parameters(), *module.buffers()))):
            # Lazy layers cannot be copied before they have their shapes.
            training = module.training
            attempt(module.eval(), example)
            module.train(training)
        whole = _copied(module).eval()
        kept = {**dict(whole.named_parameters()), **statistics(whole)}
        refuse_sparse(kept)
        expected = None
        if not known:
            with torch_seed(0), unwritten(kept):
                expected = attempt(whole, example)
                # The last batch of a pass, or a worker's test shard, may be a single sample.
                attempt(whole, example[:1])
        unshare_layers(whole)
        head = _last(whole) if head is None else head
        ends = known or _ends_with(whole, head, example)
        representation, top, prefix = _separate(whole, head)
        net = Split(representation, {"head": top})
        net.head_layer, net.head_prefix = head, prefix
        replace_layers(net, lambda layer: _own_dropout(layer) or own_batchnorm(layer))
        # The same seed as above, as a net may draw random numbers even in eval mode.
        with torch_seed(0):
            agrees = expected is None or _agrees(net.eval(), example, expected)
        if not (ends and agrees):
            raise UserError(
                f"head '{head}' is not the last thing the model's forward applies, or its input is not one tensor: let"
                " one module with one tensor as its input do all that comes last, and name that one; or say --head"
                " none, for no head at all."
            )
    if {id(p) for p in net.representation.parameters()} & {id(p) for p in top.parameters()}:
        raise UserError(f"head '{head}' shares parameters with the rest of the model: choose one that shares none.")
    return net.train() if known else straightened(watched(net.train(), example), example)


def _ends_with(whole: nn.Module, head: str, example: Tensor) -> bool:
    """Whether forward returns the very tensor that the head gives, in eval mode and in train mode.

    Comparing numbers is not enough: a layer after the head, such as a ReLU, may leave the example's numbers unchanged.
    """
    net = copy.deepcopy(whole)
    modules = dict(net.named_modules(remove_duplicate=False))
    if not head or head in ("all", "none") or head not in modules or _is_in_sequentials(net, head):
        return True
    parent = modules[head.rpartition(".")[0]]
    top = parent if type(parent) is nn.Sequential else modules[head]
    given: list[tuple[object, int]] = []
    top.register_forward_hook(lambda *call: given.append((call[-1], getattr(call[-1], "_version", 0))))
    with torch.random.fork_rng(devices=[]):
        for mode in (False, True):
            given.clear()
            output = attempt(net.train(mode), example)
            if not given or not _is_still(output, *given[-1]):
                return False
    return True


def _is_still(output: Tensor, given: object, version: int) -> bool:
    """Whether ``output`` is the same memory as ``given``, and nothing has written to it since."""
    if not isinstance(given, Tensor) or output._version != version:
        return False
    return (output.data_ptr(), output.shape, output.stride()) == (given.data_ptr(), given.shape, given.stride())


def _separate(whole: nn.Module, head: str) -> tuple[nn.Module, nn.Module, str]:
    """Representation, head, and what the names of the head's tensors began with."""
    if head == "all":
        return nn.Identity(), whole, ""
    if head == "none":
        return whole, nn.Identity(), ""
    owners = [name for name, layer in whole.named_modules() if name and owns_parameters(layer)]
    if not head or head not in dict(whole.named_modules(remove_duplicate=False)):
        raise unknown("head", head, ["all", "none", *(n for n in owners if n.count(".") <= head.count("."))])
    if _is_in_sequentials(whole, head):
        return *_sliced(whole, head.split(".")), ""
    parent_name, _, child = head.rpartition(".")
    parent = whole.get_submodule(parent_name)
    if type(parent) is nn.Sequential:
        front, top = _sliced(parent, [child])
        whole.set_submodule(parent_name, front)
        return whole, top, f"{parent_name}."
    top = whole.get_submodule(head)
    whole.set_submodule(head, nn.Identity())
    return whole, top, f"{head}."


def _is_in_sequentials(whole: nn.Module, head: str) -> bool:
    """Whether everything around the head, up to the net itself, is an nn.Sequential: these can be cut anywhere."""
    parts = head.split(".")
    return all(type(whole.get_submodule(".".join(parts[:k]))) is nn.Sequential for k in range(len(parts)))


def _sliced(sequence: nn.Module, parts: list[str]) -> tuple[nn.Module, nn.Module]:
    """What comes before a layer of nested Sequentials and what comes from it on, both with their names."""
    assert isinstance(sequence, nn.Sequential)
    if has_hooks(sequence):
        raise UserError(
            "the model's head lies inside an nn.Sequential with hooks, which would be lost where it is cut: register"
            " them on a layer inside it."
        )
    layers = list(children(sequence).items())
    first, *rest = parts
    at = [name for name, _ in layers].index(first)
    if not rest:
        return sequence[:at], sequence[at:]
    before, after = _sliced(layers[at][1], rest)
    return (
        nn.Sequential(OrderedDict([*layers[:at], (first, before)])),
        nn.Sequential(OrderedDict([(first, after), *layers[at + 1 :]])),
    )


def _last(whole: nn.Module) -> str:
    """The last child that owns parameters; if it is the only one, the last such child inside it, and so on."""
    path: list[str] = []
    owners = _owners(whole)
    while owners:
        path.append(next(reversed(owners)))
        owners = _owners(owners[path[-1]]) if len(owners) == 1 else {}
    if not path:
        raise UserError(
            f"{type(whole).__name__} has no layers to choose a head from: give the head as 'all' or 'none'."
        )
    return ".".join(path)


def _owners(module: nn.Module) -> dict[str, nn.Module]:
    return {name: child for name, child in children(module).items() if owns_parameters(child)}


def _copied(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise UserError(f"the model cannot be copied, as it is for every worker: {first_line(error)}") from error


def _agrees(net: Split, example: Tensor, expected: Tensor) -> bool:
    try:
        output = net(example.clone())
    except Exception:  # whatever a head raises on what is not its input
        return False
    return alike(output, expected)


def _own_dropout(layer: nn.Module) -> nn.Module | None:
    return Dropout(layer.p) if type(layer) is nn.Dropout else None
