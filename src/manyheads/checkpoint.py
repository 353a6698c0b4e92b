"""The checkpoints of a run, written by any number of processes and read by any other number.

Every process writes the rows of its own workers; a manifest, written last, makes the checkpoint complete::

    checkpoint/
      generation                              whose start of the run may write here
      round-000012/
        rows-00000-00015.safetensors          the rows of a block of workers
        rows-00016-00031.safetensors
        manifest.json                         what belongs together, with hashes
"""

import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from manyheads.errors import Transient, UserError
from manyheads.files import make_folder, wait_until, write_atomically
from manyheads.snapshot import (
    Damaged,
    Manifest,
    Snapshot,
    covers,
    finish,
    is_complete,
    read,
    read_manifest,
    remove,
    verify,
    write_rows,
    written_rows,
)

_KEPT = 2
_GENERATION = "generation"


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
        round = manifest.round if manifest else 0
        notes = [f"{what}: continuing from round {round}" for what in damage]
        return None if manifest is None else read(place_of(self.folder, round), manifest, self.workers), notes

    def write_rows(self, snapshot: Snapshot) -> None:
        """Write this process's part of a checkpoint; when all have returned from it, rank 0 calls ``complete``."""
        self._check_generation()
        place = place_of(self.folder, snapshot.round)
        make_folder(place)
        write_rows(place, snapshot, self.workers, self.generation)

    def complete(self, round: int, seconds: float) -> None:
        """Make the rows that all processes have written a checkpoint, and delete what it makes superfluous."""
        self._check_generation()
        place = place_of(self.folder, round)
        wait_until(lambda: len(written_rows(place, self.generation)) >= self.num_ranks, self.patience)
        files = written_rows(place, self.generation)
        held = [range(rows.first, rows.stop) for rows in files]
        if len(files) != self.num_ranks or not covers(held, self.num_workers):
            raise Transient(
                f"{place} holds the rows of {len(files)} of {self.num_ranks} processes:"
                " choose an --out on a disk that all of them see."
            )
        finish(place, Manifest(self.run_id, round, self.num_workers, self.generation, seconds, files))
        self._prune(round)

    def _refuse_another_run(self) -> None:
        """Refuse another run's folder before anything in it is overwritten. Damage is reported later, by ``newest``."""
        for round in self.rounds():
            with suppress(Damaged):
                manifest = read_manifest(place_of(self.folder, round), round)
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

    def _prune(self, round: int) -> None:
        """Delete all but this checkpoint and the one before it; what cannot be deleted now is tried again next time."""
        whole = self.rounds()
        kept = [other for other in whole if other <= round][-_KEPT:]
        # A complete checkpoint of a later round is damaged, or one that not all sites have: else this run would have
        # continued from it. One that is incomplete is left alone: a process that is ahead may be writing it just now.
        for other in {*whole, *(r for r in _rounds(self.folder) if r < round)} - {*kept}:
            with suppress(OSError):
                remove(place_of(self.folder, other))


def newest(folder: Path, at_most: int | None = None, workers: range | None = None) -> tuple[Manifest | None, list[str]]:
    """The newest complete and undamaged checkpoint, and what is wrong with each later one.

    ``workers``: check only the files that hold their rows; None: check all.
    """
    damage: list[str] = []
    for round in reversed(_complete_rounds(folder)):
        if at_most is not None and round > at_most:
            continue
        try:
            return verify(place_of(folder, round), round, workers), damage
        except Damaged as reason:
            damage.append(f"checkpoint of round {round} is damaged ({reason})")
    return None, damage


def latest_round(folder: Path) -> int:
    """The round of the newest complete checkpoint, damaged or not; 0: there is none."""
    return max(_complete_rounds(folder), default=0)


def place_of(folder: Path, round: int) -> Path:
    """Where a round's checkpoint lies."""
    return folder / f"round-{round:06d}"


def _rounds(folder: Path) -> list[int]:
    """The rounds that have a folder, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(found[1]) for path in folder.iterdir() if (found := re.fullmatch(r"round-(\d{6,})", path.name)))


def _complete_rounds(folder: Path) -> list[int]:
    """The rounds that have a manifest, ascending."""
    return [round for round in _rounds(folder) if is_complete(place_of(folder, round))]
