"""torch.compile where it is worth it: on a GPU, unless MANYHEADS_COMPILE=0 is set in the environment."""

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
"""Warns many times that it cannot bound a power; the compiler does without the bound."""


def wanted(device: torch.device) -> bool:
    """Whether to compile: MANYHEADS_COMPILE=0 never, =1 always, else on a GPU."""
    said = os.environ.get("MANYHEADS_COMPILE")
    return device.type == "cuda" if said is None else said != "0"


def compiled(function: Function, on: bool, *, dynamic: bool | None = False, hashes: bool = True) -> Function:
    """``function`` compiled, to be called only in steps that are recorded: it makes no CUDA graphs of its own.

    ``hashes``: whether it may draw dropout masks.
    """
    if not on:
        return function
    # One function is specialised for every phase and net of a process; beyond this limit torch stops compiling it.
    torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, _SPECIALISATIONS)
    options: dict[str, Any] = {"triton.cudagraphs": False}
    if hashes:
        # Dropout hashes positions with products modulo 2^64. Worked out symbolically, they would not overflow.
        options["constant_and_index_propagation"] = False
    return cast(Function, torch.compile(function, dynamic=dynamic, options=options))


@contextmanager
def without_remarks() -> Iterator[None]:
    """Inside, the compiler's warnings are silent: where warnings are errors, they would stop it."""
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
    """Whether compiled code draws the right dropout masks: a compiler may change products that overflow."""

    def masks(keys: Tensor) -> tuple[Tensor, Tensor]:
        return (
            dropout_mask(keys, (16, 40), 0.3, torch.float32, device),
            dropout_mask(keys[0], (16, 40), 0.3, torch.float32, device),
        )

    keys = torch.tensor([1, 2**40 + 7, 2**62 + 11], device=device)
    return all(torch.equal(fast, slow) for fast, slow in zip(compiled(masks, True)(keys), masks(keys), strict=True))
