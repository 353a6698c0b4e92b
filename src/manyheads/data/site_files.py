"""Data that stay where they are: a file for every worker; a process opens only those of its own workers."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from manyheads.data import arrays
from manyheads.data.dataset import Dataset
from manyheads.errors import UserError
from manyheads.machine import expanded
from manyheads.units import numbered

_WORKER = "{worker}"
ONE_KIND = "give all workers one kind of sample, and num_classes where a file lacks the last classes."


def is_site_path(data: object) -> bool:
    """Whether data are named as one file for every worker: ``site-{worker}.npz``."""
    return isinstance(data, str) and _WORKER in data


def seen(template: str, num_workers: int) -> dict[str, str]:
    """The workers whose files exist on this host, each with a mark by which all who see that file know it.

    The mark tells nothing about the content.
    """
    found = {}
    for worker in range(num_workers):
        if (path := _file(template, worker)).exists():
            about = path.stat()
            mark = f"{about.st_ino} {about.st_size} {about.st_mtime_ns}"
            found[str(worker)] = hashlib.sha256(mark.encode()).hexdigest()
    return found


def load(template: str, workers: range) -> Dataset:
    """The files of some workers as one data set whose users are the workers; for a file see ``arrays.load``."""
    parts = [arrays.load(_file(template, worker), of_one_worker=True) for worker in workers]
    first = parts[0]
    for worker, part in zip(workers, parts, strict=True):
        if part.kind != first.kind:
            raise UserError(
                f"{_file(template, worker)} holds samples {part.kind}, but {_file(template, workers[0])}"
                f" {first.kind}: {ONE_KIND}"
            )

    def owners(pools: list[Tensor]) -> Tensor:
        return torch.tensor(workers).repeat_interleave(torch.tensor([len(pool) for pool in pools]))

    return Dataset(
        name=template,
        x_train=torch.cat([part.x_train for part in parts]),
        y_train=torch.cat([part.y_train for part in parts]),
        x_test=torch.cat([part.x_test for part in parts]),
        y_test=torch.cat([part.y_test for part in parts]),
        num_classes=first.num_classes,
        user_train=owners([part.x_train for part in parts]),
        user_test=owners([part.x_test for part in parts]),
        brought_by_workers=True,
        pixels=first.pixels,
        notes=_notes(template, workers, parts),
    )


def _notes(template: str, workers: range, parts: Sequence[Dataset]) -> tuple[str, ...]:
    """The notes on all files, each once with the workers whose files it is on."""
    about: dict[str, list[int]] = {}
    for worker, part in zip(workers, parts, strict=True):
        for note in part.notes:
            about.setdefault(note.removeprefix(f"{part.name}: "), []).append(worker)

    def where(whose: list[int]) -> str:
        return str(_file(template, *whose)) if len(whose) == 1 else f"{template} of {numbered('worker', whose)}"

    return tuple(f"{where(whose)}: {note}" for note, whose in about.items())


def _file(template: str, worker: int) -> Path:
    return expanded(template.replace(_WORKER, str(worker)))
