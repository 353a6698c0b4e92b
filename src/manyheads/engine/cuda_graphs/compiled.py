"""torch.compile where it pays: on a GPU, unless the environment says MANYHEADS_COMPILE=0."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from manyheads.models.dropout import dropout_mask

Function = TypeVar("Function", bound=Callable)

_SPECIALISATIONS = 64
_TALKATIVE = logging.getLogger("torch.utils._sympy.interp")
"""Says many times that it cannot bound a power, which it then does without."""


def wanted(device: torch.device) -> bool:
    """Whether to compile: MANYHEADS_COMPILE=0 never, =1 always, else on a GPU."""
    said = os.environ.get("MANYHEADS_COMPILE")
    return device.type == "cuda" if said is None else said != "0"


def compiled(function: Function, on: bool, *, dynamic: bool | None = False, hashes: bool = True) -> Function:
    """``function`` compiled, to be called inside a recording only; the graphs around it are ours.

    ``hashes``: whether it may draw dropout masks.
    """
    if not on:
        return function
    # One function serves every phase and net of a process, each a specialisation of its own.
    torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, _SPECIALISATIONS)
    options: dict[str, Any] = {"triton.cudagraphs": False}
    if hashes:
        # Dropout hashes positions with products modulo 2^64, which must not be worked out symbolically.
        options["constant_and_index_propagation"] = False
    return cast(Function, torch.compile(function, dynamic=dynamic, options=options))


@contextmanager
def without_remarks() -> Iterator[None]:
    """Inside, the compiler keeps its remarks on its work to itself: where warnings are errors, they would stop it."""
    level = _TALKATIVE.level
    _TALKATIVE.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _TALKATIVE.setLevel(level)


@cache
def keeps_dropout(device: torch.device) -> bool:
    """Whether compiled code draws the masks it should: a compiler may take liberties with products that overflow."""

    def masks(keys: Tensor) -> tuple[Tensor, Tensor]:
        return (
            dropout_mask(keys, (16, 40), 0.3, torch.float32, device),
            dropout_mask(keys[0], (16, 40), 0.3, torch.float32, device),
        )

    keys = torch.tensor([1, 2**40 + 7, 2**62 + 11], device=device)
    return all(torch.equal(fast, slow) for fast, slow in zip(compiled(masks, True)(keys), masks(keys), strict=True))
