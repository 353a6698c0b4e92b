"""Your own arrays as a data set: from an npz file, from memory, or one part per worker."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from manyheads.data.dataset import Dataset, check_finite
from manyheads.data.npz import WORDS, of_objects, read_npz
from manyheads.data.pixels import Pixels
from manyheads.data.remarks import far_from_one, notes_on
from manyheads.errors import UserError, one_line
from manyheads.randomness import generator
from manyheads.units import counted

Array = Any
"""Whatever numpy can make an array of: an array, a tensor, nested lists."""

_ARRAYS = ("x", "y", "x_test", "y_test", "user", "user_test", "split", "num_classes")
"""What is read of an npz file."""

_NO_SAMPLE = "{} has no train sample: give it one or leave it out."

WorkerPart = TorchDataset[Any] | tuple[Any, ...]
"""One worker's data: (x, y), (x, y, x_test, y_test), a torch Dataset of (x, y) samples, or two: (train, test)."""


def load(path: str | Path, *, of_one_worker: bool = False) -> Dataset:
    """The data set of an npz file with arrays ``x`` and ``y``, and optionally the others that ``from_arrays`` takes.

    Instead of ``x_test`` and ``y_test`` there may be ``split``, which says 'train' or 'test' of every sample.
    ``num_classes`` is needed if the last classes have no samples. ``of_one_worker``: the file holds the data of one
    worker among several.
    """
    name, (arrays, unread) = str(path), read_npz(Path(path), _ARRAYS)
    if "x" not in arrays or "y" not in arrays:
        raise UserError(
            f"{name} lacks {'x' if 'x' not in arrays else 'y'}: it needs arrays x and y, optionally"
            f" {', '.join(_ARRAYS[2:])}."
        )
    num_classes: Any = arrays.pop("num_classes", None)
    parts = _parts(name, **arrays)
    notes = notes_on(name, arrays["x"], parts[0][0])
    if unread:
        # The names come from the file and may contain anything.
        notes += (one_line(f"{name}: not read: {', '.join(unread)}; an npz can have {', '.join(_ARRAYS)}"),)
    return _dataset(name, *parts, num_classes, brought_by_workers=of_one_worker, notes=notes)


def from_arrays(
    x: Array,
    y: Array,
    x_test: Array | None = None,
    y_test: Array | None = None,
    *,
    user: Array | None = None,
    user_test: Array | None = None,
    name: str = "arrays",
    num_classes: int | None = None,
) -> Dataset:
    """A data set out of arrays in memory, which are copied.

    ``x`` is [samples, ...]: bytes are taken as pixels and scaled to 0..1, all other numbers as they are. ``y`` holds
    whole numbers 0..C-1 [samples], or floats [samples, ...] for a regression. ``user`` [samples] says who recorded a
    sample. Without a test part ``hold_out`` chooses one.
    """
    parts = _parts(name, x, y, x_test, y_test, user, user_test)
    return _dataset(name, *parts, num_classes, notes=notes_on(name, _numpy(name, "x", x), parts[0][0]))


def from_workers(parts: Sequence[WorkerPart], *, name: str = "arrays", num_classes: int | None = None) -> Dataset:
    """A data set out of one part per worker; the workers are its users, and each keeps its own part (``natural``).

    A part without test samples gets some by ``hold_out``. For the arrays see ``from_arrays``.
    """
    if not parts:
        raise UserError(f"{name}: no worker has data: give one part per worker.")
    given = [_worker_pools(f"{name}: worker {worker}", part) for worker, part in enumerate(parts)]
    pools = [(train, test) for train, test, _ in given]
    first = _kind(pools[0][0])
    for worker, (train, test) in enumerate(pools):
        if len(train[0]) == 0:
            raise UserError(_NO_SAMPLE.format(f"{name}: worker {worker}"))
        for kind in (_kind(train), _kind(test)):
            if kind != first:
                raise UserError(
                    f"{name}: worker {worker} has {kind}, worker 0 has {first}: give all workers one kind of sample."
                )

    def joined(parts: list[_Pool]) -> _Pool:
        worker = np.arange(len(parts)).repeat([len(x) for x, _, _ in parts])
        return torch.cat([x for x, _, _ in parts]), torch.cat([y for _, y, _ in parts]), worker

    train, test = (joined(list(side)) for side in zip(*pools, strict=True))
    notes = far_from_one(name, np.result_type(*(kind for _, _, kind in given)), train[0])
    # Marked only after it is checked: one site's data may lack test samples, those of all workers together must not.
    return replace(_dataset(name, train, test, num_classes, notes=notes), brought_by_workers=True)


def hold_out(y: Tensor, user: Tensor | None = None) -> Tensor:
    """Which samples are for test, [samples] bool: the same for every seed.

    A fifth of every user's samples, spread evenly over its classes (or over its range of targets); nothing of a user
    with fewer than three.
    """
    target = y.flatten(1)[:, 0].numpy() if y.ndim > 1 else y.numpy()
    who = np.zeros(len(y), np.int64) if user is None else user.numpy()
    order = np.lexsort((generator(0, "test-pool").random(len(y)), target, who))
    rank = np.arange(len(y)) - np.searchsorted(who[order], who[order])
    test = np.zeros(len(y), bool)
    test[order[rank % 5 == 2]] = True
    return torch.from_numpy(test)


_Pool = tuple[Tensor, Tensor, np.ndarray | None]
"""Inputs, targets and users' names of one part; bytes are kept as bytes here, to tell them from other numbers."""


def _kind(pool: _Pool) -> str:
    """What the samples of a part are."""
    x, y, _ = pool
    return f"{x.dtype} samples {list(x.shape[1:])} with {y.dtype} targets {list(y.shape[1:])}"


def _dataset(
    name: str,
    train: _Pool,
    test: _Pool,
    num_classes: int | None,
    *,
    brought_by_workers: bool = False,
    notes: tuple[str, ...] = (),
) -> Dataset:
    """A data set made of its two pools; the number of classes is taken from the labels unless it is given."""
    (x_train, y_train, who_train), (x_test, y_test, who_test) = train, test
    for what, one, other in (("x", x_train, x_test), ("y", y_train, y_test)):
        if one.dtype != other.dtype:
            raise UserError(f"{name}: {what} is {one.dtype} for training and {other.dtype} for test: give one type.")
    if y_train.is_floating_point():
        if num_classes is not None:
            raise UserError(f"{name}: float targets mean a regression, which has no classes: give whole numbers.")
    elif num_classes is None and len(y_train):
        num_classes = int(max(y_train.max(), y_test.max() if len(y_test) else 0)) + 1
        num_samples = len(y_train) + len(y_test)
        if num_classes > num_samples:
            raise UserError(
                f"{name}: label {num_classes - 1} in {counted(num_samples, 'sample')}: number the classes 0, 1, 2, ... "
                "(or give float targets for a regression)."
            )
    pixels = Pixels() if x_train.dtype == torch.uint8 else None
    if pixels:
        x_train, x_test = (pixels.to_inputs_(x.float()) for x in (x_train, x_test))
    user_train = user_test = users = None
    if who_train is not None and who_test is not None:
        (user_train, user_test), users = _numbered(who_train, who_test)
    return Dataset(
        name,
        x_train,
        y_train,
        x_test,
        y_test,
        num_classes,
        user_train,
        user_test,
        brought_by_workers=brought_by_workers,
        pixels=pixels,
        users=users,
        notes=notes,
    )


def _parts(
    where: str,
    x: Array,
    y: Array,
    x_test: Array | None = None,
    y_test: Array | None = None,
    user: Array | None = None,
    user_test: Array | None = None,
    split: np.ndarray | None = None,
) -> tuple[_Pool, _Pool]:
    """The train and the test pool: of the arrays given for each, or of one set divided by ``split`` or ``hold_out``."""
    inputs, targets = _samples(where, x, y)
    who = None if user is None else _users(where, "user", user, len(inputs))
    if x_test is None and y_test is None and user_test is None:
        users = None if who is None else _numbered(who)[0][0]
        test = hold_out(targets, users) if split is None else _is_test(where, split, len(inputs))
        train, held = ((inputs[at], targets[at], None if who is None else who[at.numpy()]) for at in (~test, test))
        return train, held
    if split is not None:
        raise UserError(f"{where} has split, and a test part (x_test, y_test or user_test) beside it: leave one out.")
    inputs_test, targets_test = _samples(f"{where}: the test part", x_test, y_test)
    who_test = None if user_test is None else _users(where, "user_test", user_test, len(inputs_test))
    if (who is None) != (who_test is None):
        raise UserError(f"{where} names users in one part only: give user and user_test, or neither.")
    return (inputs, targets, who), (inputs_test, targets_test, who_test)


def _worker_pools(where: str, part: WorkerPart) -> tuple[_Pool, _Pool, np.dtype[Any]]:
    """One worker's train and test pool, and the type in which its inputs were given."""
    arrays: list[Array] = []
    for side in part if isinstance(part, tuple) else (part,):
        columns = _columns(where, side) if isinstance(side, TorchDataset) else (side,)
        if isinstance(side, TorchDataset) and not columns[0]:
            if not arrays:
                raise UserError(_NO_SAMPLE.format(where))
            # An empty Dataset does not say what its samples would be like: as those before it.
            columns = [_numpy(where, what, array)[:0] for what, array in zip("xy", arrays, strict=False)]
        arrays += columns
    if len(arrays) in (2, 4):
        return *_parts(where, *arrays), _numpy(where, "x", arrays[0]).dtype
    raise UserError(
        f"{where} has {len(arrays)} arrays: give (x, y), (x, y, x_test, y_test) or torch Datasets of (x, y)."
    )


def _columns(where: str, data: TorchDataset[Any]) -> tuple[list[Any], list[Any]]:
    """Inputs and targets of a torch Dataset with a length."""
    try:
        samples = [data[i] for i in range(len(data))]  # pyright: ignore[reportArgumentType]
        if any(isinstance(sample, Mapping) for sample in samples):
            # A dict of two could be unpacked, into its keys.
            raise TypeError("a sample is a dict")
        return [_numpy(where, "x", x) for x, _ in samples], [_numpy(where, "y", y) for _, y in samples]
    except UserError:
        raise
    except (TypeError, ValueError, NotImplementedError) as error:
        raise UserError(
            f"{where} cannot be read ({error}): give a Dataset with a length, whose samples are (x, y)."
        ) from error


def _is_test(where: str, split: np.ndarray, num_samples: int) -> Tensor:
    """Which samples are for test, [samples] bool, by what ``split`` says of each."""
    if split.shape == (num_samples,) and split.dtype.kind in "US":
        # numpy does not count the bytes b"test" as equal to "test".
        words = np.array(["train", "test"], split.dtype.kind)
        if np.isin(split, words).all():
            return torch.from_numpy(split == words[1])
    raise UserError(f"{where}: split must say 'train' or 'test' once for each of the {num_samples} samples.")


def _samples(where: str, x: Array, y: Array) -> tuple[Tensor, Tensor]:
    """Inputs [samples, ...] float32 or, where they are bytes, uint8; targets int64 or float32, of one length."""
    if x is None or y is None:
        raise UserError(f"{where} lacks {'x' if x is None else 'y'}: give both.")
    inputs, targets = _numpy(where, "x", x), _numpy(where, "y", y)
    if inputs.ndim < 2 or inputs.dtype.kind not in "buif":
        wanted = "[samples, features], such as x[:, None]" if inputs.ndim == 1 else "[samples, ...]"
        raise UserError(f"{where}: x is {inputs.dtype} {list(inputs.shape)}: give numbers {wanted}.")
    whole = targets.dtype.kind != "f"
    if targets.ndim < 1 or targets.dtype.kind not in "buif" or (whole and targets.ndim > 1) or 0 in targets.shape[1:]:
        raise UserError(
            f"{where}: y is {targets.dtype} {list(targets.shape)}: give whole numbers [samples] ({_hint(targets)})."
        )
    if len(inputs) != len(targets):
        raise UserError(f"{where} has {len(inputs)} samples but {len(targets)} targets: give one target per sample.")
    with np.errstate(over="ignore"):  # too large for float32 becomes infinite, which is refused by name later
        values = torch.from_numpy(inputs.astype(np.uint8 if inputs.dtype == np.uint8 else np.float32))
        wanted = torch.from_numpy(targets.astype(np.float32 if targets.dtype.kind == "f" else np.int64))
    # Checked here, where a sample's number is still the one in the given array.
    check_finite(f"{where}: x", values)
    check_finite(f"{where}: y", wanted)
    return values, wanted


def _hint(targets: np.ndarray) -> str:
    """How to turn unusable targets into usable ones."""
    if targets.dtype.kind in "US" and targets.ndim == 1:
        return WORDS
    if targets.dtype.kind in "bui" and targets.shape[1:] == (1,):
        return "take its only column, y[:, 0]"
    if targets.dtype.kind in "bui" and targets.ndim == 2 and ((targets != 0).sum(1) == 1).all():
        return "turn one-hot rows into classes with y.argmax(1)"
    return "or, in Python, floats [samples, ...] and a loss, as for a regression or several labels per sample"


def _users(where: str, name: str, user: Array, num_samples: int) -> np.ndarray:
    """The users' names as given, [samples]."""
    names = _numpy(where, name, user)
    if names.shape != (num_samples,) or names.dtype.kind not in "biuUS":
        raise UserError(
            f"{where}: {name} is {names.dtype} {list(names.shape)}: give one whole number or name for each sample."
        )
    return names


def _numbered(*pools: np.ndarray) -> tuple[list[Tensor], tuple[str, ...]]:
    """Users as numbers, [samples] int64 for each pool, and their names by number, sorted."""
    names, numbers = np.unique(np.concatenate(pools), return_inverse=True)
    told = (name.decode(errors="replace") if isinstance(name, bytes) else str(name) for name in names.tolist())
    return [*torch.from_numpy(numbers.astype(np.int64)).split([*map(len, pools)])], tuple(told)


def _numpy(where: str, what: str, values: Array) -> np.ndarray:
    rows = values if isinstance(values, list | tuple) else ()
    if np.ma.is_masked(values) or any(map(np.ma.is_masked, rows)):
        # Without its mask an array holds numbers that are not meant.
        raise UserError(f"{where}: values are masked, but all are used: give arrays without masks, or fill them.")
    try:
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:
        # The last: of a list of tensors that require gradients.
        raise UserError(f"{where}: {what} is not an array ({error}): give rows of one shape.") from None
    if array.dtype.kind == "O":
        raise of_objects(where, what)
    return array
