"""A data set as every split needs it: normalised inputs and targets in a train and a test pool, checked once."""

import hashlib
from dataclasses import InitVar, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyheads.data.pixels import Pixels
from manyheads.errors import UserError
from manyheads.tree import as_bytes, flatten
from manyheads.units import counted

_MOST_CLASSES = 10**6


@dataclass(frozen=True, eq=False)
class Dataset:
    """Two pools of samples. They belong to the data set and are the same for every seed."""

    name: str
    x_train: Tensor
    """Inputs [samples, ...] float32, already normalised."""
    y_train: Tensor
    """Labels [samples] int64, or targets [samples, ...] float32 for a regression."""
    x_test: Tensor
    y_test: Tensor
    num_classes: int | None
    """None: a regression."""
    user_train: Tensor | None = None
    """Who recorded each sample, [samples] int64; None: the data set has no users."""
    user_test: Tensor | None = None
    classes: tuple[str, ...] | None = None
    """The classes in words."""
    brought_by_workers: bool = False
    """Whether its users are the workers, who bring their own samples: they keep them unless a split is given.

    They need not have any for test: other workers, elsewhere, may.
    """
    pixels: Pixels | None = None
    """How the inputs were made of bytes; None: they were made of other numbers."""
    users: tuple[str, ...] | None = None
    """What the users are called, by their numbers; None: as their numbers say."""
    notes: tuple[str, ...] = ()
    """What the user should know about the arrays that it was made of, one line each."""
    source: InitVar[str | None] = None
    """The file to name when the data are wrong; by default the data set's name."""

    def __post_init__(self, source: str | None) -> None:
        where = source or self.name
        if self.num_classes is not None:
            object.__setattr__(self, "num_classes", _class_count(where, self.num_classes))
        for pool, x, y, user in (
            ("train", self.x_train, self.y_train, self.user_train),
            ("test", self.x_test, self.y_test, self.user_test),
        ):
            if len(x) == 0 and not (pool == "test" and self.brought_by_workers):
                raise UserError(f"{where}: the {pool} part is empty: give it at least one sample.")
            _check_pool(f"{where}: the {pool} part", x, y, user, self.num_classes)
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            shapes = f"{list(self.x_train.shape[1:])} for training and {list(self.x_test.shape[1:])} for test"
            raise UserError(f"{where}: samples are {shapes}: give both parts one shape.")
        if self.classes is not None and len(self.classes) != self.num_classes:
            raise UserError(f"{where}: {len(self.classes)} class names for {self.num_classes} classes: name each once.")

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return tuple(self.x_train.shape[1:])

    @property
    def kind(self) -> str:
        """What its samples are, in words: the same for all parts of one data set."""
        inputs = f"{list(self.input_shape)} of {'bytes' if self.pixels else 'numbers'}"
        if self.num_classes is not None:
            return f"{inputs} in {counted(self.num_classes, 'class')}"
        return f"{inputs} with numbers {list(self.y_train.shape[1:])} to predict"

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for t in (self.x_train, self.y_train, self.user_train, self.x_test, self.y_test, self.user_test):
            if t is None:
                digest.update(b"none")
            else:
                digest.update(f"{t.dtype}{list(t.shape)}".encode())
                digest.update(as_bytes(t))
        if self.num_classes is not None:
            labels = torch.cat([self.y_train, self.y_test])
            # Classes without samples make another net. Without them the labels say it all.
            if self.num_classes > int(labels.max()) + 1:
                digest.update(f"{self.num_classes} classes".encode())
        return digest.hexdigest()

    def named(self, user: int) -> str:
        """What a user is called."""
        return str(user) if self.users is None else self.users[user]

    def digest(self) -> str:
        """A fingerprint of the content (sha256 over all arrays, and the number of classes), computed once."""
        return self._digest


def _class_count(where: str, given: Any) -> int:
    """The number of classes as Python's own integer, which JSON can hold, out of whatever whole number was given."""
    count = np.asarray(given)
    if count.ndim or count.dtype.kind not in "iu" or not 1 <= count <= _MOST_CLASSES:
        raise UserError(f"{where}: num_classes is {given}: give one whole number from 1 to {_MOST_CLASSES:,}.")
    return int(count)


def _check_pool(part: str, x: Tensor, y: Tensor, user: Tensor | None, num_classes: int | None) -> None:
    """Raise a UserError that begins with ``part`` unless x, y and user fit each other and hold usable numbers."""
    if len(y) != len(x):
        raise UserError(f"{part} has {len(x)} samples but {len(y)} targets: give one target per sample.")
    if user is not None and len(user) != len(x):
        raise UserError(f"{part} has {len(x)} samples but {len(user)} user entries: give one user per sample.")
    check_finite(f"{part} of x", x)
    if num_classes is None:
        check_finite(f"{part} of y", y)
    if num_classes is None or not len(y):
        return
    low, high = int(y.min()), int(y.max())
    if low < 0:
        raise UserError(f"{part} has label {low}: number the classes from 0.")
    if high >= num_classes:
        raise UserError(f"{part} has label {high}, but num_classes is {num_classes}: give at least {high + 1}.")


def check_finite(part: str, values: Tensor) -> None:
    """Refuse NaN and infinite numbers; numbers that are too large for float32 have become infinite."""
    # A sum is several times cheaper than a mask of the whole pool, and is finite only if every term is.
    if not torch.isfinite(values.sum()):
        bad = (~flatten(values.isfinite()).all(1)).nonzero()
        if len(bad):
            raise UserError(
                f"{part} holds NaN, infinite or too large numbers (first in sample {int(bad[0])}): clean or drop them."
            )


RAW = ":raw"
"""After the name of a data set: its inputs as they were recorded, not standardised."""


def standardise(x_train: Tensor, x_test: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Mean 0 and deviation 1 in every channel of the train part; the test part is moved along with it.

    Both are [samples, time * channels] with the channel running fastest, and come back as float32 of that shape.
    """
    std, mean = torch.std_mean(x_train.view(len(x_train), -1, channels).double(), (0, 1), correction=0)
    std = torch.where(std == 0, 1.0, std)

    def scaled(x: Tensor) -> Tensor:
        return ((x.view(len(x), -1, channels) - mean) / std).float().view(x.shape)

    return scaled(x_train), scaled(x_test)
