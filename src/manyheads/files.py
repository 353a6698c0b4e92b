"""Files that appear whole or not at all: bytes and tensors, written atomically; folders with one writer."""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyheads.errors import Transient, UserError
from manyheads.tree import as_bytes, fingerprint

_POLL_SECONDS = 0.1
_SEAL = "fingerprint"
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The types of tensors that are written, as safetensors names them."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of ``path`` when the block ends well and leaves it alone otherwise.

    What a killed process leaves behind is called ``.NAME.*.part``.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    sync(path.parent)


@contextmanager
def disk_errors(path: Path, instead: str = "write elsewhere") -> Iterator[None]:
    """Say in one line what the disk refuses inside the block: because it is full, read-only or not ours, for instance.

    ``instead``: what else the user can do.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise Transient(f"cannot write {path}: {reason}. Fix that and start again, or {instead}.") from None


def make_folder(folder: Path) -> None:
    """Make a folder, and those it lies in, unless it is there."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def locked(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Keep other processes out of a folder for the length of the block. A process that is killed keeps nobody out.

    The folder is made if need be. ``patience``: seconds to wait for a process that is about to leave it.
    """
    make_folder(folder)
    with disk_errors(folder):
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with disk_errors(folder):
            if not wait_until(lambda: _ours(handle), patience):
                raise Transient(f"another run is writing to {folder}: wait for it, stop it, or choose another --out.")
        yield
    finally:
        os.close(handle)


def wait_until(what: Callable[[], bool], patience: float) -> bool:
    """Wait for what another process does to files; whether it shows here, now or within ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def write_atomically(path: Path, content: bytes) -> None:
    """Write a whole file, or nothing."""
    with disk_errors(path), replacing(path) as file:
        file.write(content)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor | Sequence[Tensor]], metadata: Mapping[str, str] | None = None
) -> str:
    """Write a safetensors file, or nothing; returns the file's sha256.

    A leaf is a tensor, or several whose rows make it up. Leaves are streamed one after another, so that no second copy
    of them is held; each is hashed while it is written, so that the file need not be read again.
    """
    leaves = {name: [leaf] if isinstance(leaf, Tensor) else leaf for name, leaf in tensors.items()}
    # The widest types come first, as in the library's own files: every leaf then starts at a multiple of its width.
    ordered = sorted(leaves.items(), key=lambda item: (-item[1][0].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata or {})}
    end = 0
    for name, (first, *others) in ordered:
        start, end = end, end + sum(block.nbytes for block in (first, *others))
        shape = [len(first) + sum(map(len, others)), *first.shape[1:]] if others else list(first.shape)
        header[name] = {"dtype": DTYPES[first.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with disk_errors(path), replacing(path) as file, ThreadPoolExecutor(1) as hasher:
        head = len(text).to_bytes(8, "little") + text
        for chunk in chain([head], (as_bytes(block) for _, leaf in ordered for block in leaf)):
            hashed = hasher.submit(digest.update, chunk)
            file.write(chunk)
            hashed.result()
    return digest.hexdigest()


def write_sealed(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file that knows the hash of its tensors."""
    write_tensors(path, tensors, {_SEAL: _seal(tensors)})


def read_sealed(path: Path) -> dict[str, Tensor] | None:
    """What ``write_sealed`` wrote, refused if it is damaged; None: there is no such file."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            seal = (file.metadata() or {}).get(_SEAL)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}): put the file back.") from None
    if seal != _seal(found):
        raise UserError(f"{path} is damaged: put the file back.")
    return found


def sync(path: Path) -> None:
    """Make sure that what was written to a file, or renamed in a folder, survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """The hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(tensors: Mapping[str, Tensor]) -> str:
    # By name: a file keeps its tensors in another order than the caller's.
    return fingerprint(dict(sorted(tensors.items())))


def _ours(handle: int) -> bool:
    """Whether the open file is ours alone now."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
