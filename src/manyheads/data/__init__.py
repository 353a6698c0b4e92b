"""Data sets and who holds which part of them."""

from functools import partial
from pathlib import Path

from manyheads.data import arrays, cifar, digits, fashion_mnist, harbox, mobiact
from manyheads.data.dataset import RAW, Dataset
from manyheads.data.download import DownloadProgress
from manyheads.data.federation import Federation, federate
from manyheads.data.shards import Shards
from manyheads.data.site_files import is_site_path
from manyheads.errors import UserError, unknown
from manyheads.machine import expanded

__all__ = [
    "NAMES",
    "Dataset",
    "Federation",
    "Shards",
    "federate",
    "is_brought_by_workers",
    "is_own_file",
    "load",
    "may_change",
]

_DOWNLOADED = {
    "cifar10": partial(cifar.load, cifar.CIFAR10),
    "cifar100": partial(cifar.load, cifar.CIFAR100),
    "fashion-mnist": fashion_mnist.load,
}
"""Data sets whose files must be the published ones: others are refused by their checksums."""

_PLACED = {"harbox": harbox.load, "mobiact": mobiact.load}
"""Data sets whose files a user puts in place; there are no checksums for these."""

NAMES = ("digits", *_DOWNLOADED, *_PLACED)


def is_own_file(data: object) -> bool:
    """Whether data are named by the path of the user's own file, and not by the name of a data set."""
    return isinstance(data, str) and data.removesuffix(RAW) not in NAMES


def may_change(data: object) -> bool:
    """Whether the data under this name may change, as no checksum fixes them."""
    return isinstance(data, str) and data.removesuffix(RAW) not in ("digits", *_DOWNLOADED)


def is_brought_by_workers(data: str | Dataset) -> bool:
    """Whether workers bring their own samples: in a file for each, or as ``from_workers`` takes them."""
    return data.brought_by_workers if isinstance(data, Dataset) else is_site_path(data)


def load(
    name_or_path: str | Path, data_dir: str | Path | None = None, progress: DownloadProgress | None = None
) -> Dataset:
    """A data set by its name, or your own arrays by the path of their npz file.

    A name with ``:raw`` after it leaves the inputs as they were recorded, pixels as fractions of 255; without it they
    are standardised.
    Files are looked for in ``data_dir``, then $MANYHEADS_DATA, then the user's cache. Where a data set has an official
    address, it is downloaded into the first of these, and ``progress`` is told (file, bytes so far, bytes in all).
    """
    asked = str(name_or_path)
    name, standardised = asked.removesuffix(RAW), not asked.endswith(RAW)
    if name in _DOWNLOADED:
        return _DOWNLOADED[name](data_dir, progress, standardised=standardised)
    if name in _PLACED:
        return _PLACED[name](data_dir, standardised=standardised)
    if not standardised:
        raise unknown("data", asked, [f"{name}{RAW}" for name in (*_DOWNLOADED, *_PLACED)])
    if name == "digits":
        return digits.load()
    if is_site_path(asked):
        raise UserError(
            f"{asked} names a file for each worker, which only manyheads train can use: give one file for all, or"
            " train each algorithm and give the folder of their runs to manyheads report."
        )
    path = expanded(name_or_path)
    if path.suffix == ".npz" or path.exists():
        return arrays.load(path)
    raise unknown("data", str(name_or_path), [*NAMES, "a path to your own arrays (.npz)"])
