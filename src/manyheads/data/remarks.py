"""What to say of a user's inputs that can be used, but hardly learned from."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

_DARKEST_WHITE = 64
"""Images that come near 255 are meant as bytes; those of another scale, such as 0 to 16, may be meant as they are."""

_USUAL_SIZES = (0.01, 10)
"""Root mean squares of inputs between which nets learn with usual rates."""


def notes_on(where: str, x: np.ndarray, train: Tensor) -> tuple[str, ...]:
    """What to say of inputs [samples, ...] as they were given; ``train``: those to train on, as they are kept."""
    if not len(x):
        return ()
    low, high = (end.astype(np.float64) for end in (x.min(0), x.max(0)))
    # One at most: each says how to scale them.
    return _rounding(where, low, high) or _unscaled(where, x.dtype, low, high) or far_from_one(where, x.dtype, train)


def _unscaled(where: str, kind: np.dtype[Any], low: np.ndarray, high: np.ndarray) -> tuple[str, ...]:
    """A note on images [channels, height, width] that look like bytes but are none, and so are not scaled."""
    if kind == np.uint8 or low.ndim < 3 or low.min(initial=0) < 0 or not _DARKEST_WHITE <= high.max(initial=0) <= 255:
        return ()
    return (f"{where}: x looks like bytes but is {kind}, which is not scaled: give x.astype('uint8') or x / 255",)


def far_from_one(where: str, kind: np.dtype[Any], x: Tensor) -> tuple[str, ...]:
    """A note on measurements in units of their own; whole numbers may name words, and bytes are scaled."""
    smallest, largest = _USUAL_SIZES
    # Unlike the deviation, a norm costs less than reading x did.
    if kind.kind != "f" or not x.numel() or smallest <= torch.linalg.vector_norm(x) / x.numel() ** 0.5 <= largest:
        return ()
    deviation, mean = (float(f"{float(found):.2g}") for found in torch.std_mean(x, correction=0))
    is_far = f"x has mean {mean:g} and deviation {deviation:g}"
    scaled = "(x - x.mean(0)) / (x.std(0) + 1e-6)"
    return (f"{where}: {is_far}: standardise its columns, {scaled}, or little is learned",)


def _rounding(where: str, low: np.ndarray, high: np.ndarray) -> tuple[str, ...]:
    """A note on columns, from low to high, that become constant when rounded to float32."""
    # Smaller differences are float64's own rounding of a column that was meant to be constant.
    lost = (low.astype(np.float32) == high.astype(np.float32)) & (high - low > 1e-12 * np.abs(high))
    if not lost.any():
        return ()
    which = f"{lost.sum()} of {lost.size} columns of x vary too little"
    return (f"{where}: {which} for float32, in which samples are kept: centre and scale them first",)
