"""Checkpoints: a run's state on disk, written by any number of processes and read by any other number.

Every process writes the rows of its own workers; a manifest, written last, makes the checkpoint complete::

    checkpoint/
      generation                              whose start of the run may write here
      round-000012/
        rows-00000-00015.safetensors          the rows of a block of workers
        rows-00016-00031.safetensors
        manifest.json                         what belongs together, with hashes
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyheads.errors import Transient, UserError, first_line, is_out_of_memory
from manyheads.files import fits, make_folder, read_json, sha256, wait_until, write_atomically, write_tensors
from manyheads.tree import Buffers, Params

_KEPT = 2
_MANIFEST = "manifest.json"
_GENERATION = "generation"
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


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of a run, for a process that trains some of its workers."""

    folder: Path = field(kw_only=False)
    run_id: str
    num_workers: int
    """Of the whole run."""
    workers: range
    """Those whose rows this process writes and reads."""
    rank: int = 0
    num_ranks: int = 1
    generation: str = "0"
    """Names this start of the run: only the latest start may write."""
    patience: float = 0.0
    """Seconds that a file may take to show on another host; on some network disks that is half a minute."""

    def rounds(self) -> list[int]:
        """The rounds that have a complete checkpoint, damaged or not, ascending."""
        return _complete_rounds(self.folder)

    def load(self, at_most: int | None = None) -> tuple[Snapshot | None, list[str]]:
        """The newest complete and undamaged snapshot of this process's workers, and what the user should be told.

        ``at_most``: the latest round to consider. Loading also makes this start of the run the only one that may
        write: an earlier start that was cut off but is still alive can complete no checkpoint any more. Rank 0 loads
        before any rank writes.
        """
        if self.rank == 0:
            self._refuse_another_run()
            make_folder(self.folder)
            write_atomically(self.folder / _GENERATION, self.generation.encode())
        elif not wait_until(lambda: self._owner() == self.generation, self.patience):
            raise UserError(
                f"process {self.rank} does not see what process 0 writes to {self.folder}:"
                " choose an --out on a disk that all of them see."
            )
        manifest, damage = newest(self.folder, at_most, self.workers)
        notes = [f"{what}: continuing from round {manifest.round if manifest else 0}" for what in damage]
        return None if manifest is None else read(self.folder, manifest, self.workers), notes

    def write_rows(self, snapshot: Snapshot) -> None:
        """Write this process's part of a checkpoint; when all have returned from it, rank 0 calls ``complete``."""
        self._check_generation()
        place = _place(self.folder, snapshot.round)
        make_folder(place)
        first, stop = self.workers.start, self.workers.stop
        name = f"rows-{first:05d}-{stop - 1:05d}.safetensors"
        digest = write_tensors(place / name, *_pack(snapshot))
        rows = RowsFile(name, first, stop, digest, snapshot.on_wire)
        # The hash waits beside the rows for rank 0, which need not read every process's rows again.
        ready = {"generation": self.generation, **asdict(rows)}
        write_atomically((place / name).with_suffix(".json"), json.dumps(ready).encode())

    def complete(self, round: int, seconds: float) -> None:
        """Make the rows that all processes have written a checkpoint, and delete what it makes superfluous."""
        self._check_generation()
        place = _place(self.folder, round)
        wait_until(lambda: len(self._written(place)) >= self.num_ranks, self.patience)
        files = self._written(place)
        held = [range(rows.first, rows.stop) for rows in files]
        if len(files) != self.num_ranks or not covers(held, self.num_workers):
            raise Transient(
                f"{place} holds the rows of {len(files)} of {self.num_ranks} processes:"
                " choose an --out on a disk that all of them see."
            )
        manifest = Manifest(self.run_id, round, self.num_workers, self.generation, seconds, files)
        write_atomically(place / _MANIFEST, _seal(manifest))
        self._prune(round, {_MANIFEST, *(rows.name for rows in files)})

    def _refuse_another_run(self) -> None:
        """Refuse another run's folder before anything in it is overwritten. Damage is reported later, by ``newest``."""
        for round in self.rounds():
            with suppress(_Damaged):
                manifest = _read_manifest(_place(self.folder, round), round)
                if manifest.run_id != self.run_id:
                    raise UserError(
                        f"{self.folder} belongs to run {manifest.run_id}, but this is run {self.run_id}: choose"
                        " another --out."
                    )

    def _owner(self) -> str | None:
        """The generation that process 0 has written, as far as this host can see; None: no file yet."""
        path = self.folder / _GENERATION
        return path.read_text() if path.exists() else None

    def _check_generation(self) -> None:
        if (found := self._owner()) not in (None, self.generation):
            raise Transient(
                f"{self.folder} was taken over by a later start of this run, generation {found}:"
                f" stop this one, generation {self.generation}."
            )

    def _written(self, place: Path) -> tuple[RowsFile, ...]:
        """The rows files that the processes of this start have written, in the order of the workers."""
        entries = [read_json(path) for path in place.glob("rows-*.json")]
        ours = [entry for entry in entries if fits(entry, _READY) and entry.pop("generation") == self.generation]
        rows = [RowsFile(**entry) for entry in ours]
        return tuple(sorted(rows, key=lambda each: each.first))

    def _prune(self, round: int, files: set[str]) -> None:
        """Delete all but this checkpoint and the one before it; what cannot be deleted now is tried again next time."""
        for path in _place(self.folder, round).iterdir():
            if path.name not in files:
                with suppress(OSError):
                    path.unlink()
        complete = _complete_rounds(self.folder)
        kept = [other for other in complete if other <= round][-_KEPT:]
        # A complete checkpoint of a later round is damaged, or one that not all sites have: else this run would have
        # continued from it. One that is incomplete is left alone: a process that is ahead may be writing it just now.
        for other in {*complete, *(r for r in _rounds(self.folder) if r < round)} - {*kept}:
            with suppress(OSError):
                # The manifest goes first: without it the remains of an interrupted deletion do not look like damage.
                (_place(self.folder, other) / _MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(_place(self.folder, other))


def newest(folder: Path, at_most: int | None = None, workers: range | None = None) -> tuple[Manifest | None, list[str]]:
    """The newest complete and undamaged checkpoint, and what is wrong with each later one.

    ``workers``: check only the files that hold their rows; None: check all.
    """
    damage: list[str] = []
    for round in reversed(_complete_rounds(folder)):
        if at_most is not None and round > at_most:
            continue
        try:
            return _verify(_place(folder, round), round, workers), damage
        except _Damaged as reason:
            damage.append(f"checkpoint of round {round} is damaged ({reason})")
    return None, damage


def latest_round(folder: Path) -> int:
    """The round of the newest complete checkpoint, damaged or not; 0: there is none."""
    return max(_complete_rounds(folder), default=0)


def covers(blocks: Iterable[range], num_workers: int) -> bool:
    """Whether blocks in ascending order hold every worker once."""
    held = [*blocks]
    return all(held) and [*(each.start for each in held), num_workers] == [0, *(each.stop for each in held)]


def read(folder: Path, manifest: Manifest, workers: range) -> Snapshot:
    """The snapshot of some workers, whatever blocks they were written in."""
    place = _place(folder, manifest.round)
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


class _Damaged(Exception):
    """Why a checkpoint cannot be used."""


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


def _verify(place: Path, round: int, workers: range | None) -> Manifest:
    """A checkpoint's manifest, once the files that hold these workers' rows (None: all files) match their hashes."""
    manifest = _read_manifest(place, round)
    for rows in manifest.files if workers is None else manifest.holding(workers):
        try:
            found = sha256(place / rows.name)
        except OSError as error:
            raise _Damaged(f"{rows.name}: {error.strerror}") from None
        if found != rows.sha256:
            raise _Damaged(f"sha mismatch in {rows.name}")
    return manifest


def _read_manifest(place: Path, round: int) -> Manifest:
    values = read_json(place / _MANIFEST)
    if not fits(values, _SEALED):
        raise _Damaged(f"{_MANIFEST} cannot be read")
    seal = values.pop("sha256")
    manifest = Manifest(**{**values, "files": tuple(RowsFile(**rows) for rows in values["files"])})
    elsewhere = [rows.name for rows in manifest.files if rows.name != Path(rows.name).name]
    if seal != _fingerprint(values):
        raise _Damaged(f"sha mismatch in {_MANIFEST}")
    if not covers((range(rows.first, rows.stop) for rows in manifest.files), manifest.num_workers):
        raise _Damaged(f"{_MANIFEST} does not name the rows of every worker once")
    if manifest.round != round:
        raise _Damaged(f"{_MANIFEST} is of round {manifest.round}")
    if elsewhere:
        # A run may come from somebody else, and its seal is no signature.
        raise _Damaged(f"{_MANIFEST} names {elsewhere[0]}, which is not in its folder")
    return manifest


def _place(folder: Path, round: int) -> Path:
    return folder / f"round-{round:06d}"


def _rounds(folder: Path) -> list[int]:
    """The rounds that have a folder, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(found[1]) for path in folder.iterdir() if (found := re.fullmatch(r"round-(\d{6,})", path.name)))


def _complete_rounds(folder: Path) -> list[int]:
    """The rounds that have a manifest, ascending."""
    return [round for round in _rounds(folder) if (_place(folder, round) / _MANIFEST).exists()]
