"""Arrays from an npz file that somebody else has made: nothing in it is unpickled, and errors say what is wrong."""

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from manyheads.errors import UserError

WORDS = "turn words into numbers with numpy.unique(y, return_inverse=True)[1]"
"""How labels that are words become numbers."""

_GUIDE = "The user guide shows how to make one from CSV or images."
"""Advice for those who give files of another kind."""


def read_npz(path: Path, names: Iterable[str]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Those of the named arrays that an npz file has, and what it has beside them; nothing in it is unpickled."""
    file = _opened(path)
    try:
        with file:
            # numpy suggests to unpickle files of another kind, which is no advice to pass on.
            if file.read(2) != b"PK":
                raise zipfile.BadZipFile("not a zip archive")
            file.seek(0)
            with np.load(file, allow_pickle=False) as stored:
                found = {name: _array(path, stored, name) for name in names if name in stored}
                unread = [name for name in stored.files if name not in found]
        if odd := [name for name, array in found.items() if not isinstance(array, np.ndarray)]:
            raise zipfile.BadZipFile(f"{odd[0]} is not an array")
        return found, unread
    except (MemoryError, UserError):
        raise
    except Exception as error:  # numpy reads a damaged header as Python, and finds all kinds of faults in it
        raise UserError(
            f"{path} is not an npz of plain arrays, or is damaged ({error}): save it with numpy.savez, numbers and no"
            f" objects. {_GUIDE}"
        ) from None


def of_objects(where: str, name: str) -> UserError:
    """The error for an array of Python objects, as which pandas gives words."""
    kind = {"x": "float", "y": "int", "num_classes": "int"}.get(name.removesuffix("_test"), "str")
    words = f", or {WORDS}" if name.startswith("y") else ""
    return UserError(f"{where}: {name} is an array of Python objects: give {name}.astype({kind}){words}.")


def _array(path: Path, stored: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """One of the arrays in a file; one that would have to be unpickled is refused."""
    try:
        return stored[name]
    except ValueError as error:
        if "allow_pickle" in str(error):
            raise of_objects(str(path), name) from None
        raise


def _opened(path: Path) -> BinaryIO:
    """A file to read."""
    what = "give the path of an npz file."
    try:
        if path.is_dir():
            raise UserError(f"{path} is a folder: {what} {_GUIDE}")
        # Opening a pipe would wait for ever for somebody to write into it.
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is a pipe or a device: {what}")
        return path.open("rb")
    except FileNotFoundError:
        raise UserError(f"no file {path}: {what}") from None
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): fix that, or {what}") from None
