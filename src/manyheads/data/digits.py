"""The UCI optical digits: 1,797 handwritten digits of 8x8 pixels, inside the package."""

from importlib.resources import files

import numpy as np
import torch

from manyheads.data.dataset import Dataset
from manyheads.data.pixels import Pixels

_PIXELS = Pixels(scale=16)


def load() -> Dataset:
    """The data set with x [samples, 1, 8, 8] in 0..1; a stored fifth of every class is the test part."""
    with (files("manyheads.data") / "digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as stored:
        x = _PIXELS.to_inputs_(torch.from_numpy(stored["x"]).view(-1, 1, 8, 8).float())
        y = torch.from_numpy(stored["y"]).long()
        test = torch.from_numpy(stored["test"])
    return Dataset(
        "digits",
        x[~test],
        y[~test],
        x[test],
        y[test],
        num_classes=10,
        classes=tuple(str(digit) for digit in range(10)),
        pixels=_PIXELS,
    )
