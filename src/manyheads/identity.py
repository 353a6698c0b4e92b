"""What a user's object is known by: a description for JSON that is the same in every process."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import Any

import numpy as np
import torch
from torch import nn

from manyheads.data import Dataset
from manyheads.errors import UserError
from manyheads.models.layers import refuse_lazy
from manyheads.tree import as_bytes

_SCALARS = (np.bool_, np.integer, np.floating, np.str_)
"""numpy's numbers and words that JSON can hold."""


def described_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The values of options as JSON can hold them; a value that is refused is named by its option."""
    found = {}
    for name, value in options.items():
        try:
            found[name] = described(value)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
    return found


def described(value: Any) -> Any:
    """A value as JSON can hold it; objects by their kind and a hash of their content.

    Refuses an object that neither shows its content nor is a function: it could not be told from others of its kind.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, _SCALARS):
        return value.item()
    if isinstance(value, (tuple, list)):
        return [described(each) for each in value]
    if isinstance(value, Dataset):
        return {"kind": "arrays", "name": value.name, "sha256": value.digest()}
    if isinstance(value, nn.Module):
        refuse_lazy(value)
        held = [name for name, parameter in value.named_parameters() if not parameter.requires_grad]
        # repr() leaves settings out: no loss of torch's shows its label_smoothing, delta or beta.
        settings = [_words((), _settings(layer)) for layer in value.modules()]
        sha256 = _hash(f"{value!r}{held or ''}{settings}", [*value.parameters(), *value.buffers()])
        return {"kind": f"module {type(value).__qualname__}", "sha256": sha256}
    if isinstance(value, torch.Tensor):
        return {"kind": "tensor", "sha256": _hash(f"{value.dtype}{list(value.shape)}", [value])}
    if isinstance(value, np.ndarray) and value.dtype == object:
        return {"kind": "array", "items": described(value.tolist())}
    if isinstance(value, np.ndarray):
        return {
            "kind": "array",
            "sha256": hashlib.sha256(f"{value.dtype}{value.shape}".encode() + value.tobytes()).hexdigest(),
        }
    if isinstance(value, (bytes, bytearray)):
        return {"kind": "bytes", "sha256": hashlib.sha256(value).hexdigest()}
    if isinstance(value, (set, frozenset)):
        return {"kind": "set", "items": sorted(map(_text, value))}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: described(each) for key, each in value.items()}
        return {"kind": "dict", "items": sorted(f"{_text(key)}: {_text(each)}" for key, each in value.items())}
    if callable(value) or _settings(value):
        return {"kind": f"function {_function_name(value)}"}
    shown = repr(value)
    # A place in memory is another in every process.
    if " at 0x" in shown:
        raise UserError(
            f"runs cannot be told apart by an object of type {type(value).__qualname__}: give numbers, words,"
            " arrays, tensors or functions."
        )
    return {"kind": f"{type(value).__qualname__} {shown}"}


def _text(value: Any) -> str:
    """A value's description as text; equal ones give the same, in whatever order their items are."""
    return json.dumps(described(value), sort_keys=True)


def _hash(text: str, tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for tensor in tensors:
        for part in _dense_parts(tensor.detach()):
            digest.update(as_bytes(part))
    return digest.hexdigest()


def _dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors with numbers in memory that say all: of a sparse one, where its numbers are and which."""
    if tensor.layout == torch.strided:
        return (tensor,)
    sparse = tensor.to_sparse().coalesce()
    return sparse.indices(), sparse.values()


_SETTINGS = (
    NoneType, bool, int, float, str, *_SCALARS, type, FunctionType, BuiltinFunctionType, partial,
    np.ndarray, torch.Tensor, nn.Module,
)  # fmt: skip
"""Attributes of these types, and tuples and lists of them, count as settings; others may be anything and do not."""


def _settings(owner: object) -> dict[str, Any]:
    """What an object is set to: its attributes of plain kinds, without those whose names begin with _."""
    found = sorted(getattr(owner, "__dict__", {}).items())
    # `training` is left out: a run sets it as it needs it.
    public = ((name, value) for name, value in found if not name.startswith("_") and name != "training")
    return {name: value for name, value in public if _is_setting(value)}


def _is_setting(value: object) -> bool:
    return all(map(_is_setting, value)) if isinstance(value, (tuple, list)) else isinstance(value, _SETTINGS)


def _function_name(function: Any) -> str:
    """What a user's function is known by: its name, or that of its class with its settings.

    What is inside a function is not looked at: all lambdas and closures from one place in the code count as the same.
    """
    if isinstance(function, MethodType):
        function = partial(function.__func__, function.__self__)
    if isinstance(function, partial):
        return f"{_function_name(function.func)}({_words(function.args, function.keywords)})"
    if getattr(function, "__qualname__", None):
        return f"{function.__module__}.{function.__qualname__}"
    settings = _words((), _settings(function))
    return _function_name(type(function)) + (f"({settings})" if settings else "")


def _words(arguments: Iterable[Any], settings: Mapping[str, Any]) -> str:
    """Arguments and settings as Python would write them in a call."""
    return ", ".join([*map(_text, arguments), *(f"{name}={_text(value)}" for name, value in settings.items())])
