"""One checkpoint: the files of a run's state after a round, and how they are written, read and checked."""

import hashlib
import json
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyheads.errors import UserError, first_line, is_out_of_memory
from manyheads.files import sha256, write_atomically, write_tensors
from manyheads.json_text import fits, read_json
from manyheads.tree import Buffers, Params

_MANIFEST = "manifest.json"
_COUNT = range(2**63)
_ROWS_FILE = {"name": str, "first": _COUNT, "stop": _COUNT, "sha256": str, "on_wire": _COUNT}
_READY = {"generation": str, **_ROWS_FILE}
"""What waits beside a file of rows until the checkpoint is complete."""
_SEALED = {
    "run_id": str,
    "round": _COUNT,
    "num_workers": _COUNT,
    "generation": str,
    "seconds": float,
    "files": [_ROWS_FILE],
    "sha256": str,
}
"""What a manifest's file holds."""
_ABOUT = {"params": [str], "buffers": [str], "simulated_seconds": float}
"""The metadata of a file of rows."""


@dataclass(frozen=True)
class Snapshot:
    """A run between two rounds, as one process sees it."""

    round: int
    """Rounds finished."""
    params: Params
    """Rows of the hosted workers, in order."""
    buffers: Buffers
    sent: np.ndarray
    """Bytes each hosted worker has sent, [W] int64."""
    received: np.ndarray
    on_wire: int
    """Bytes this process has handed to the transport. Only their sum over processes has a meaning after a restart."""
    seconds: float
    simulated_seconds: float = 0.0
    """The same for every process."""


@dataclass(frozen=True)
class RowsFile:
    """One file of a checkpoint: the rows of workers first..stop - 1."""

    name: str
    first: int
    stop: int
    sha256: str
    on_wire: int


@dataclass(frozen=True)
class Manifest:
    """What makes a checkpoint complete."""

    run_id: str
    round: int
    num_workers: int
    generation: str
    seconds: float
    files: tuple[RowsFile, ...]

    def holding(self, workers: range) -> list[RowsFile]:
        """The files that hold rows of these workers."""
        return [rows for rows in self.files if rows.first < workers.stop and workers.start < rows.stop]


class Damaged(Exception):
    """Why a checkpoint cannot be used."""


def write_rows(place: Path, snapshot: Snapshot, workers: range, generation: str) -> None:
    """Write the rows of some workers, and beside them what the manifest will say of the file."""
    first, stop = workers.start, workers.stop
    name = f"rows-{first:05d}-{stop - 1:05d}.safetensors"
    digest = write_tensors(place / name, *_pack(snapshot))
    rows = RowsFile(name, first, stop, digest, snapshot.on_wire)
    # The hash waits there for rank 0, which need not read every process's rows again.
    ready = {"generation": generation, **asdict(rows)}
    write_atomically((place / name).with_suffix(".json"), json.dumps(ready).encode())


def written_rows(place: Path, generation: str) -> tuple[RowsFile, ...]:
    """The rows files that the processes of a start of the run have written, in the order of the workers."""
    entries = [read_json(path) for path in place.glob("rows-*.json")]
    ours = [entry for entry in entries if fits(entry, _READY) and entry.pop("generation") == generation]
    rows = [RowsFile(**entry) for entry in ours]
    return tuple(sorted(rows, key=lambda each: each.first))


def finish(place: Path, manifest: Manifest) -> None:
    """Make the rows a checkpoint, by its manifest, and delete all else, as far as that can be deleted now."""
    write_atomically(place / _MANIFEST, _seal(manifest))
    files = {_MANIFEST, *(rows.name for rows in manifest.files)}
    for path in place.iterdir():
        if path.name not in files:
            with suppress(OSError):
                path.unlink()


def is_complete(place: Path) -> bool:
    """Whether the checkpoint has its manifest; it may be damaged nevertheless."""
    return (place / _MANIFEST).exists()


def remove(place: Path) -> None:
    """Delete a checkpoint."""
    # The manifest goes first: without it the remains of an interrupted deletion do not look like damage.
    (place / _MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(place)


def covers(blocks: Iterable[range], num_workers: int) -> bool:
    """Whether blocks in ascending order hold every worker once."""
    held = [*blocks]
    return all(held) and [*(each.start for each in held), num_workers] == [0, *(each.stop for each in held)]


def read(place: Path, manifest: Manifest, workers: range) -> Snapshot:
    """The snapshot of some workers, whatever blocks they were written in."""
    try:
        return _read(place, manifest, workers)
    except (SafetensorError, KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        # The hashes are right, so that it was not damaged but made by somebody else.
        raise UserError(
            f"{place} is no checkpoint of this run ({first_line(error)}): put it back, or delete it."
        ) from None


def _read(place: Path, manifest: Manifest, workers: range) -> Snapshot:
    parts: dict[str, list[Tensor]] = {}
    about: dict[str, Any] = {}
    files = manifest.holding(workers)
    for rows in files:
        wanted = slice(max(workers.start, rows.first) - rows.first, min(workers.stop, rows.stop) - rows.first)
        with safe_open(place / rows.name, framework="pt") as file:
            about = {name: json.loads(text) for name, text in file.metadata().items()}
            for name in file.keys():  # noqa: SIM118 (a safetensors file is no dict)
                parts.setdefault(name, []).append(file.get_slice(name)[wanted])
    # Copied even from a single file: without that a leaf is a view of the file, which is deleted later in the run.
    leaves = {name: torch.cat(blocks) for name, blocks in parts.items()}
    lengths = {len(leaf) for leaf in leaves.values()}
    if not fits(about, _ABOUT) or lengths != {len(workers)} or {leaves[n].ndim for n in ("sent", "received")} != {1}:
        raise ValueError("it does not have the rows of these workers")
    return Snapshot(
        round=manifest.round,
        params={name: leaves[f"params.{name}"] for name in about["params"]},
        buffers={name: leaves[f"buffers.{name}"] for name in about["buffers"]},
        sent=leaves["sent"].numpy(),
        received=leaves["received"].numpy(),
        on_wire=sum(rows.on_wire for rows in files if rows.first in workers),
        seconds=manifest.seconds,
        simulated_seconds=about["simulated_seconds"],
    )


def _pack(snapshot: Snapshot) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Leaves and metadata of a rows file. The order of the leaves is kept: sums over all of them depend on it."""
    trees = {"params": snapshot.params, "buffers": snapshot.buffers}
    leaves = {f"{kind}.{name}": leaf for kind, tree in trees.items() for name, leaf in tree.items()}
    leaves |= {"sent": torch.tensor(snapshot.sent), "received": torch.tensor(snapshot.received)}
    about = {**{kind: list(tree) for kind, tree in trees.items()}, "simulated_seconds": snapshot.simulated_seconds}
    return leaves, {name: json.dumps(value) for name, value in about.items()}


def _seal(manifest: Manifest) -> bytes:
    """The manifest's text, with a hash of its own values."""
    values = asdict(manifest)
    return (json.dumps({**values, "sha256": _fingerprint(values)}, indent=2) + "\n").encode()


def _fingerprint(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def verify(place: Path, round: int, workers: range | None) -> Manifest:
    """A checkpoint's manifest, once the files that hold these workers' rows (None: all files) match their hashes."""
    manifest = read_manifest(place, round)
    for rows in manifest.files if workers is None else manifest.holding(workers):
        try:
            found = sha256(place / rows.name)
        except OSError as error:
            raise Damaged(f"{rows.name}: {error.strerror}") from None
        if found != rows.sha256:
            raise Damaged(f"sha mismatch in {rows.name}")
    return manifest


def read_manifest(place: Path, round: int) -> Manifest:
    values = read_json(place / _MANIFEST)
    if not fits(values, _SEALED):
        raise Damaged(f"{_MANIFEST} cannot be read")
    seal = values.pop("sha256")
    manifest = Manifest(**{**values, "files": tuple(RowsFile(**rows) for rows in values["files"])})
    if seal != _fingerprint(values):
        raise Damaged(f"sha mismatch in {_MANIFEST}")
    if not covers((range(rows.first, rows.stop) for rows in manifest.files), manifest.num_workers):
        raise Damaged(f"{_MANIFEST} does not name the rows of every worker once")
    if manifest.round != round:
        raise Damaged(f"{_MANIFEST} is of round {manifest.round}")
    if elsewhere := [rows.name for rows in manifest.files if rows.name != Path(rows.name).name]:
        # A run may come from somebody else, and its seal is no signature.
        raise Damaged(f"{_MANIFEST} names {elsewhere[0]}, which is not in its folder")
    return manifest
