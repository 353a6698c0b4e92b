"""Any nn.Module made into a representation and a head, by the name of its head."""

import copy
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from numbers import Number

import numpy as np
import torch
from torch import Tensor, nn

from manyheads.errors import UserError, unknown, user_code
from manyheads.models.dropout import Dropout
from manyheads.models.layers import children, put, replace_layers, unshare_layers
from manyheads.models.norm import BatchNorm, own_batchnorm
from manyheads.models.split import Split, statistics
from manyheads.randomness import torch_seed
from manyheads.tree import as_bytes

_TORCHS_OWN = vars(nn.Module()).keys()
"""Attributes that every module has: its tensors, its children, its hooks and its mode."""


def split(module: nn.Module, head: str | None, example: Tensor, *, known: bool = False) -> Split:
    """Split a copy of a module by the dotted name of its head; ``example`` is a batch [B, ...] of at least two samples.

    Inside an nn.Sequential the head is everything from the named layer on; elsewhere the named module must be the last
    thing that forward applies, which is tried on the example. None: the last child that owns parameters, looked for
    inside one that alone does. ``all`` and ``none``: everything is the head, or nothing is. torch's Dropout and
    BatchNorm are replaced by ours. ``known``: it has been tried before, and only layers without a shape are run.
    """
    with torch.no_grad():
        if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters()):
            # Lazy layers can be copied only once they have their shapes.
            training = module.training
            _try(module.eval(), example)
            module.train(training)
        whole = _copied(module).eval()
        expected = None
        if not known:
            with torch_seed(0):
                expected = _try(whole, example)
                # The last batch of a pass may hold no more, and so may a worker's test samples.
                _try(whole, example[:1])
        unshare_layers(whole)
        head = _last(whole) if head is None else head
        ends = known or _ends_with(whole, head, example)
        representation, top, prefix = _separate(whole, head)
        net = Split(representation, {"head": top})
        net.head_layer, net.head_prefix = head, prefix
        replace_layers(net, lambda layer: _own_dropout(layer) or own_batchnorm(layer))
        # Alike for both: a net may draw random numbers at all times.
        with torch_seed(0):
            agrees = expected is None or _agrees(net.eval(), example, expected)
        if not (ends and agrees):
            raise UserError(
                f"head '{head}' is not the last thing the model's forward applies: let one module with one input do all"
                " that comes last, and name that; or say --head none, for no head at all."
            )
    if {id(p) for p in net.representation.parameters()} & {id(p) for p in top.parameters()}:
        raise UserError(f"head '{head}' shares parameters with the rest of the model: choose a head that owns its own.")
    return net.train() if known else _watched(net.train(), example)


def _ends_with(whole: nn.Module, head: str, example: Tensor) -> bool:
    """Whether what the head gives is what forward gives, in eval mode and in train mode.

    To compare numbers would not do: what comes after the head may leave the example's as they are, as a ReLU does.
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
            output = _try(net.train(mode), example)
            if not given or not _is_still(output, *given[-1]):
                return False
    return True


def _is_still(output: Tensor, given: object, version: int) -> bool:
    """Whether ``output`` shows the numbers of ``given``, into which nobody has written since."""
    if not isinstance(given, Tensor) or output._version != version:
        return False
    return (output.data_ptr(), output.shape, output.stride()) == (given.data_ptr(), given.shape, given.stride())


def _separate(whole: nn.Module, head: str) -> tuple[nn.Module, nn.Module, str]:
    """Representation, head, and what the names of the head's tensors began with."""
    if head == "all":
        return nn.Identity(), whole, ""
    if head == "none":
        return whole, nn.Identity(), ""
    owners = [name for name, layer in whole.named_modules() if name and any(True for _ in layer.parameters())]
    if not head or head not in dict(whole.named_modules(remove_duplicate=False)):
        raise unknown("head", head, ["all", "none", *(n for n in owners if n.count(".") <= head.count("."))])
    if _is_in_sequentials(whole, head):
        return *_sliced(whole, head.split(".")), ""
    parent_name, _, child = head.rpartition(".")
    parent = whole.get_submodule(parent_name)
    if type(parent) is nn.Sequential:
        front, top = _sliced(parent, [child])
        put(whole, parent_name, front)
        return whole, top, f"{parent_name}."
    top = whole.get_submodule(head)
    put(whole, head, nn.Identity())
    return whole, top, f"{head}."


def _is_in_sequentials(whole: nn.Module, head: str) -> bool:
    """Whether all that the head lies in are nn.Sequentials, the net itself among them: they can be cut anywhere."""
    parts = head.split(".")
    return all(type(whole.get_submodule(".".join(parts[:k]))) is nn.Sequential for k in range(len(parts)))


def _sliced(sequence: nn.Module, parts: list[str]) -> tuple[nn.Module, nn.Module]:
    """What comes before a layer of nested Sequentials and what comes from it on, both with their names."""
    assert isinstance(sequence, nn.Sequential)
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
    """The last child that owns parameters; where no other does, what is last inside it."""
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
    return {name: child for name, child in children(module).items() if any(True for _ in child.parameters())}


def _copied(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise UserError(f"the model cannot be copied, as it is for every worker: {_first_line(error)}") from error


def _try(module: nn.Module, example: Tensor) -> Tensor:
    """The module's output; what goes wrong inside is the user's to mend."""
    shape, single = "x".join(map(str, example.shape[1:])), len(example) == 1
    few = f"a single sample of shape {shape}, which every net must take," if single else f"samples of shape {shape}"
    with user_code(f"on {few} the model"):
        # A copy: a net may change its inputs in place.
        output = module(example.clone())
    if not isinstance(output, Tensor) or output.ndim == 0 or len(output) != len(example):
        alone = " of a batch, be it the only one (squeeze() would take its row away)" if single else ""
        raise UserError(f"the model must return one tensor with a row for every sample{alone}: change its forward.")
    return output


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _agrees(net: Split, example: Tensor, expected: Tensor) -> bool:
    try:
        output = net(example.clone())
    except Exception:  # whatever a head raises on what is not its input
        return False
    return _alike(output, expected)


def _alike(output: Tensor, expected: Tensor) -> bool:
    return output.shape == expected.shape and torch.allclose(output, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def _own_dropout(layer: nn.Module) -> nn.Module | None:
    return Dropout(layer.p) if type(layer) is nn.Dropout else None


def _watched(net: Split, example: Tensor) -> Split:
    """Find what draws random numbers, what looks beyond the sample, and what moves, by trials in train mode.

    Refuse what would pass from one worker to the next: what is not alike after the same samples from the same buffers.
    A cache is, once it is made, and so is what is only noted of the last batch, as a map of attention.

    One key gives one mask, so a dropout layer that forward applies more than once goes back to torch's generator.
    """
    trial = copy.deepcopy(net)
    kept, seen = statistics(trial), _Seen(trial)
    before = {name: buffer.clone() for name, buffer in kept.items()}
    outside = _outside_generators()

    def run(batch: Tensor) -> Tensor:
        # What is drawn is the same every time, so that only the samples make a difference.
        torch.manual_seed(0)
        return _try(trial, batch)

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        run(example)
        often, expected = {name for name, count in seen.calls.items() if count > 1}, dict(seen.first_rows)
        for layer in trial.modules():
            if isinstance(layer, BatchNorm):
                layer.eval()
        held = {name: buffer.clone() for name, buffer in kept.items()}
        beside_others, noted = run(example), _noted(trial, kept)
        beside_itself, alone = run(example[[0] * len(example)]), dict(seen.first_rows)
        for name, buffer in kept.items():
            # Only what moves can be written to: a constant may be one number, expanded.
            if not torch.equal(buffer, held[name]):
                buffer.copy_(held[name])
        again, noted_again = run(example), _noted(trial, kept)
    for name, buffer in kept.items():
        if trial.get_buffer(name) is not buffer:
            raise UserError(f"the model's forward gives {name} a new tensor: change it in place, as copy_ does.")
    if _outside_generators() != outside:
        raise UserError("the model's forward draws from Python's random or numpy's: draw from torch, which runs seed.")
    for name, value in noted_again.items():
        if value != noted.get(name):
            raise UserError(
                f"the model's forward carries {name} on from batch to batch, and one module serves many workers: carry"
                " nothing on, or let it be a buffer of the state_dict (register_buffer), of which each has its own."
            )
    if not _alike(again, beside_others):
        raise UserError(
            "the model's forward gives samples another output when it has seen others before: let buffers"
            " (register_buffer) carry on what it must remember, and draw from torch's generator, which runs seed."
        )
    net.random = tuple(seen.drew)
    net.moving = tuple(name for name, buffer in kept.items() if not torch.equal(buffer, before[name]))
    net.mixes_samples = not _alike(beside_others[0], beside_itself[0])
    net.varying = tuple(name for name, row in expected.items() if not _alike(alone[name], row))
    for name, module in list(net.named_modules()):
        if isinstance(module, Dropout) and name in often:
            put(net, name, nn.Dropout(module.p))
    return net


def _outside_generators() -> tuple[object, ...]:
    """Where the generators stand that are seeded for first weights alone."""
    _, numbers, *rest = np.random.get_state()  # noqa: NPY002 (it is the user's who may draw from it)
    return random.getstate(), np.asarray(numbers).tobytes(), rest


def _noted(net: nn.Module, kept: Mapping[str, Tensor]) -> dict[str, object]:
    """What the modules hold at the moment beside parameters and the buffers in ``kept``, as far as can be told."""
    held: dict[str, object] = {name: buffer for name, buffer in net.named_buffers() if name not in kept}
    for name, module in net.named_modules():
        held |= {f"{name}.{own}": value for own, value in vars(module).items() if own not in _TORCHS_OWN}
    noted = {}
    for name, value in held.items():
        # A sparse tensor has no bytes, and a list may contain itself.
        with suppress(RuntimeError):
            noted[name] = _now(value)
    return noted


def _now(value: object) -> object:
    """What numbers and words a value holds at the moment, to be compared with what it holds later."""
    if isinstance(value, Tensor):
        return bytes(as_bytes(value))
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return [(_now(key), _now(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [_now(item) for item in value]
    # As words: no NaN is equal to another.
    return repr(value) if isinstance(value, (Number, np.bool_, str)) else None


class _Seen:
    """What the modules of a net are seen to do while it runs."""

    def __init__(self, net: nn.Module) -> None:
        self.calls: Counter[str] = Counter()
        self.drew: list[str] = []
        """Those that draw from torch's generator, of modules inside each other the innermost."""
        self.first_rows: dict[str, Tensor] = {}
        """What each gave the first sample when it was last called."""
        self._before: dict[str, Tensor] = {}
        for name, module in net.named_modules():
            if name:
                module.register_forward_pre_hook(partial(self._enter, name))
                module.register_forward_hook(partial(self._leave, name))

    def _enter(self, name: str, *_: object) -> None:
        self._before[name] = torch.get_rng_state()

    def _leave(self, name: str, module: nn.Module, inputs: object, output: object) -> None:
        self.calls[name] += 1
        if isinstance(output, Tensor) and output.is_floating_point() and output.ndim:
            self.first_rows[name] = output[0].clone()
        inside = any(other.startswith(f"{name}.") for other in self.drew)
        if not inside and name not in self.drew and not torch.equal(self._before[name], torch.get_rng_state()):
            self.drew.append(name)
