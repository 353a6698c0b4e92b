"""A federation: the workers of one run and what each of them holds of a data set."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np
import safetensors
import torch
from torch import Tensor

from manyheads.data.dataset import Dataset
from manyheads.data.evaluation_split import TestSplit, split_test
from manyheads.data.partition import Entries, by_owner, draw_partition, parse_split
from manyheads.data.pixels import Pixels
from manyheads.data.shards import Shards
from manyheads.errors import UserError
from manyheads.files import write_tensors
from manyheads.randomness import generator
from manyheads.tree import fingerprint


@dataclass(frozen=True, eq=False)
class Federation:
    """Workers and their shards. Row w of every shard belongs to the worker with the id ``ids[w]``."""

    name: str
    """The data set's."""
    ids: tuple[int, ...]
    """The ids of the workers whose shards are here. A worker's id seeds everything that it draws."""
    train: Shards
    validation: Shards
    """Held out of the train samples; the pool is the same tensor."""
    test: Shards
    num_classes: int | None
    """None: a regression."""
    input_shape: tuple[int, ...]
    """Of one sample."""
    pixels: Pixels | None = None
    """How the inputs were made of bytes; None: they were made of other numbers."""
    notes: tuple[str, ...] = ()
    """What the user should know about the split, one line each."""
    data_digest: str | None = None
    """The data set's fingerprint if it may change under its name; None: the name identifies it."""

    @cached_property
    def class_counts(self) -> Tensor | None:
        """Train samples by worker and class, as the worker names the classes: [W, C] int64; None in a regression."""
        if self.num_classes is None:
            return None
        cells = len(self.ids) * self.num_classes
        cell = _worker_of_entry(self.train) * self.num_classes + self.train.y
        return torch.bincount(cell, minlength=cells).view(len(self.ids), self.num_classes)

    def majority_floors(self) -> Tensor:
        """What always answering its most frequent train class would score each worker, [W] in double precision.

        NaN: it has no test samples.
        """
        assert self.class_counts is not None, "a regression has no classes"
        worker = _worker_of_entry(self.test)
        hit = (self.test.y == self.class_counts.argmax(1)[worker]).double()
        weight = torch.ones_like(hit) if self.test.weight is None else self.test.weight.double()
        score = torch.bincount(worker, hit * weight, minlength=len(self.ids))
        total = torch.bincount(worker, weight, minlength=len(self.ids))
        # bincount of no entries gives integers, but all processes must gather one type.
        return score.double() / total

    def take(self, workers: Sequence[int]) -> "Federation":
        """The same federation with the shards of some rows only, in the order given."""
        parts = {part: shards.take(workers) for part, shards in self._parts().items()}
        return replace(self, ids=tuple(self.ids[w] for w in workers), **parts)

    def indices(self) -> dict[str, Tensor]:
        """Who holds what, without the pools, in the smallest types: ``ids``, ``train.index``, ``train.y``, ..."""
        tensors = {"ids": torch.tensor(self.ids, dtype=torch.int64)}
        for part, shards in self._parts().items():
            tensors[f"{part}.offsets"] = torch.tensor(shards.offsets, dtype=torch.int64)
            tensors[f"{part}.index"] = shards.index.to("cpu", torch.int32)
            tensors[f"{part}.y"] = shards.y.to("cpu", _target_type(self.num_classes))
            if shards.weight is not None:
                tensors[f"{part}.weight"] = shards.weight.to("cpu", torch.float32)
        return tensors

    def save(self, path: Path) -> None:
        """Write the partition, without the pools, with its fingerprint and that of data that may change."""
        held = self.indices()
        about = {"content": self.data_digest, "partition": fingerprint(held)}
        write_tensors(path, held, {"federation": json.dumps(about)})

    def _parts(self) -> dict[str, Shards]:
        return {"train": self.train, "validation": self.validation, "test": self.test}


def federate(
    dataset: Dataset,
    *,
    workers: int,
    split: str,
    test_split: TestSplit = "shared",
    relabel: bool = False,
    validation: float = 0.0,
    seed: int,
    first: int = 0,
) -> Federation:
    """Deal a data set to workers, as a function of the seed; their ids count from ``first``.

    With ``relabel`` every worker names the classes in its own order. ``validation`` is the part of each worker's train
    samples that is held out; at least one sample stays for training.
    """
    if relabel and dataset.num_classes is None:
        raise UserError(f"relabel needs classes, but {dataset.name} is a regression: leave it out.")
    partition = draw_partition(dataset, parse_split(split), workers, seed)
    ids = range(first, first + workers)
    train, held_out = _hold_out(by_owner(partition.owner, workers), validation, seed, ids)
    test = split_test(test_split, dataset, partition, seed)
    names = _relabelling(dataset.num_classes, ids, seed) if relabel and dataset.num_classes else None
    notes = partition.notes
    if emptied := int(((train.sizes == 1) & (held_out.sizes > 0)).sum()):
        notes += (f"workers left with one train sample by validation {validation:g}: {emptied}; hold out less",)
    if test_split == "shared" and (left_out := len(dataset.x_test) - len(test.rows)):
        notes += (f"test samples of classes or users that no worker trains on were left out: {left_out}",)
    return Federation(
        name=dataset.name,
        ids=tuple(ids),
        train=_shards(dataset.x_train, dataset.y_train, train, names),
        validation=_shards(dataset.x_train, dataset.y_train, held_out, names),
        test=_shards(dataset.x_test, dataset.y_test, test, names),
        num_classes=dataset.num_classes,
        input_shape=dataset.input_shape,
        pixels=dataset.pixels,
        notes=notes,
    )


def saved_data_digest(path: Path) -> str | None:
    """The fingerprint of the data that a partition was saved with; None: no fingerprint, or no partition."""
    return _saved(path, "content")


def saved_with_other_data(path: Path, data_digest: str | None) -> bool:
    """Whether a partition was saved with the fingerprint of other data than ``data_digest``."""
    return saved_data_digest(path) not in (None, data_digest)


def saved_other_partition(path: Path, federation: Federation) -> bool:
    """Whether a partition was saved that gives workers other samples than the federation does."""
    return _saved(path, "partition") not in (None, fingerprint(federation.indices()))


def _saved(path: Path, name: str) -> str | None:
    try:
        with safetensors.safe_open(path, "pt") as file:
            return json.loads(file.metadata()["federation"]).get(name)
    except (OSError, safetensors.SafetensorError, TypeError, KeyError, ValueError, AttributeError, RecursionError):
        return None


def mean_floor(floors: Tensor) -> float | None:
    """The mean of workers' floors [W], without those that are NaN; None: all are."""
    tested = floors[~floors.isnan()]
    return float(tested.mean()) if len(tested) else None


def describe(federation: Federation) -> list[tuple[str, str]]:
    """What a person wants to know about a split, as (name, value) lines."""
    lines = [("data", federation.name), ("workers", str(len(federation.ids)))]
    lines += [
        (f"{part} samples per worker", _spread(shards.sizes))
        for part, shards in federation._parts().items()
        if len(shards.index)
    ]
    if federation.class_counts is not None:
        counts, floor = federation.class_counts.double(), mean_floor(federation.majority_floors())
        share = float((counts.amax(1) / counts.sum(1)).mean())
        present = float((counts > 0).sum(1).double().mean())
        lines += [
            ("classes per worker", f"mean {present:.1f} of {federation.num_classes}"),
            ("majority share", f"{share:.3f} (mean share of a worker's most frequent train class)"),
            ("majority floor", "none" if floor is None else f"{floor:.3f} (accuracy of always answering that class)"),
        ]
    lines.append(("workers without test samples", str(federation.test.sizes.count(0))))
    return lines + [("note", note) for note in federation.notes]


def _spread(sizes: Sequence[int]) -> str:
    return f"min {min(sizes)}, median {median(sizes):g}, max {max(sizes)}" if sizes else "none"


def _hold_out(train: Entries, part: float, seed: int, ids: range) -> tuple[Entries, Entries]:
    """Divide every worker's train entries into those that stay and those held out for validation."""
    held = np.zeros(len(train.rows), bool)
    numbers = np.minimum((train.sizes * part + 0.5).astype(np.int64), train.sizes - 1)
    starts = train.sizes.cumsum() - train.sizes
    for worker in np.flatnonzero(numbers):
        order = generator(seed, "validation", worker=ids[worker]).permutation(train.sizes[worker])
        held[starts[worker] + order[: numbers[worker]]] = True
    return Entries(train.rows[~held], train.sizes - numbers), Entries(train.rows[held], numbers)


def _relabelling(num_classes: int, ids: range, seed: int) -> Tensor:
    """Every worker's own name for each class, [W, C]."""
    names = [generator(seed, "relabel", worker=worker).permutation(num_classes) for worker in ids]
    return torch.from_numpy(np.stack(names))


def _shards(x: Tensor, y: Tensor, entries: Entries, names: Tensor | None) -> Shards:
    index = torch.from_numpy(entries.rows)
    target = y[index]
    if names is not None:
        worker = torch.from_numpy(np.repeat(np.arange(len(entries.sizes)), entries.sizes))
        target = names[worker, target]
    weight = None if entries.weight is None else torch.from_numpy(entries.weight)
    return Shards(x, index, target, (0, *entries.sizes.cumsum().tolist()), weight)


def _worker_of_entry(shards: Shards) -> Tensor:
    """The row of the worker each entry belongs to, [entries]."""
    sizes = torch.tensor(shards.sizes, dtype=torch.int64, device=shards.index.device)
    return torch.arange(shards.num_workers, device=sizes.device).repeat_interleave(sizes)


def _target_type(num_classes: int | None) -> torch.dtype:
    if num_classes is None:
        return torch.float32
    return torch.uint8 if num_classes <= 256 else torch.int32
