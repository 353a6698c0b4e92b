"""Trials of a net on a few samples: whether it runs, draws random numbers, mixes samples or carries things over."""

import copy
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from numbers import Number

import numpy as np
import torch
from torch import Tensor, nn

from manyheads.errors import UserError, user_code
from manyheads.models.dropout import Dropout
from manyheads.models.layers import replace_layers
from manyheads.models.norm import BatchNorm
from manyheads.models.split import Split, statistics
from manyheads.randomness import generator_states
from manyheads.tree import as_bytes, as_uint8, clone

_TORCHS_OWN = vars(nn.Module()).keys()
"""Attributes that every module has: its tensors, its children, its hooks and its mode."""


def attempt(module: nn.Module, example: Tensor) -> Tensor:
    """The module's output; what goes wrong inside is the user's to mend."""
    shape, single = "x".join(map(str, example.shape[1:])), len(example) == 1
    few = f"a single sample of shape {shape}, which every net must take," if single else f"samples of shape {shape}"
    with user_code(f"on {few} the model"):
        # A copy: a net may change its inputs in place.
        output = module(example.clone())
    if not isinstance(output, Tensor) or output.ndim == 0 or len(output) != len(example):
        alone = ", even if it is alone in its batch (squeeze() would drop its row)" if single else ""
        raise UserError(f"the model must return one tensor with a row for every sample{alone}: change its forward.")
    return output


@contextmanager
def unwritten(tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuse a forward that writes to some of the net's tensors: scoring would change what is trained next."""
    before, versions = clone(tensors), {name: _version(tensor) for name, tensor in tensors.items()}
    yield
    for name, tensor in tensors.items():
        # An embedding with max_norm also writes where no row is too long as yet; .data leaves the version as it was.
        if _version(tensor) != versions[name] or not torch.equal(as_uint8(tensor), as_uint8(before[name])):
            raise UserError(
                f"the model's forward writes to {name}: it may change nothing but buffers, and these only if"
                " self.training; leave max_norm out of an nn.Embedding."
            )


def _version(tensor: Tensor) -> int:
    """How often a tensor has been written to; not counted of those made inside inference_mode()."""
    return 0 if tensor.is_inference() else tensor._version


def alike(output: Tensor, expected: Tensor) -> bool:
    """Whether two outputs are the same but for rounding."""
    return output.shape == expected.shape and torch.allclose(output, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def watched(net: Split, example: Tensor) -> Split:
    """Find by trials in train mode which modules draw random numbers or mix samples, and which buffers move.

    Refuses a net that carries something from one batch to the next outside its buffers, as one module serves many
    workers. It shows when the same samples and buffers leave the module in another condition than before; a cache, once
    it is made, and notes of the last batch, such as a map of attention, pass.

    One key gives one mask, so a dropout layer that forward applies more than once goes back to torch's generator.
    """
    trial = copy.deepcopy(net)
    kept, seen = statistics(trial), _Seen(trial)
    before = clone(kept)
    states = generator_states()

    def run(batch: Tensor) -> Tensor:
        # Seeded alike every time, so that only the samples make a difference.
        torch.manual_seed(0)
        return attempt(trial, batch)

    with torch.random.fork_rng(devices=[]), torch.no_grad(), unwritten(dict(trial.named_parameters())):
        run(example)
        often, expected = {name for name, count in seen.calls.items() if count > 1}, dict(seen.first_rows)
        for layer in trial.modules():
            if isinstance(layer, BatchNorm):
                layer.eval()
        held = clone(kept)
        beside_others, noted = run(example), _noted(trial, kept)
        beside_itself, alone = run(example[[0] * len(example)]), dict(seen.first_rows)
        for name, buffer in kept.items():
            # Only what moves can be written to: a constant may be one number, expanded.
            if not torch.equal(buffer, held[name]):
                buffer.copy_(held[name])
        again, noted_again = run(example), _noted(trial, kept)
    for name, buffer in kept.items():
        if trial.get_buffer(name) is not buffer:
            raise UserError(f"the model's forward assigns a new tensor to {name}: change it in place, as copy_ does.")
    if generator_states() != states:
        raise UserError(
            "the model's forward draws from Python's or numpy's random numbers: draw from torch's, which every run"
            " seeds."
        )
    for name, value in noted_again.items():
        if value != noted.get(name):
            raise UserError(
                f"the model's forward carries {name} over from batch to batch, but one module serves many workers:"
                " carry nothing over, or make it a buffer of the state_dict (register_buffer), of which each worker"
                " has its own."
            )
    if not alike(again, beside_others):
        raise UserError(
            "the model's forward gives a sample a different output after it has seen others: keep what it must"
            " remember in buffers (register_buffer), and draw from torch's generator, which every run seeds."
        )
    net.random = tuple(seen.drew)
    net.moving = tuple(name for name, buffer in kept.items() if not torch.equal(buffer, before[name]))
    net.mixes_samples = not alike(beside_others[0], beside_itself[0]) or any(map(_counts_words, net.modules()))
    net.varying = tuple(name for name, row in expected.items() if not alike(alone[name], row))
    repeated = {net.get_submodule(name) for name in often}
    replace_layers(net, lambda layer: nn.Dropout(layer.p) if isinstance(layer, Dropout) and layer in repeated else None)
    return net


def _counts_words(layer: nn.Module) -> bool:
    """Whether a word's gradient is divided by how often the word is in the batch."""
    return isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.scale_grad_by_freq


def _noted(net: nn.Module, kept: Mapping[str, Tensor]) -> dict[str, object]:
    """What the modules hold now besides parameters and the buffers in ``kept``, as far as it can be compared."""
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
    """A copy of the numbers and words in a value, to be compared with what it holds later."""
    if isinstance(value, Tensor):
        return bytes(as_bytes(value))
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return [(_now(key), _now(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [_now(item) for item in value]
    # As text, since NaN is not equal to itself.
    return repr(value) if isinstance(value, (Number, np.bool_, str)) else None


class _Seen:
    """What the modules of a net are seen to do while it runs."""

    def __init__(self, net: nn.Module) -> None:
        self.calls: Counter[str] = Counter()
        self.drew: list[str] = []
        """Modules that draw from torch's generator; of nested ones, the innermost."""
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
