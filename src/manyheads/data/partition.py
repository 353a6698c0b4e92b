"""How the train samples are dealt to workers, said in words: ``dirichlet:0.3``, ``iid``, ``shards:2``, ``natural``."""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from manyheads.data.dataset import Dataset
from manyheads.errors import UserError, unknown
from manyheads.randomness import generator
from manyheads.units import counted, plural

NOBODY = -1
"""The owner of a sample that no worker gets."""

_REDRAWS = 100


@dataclass(frozen=True)
class Partition:
    """Who owns the train samples, and the rule by which the test samples follow them.

    Samples come in groups: classes, users, or one group of all. ``share[g, i]`` is the part of group g that went to
    worker i: a row sums to 1, or to 0 when no train sample is in the group.
    """

    owner: np.ndarray
    """The worker of each train sample, [train samples]."""
    share: np.ndarray
    """[groups, workers]."""
    test_group: np.ndarray
    """The group of each test sample, [test samples]."""
    notes: tuple[str, ...] = ()
    """What the user should know about this draw, one line each."""


@dataclass(frozen=True)
class Entries:
    """The pool rows of all workers, one worker after the other."""

    rows: np.ndarray
    """[entries]."""
    sizes: np.ndarray
    """Entries of each worker, [workers]."""
    weight: np.ndarray | None = None
    """How much each entry counts in evaluation, [entries] float32, with mean 1 in every worker; None: all the same."""


class SplitRule(Protocol):
    """A way to deal the train samples to workers. ``str(split)`` is its spec."""

    def draw(self, data: Dataset, workers: int, rng: np.random.Generator) -> Partition: ...


@dataclass(frozen=True)
class Dirichlet:
    """Every class is dealt to the workers in proportions drawn from a Dirichlet distribution, class after class.

    A worker that already holds its even part n/N gets nothing of the classes to come, unless ``capped`` is off. Drawn
    anew while a worker has fewer than min(10, n/8N) samples; after 100 redraws the draw that came closest is topped up
    from the largest workers. The test samples of a class are dealt in the same proportions as its train samples.
    """

    concentration: float
    capped: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.concentration <= 1e6:
            raise UserError(f"split '{self}': the concentration must lie above 0 and up to 1e6, as in dirichlet:0.3.")

    def __str__(self) -> str:
        return f"dirichlet:{str(self.concentration).removesuffix('.0')}{'' if self.capped else ':uncapped'}"

    def draw(self, data: Dataset, workers: int, rng: np.random.Generator) -> Partition:
        label, test_label, num_classes = _labels(data, self)
        totals = np.bincount(label, minlength=num_classes)
        smallest = math.ceil(min(10, len(label) / (8 * workers)))
        share, counts = self._proportions(totals, workers, rng)
        for _ in range(_REDRAWS):
            if _num_short(counts, smallest) == 0:
                break
            again = self._proportions(totals, workers, rng)
            share, counts = min((share, counts), again, key=lambda drawn: _num_short(drawn[1], smallest))
        owner = deal(label, counts, rng)
        num_moved = _num_short(counts, smallest)
        if num_moved == 0:
            return Partition(owner, share, test_label)
        note = (
            f"{self} left workers with fewer than {counted(smallest, 'sample')} after {_REDRAWS} redraws: "
            f"{counted(num_moved, 'sample')} moved to them from the largest workers"
        )
        return Partition(*_top_up(owner, share, label, smallest, rng), test_label, (note,))

    def _proportions(self, totals: np.ndarray, workers: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """One draw for class sizes [C]: shares and numbers of samples, both [C, workers]."""
        share = np.zeros((len(totals), workers))
        counts = np.zeros((len(totals), workers), np.int64)
        sizes = np.zeros(workers, np.int64)
        for c in np.flatnonzero(totals):
            # A Dirichlet vector renormalised over some of its entries is a Dirichlet vector of those entries.
            takers = sizes * workers < totals.sum() if self.capped else np.full(workers, True)
            share[c, takers] = rng.dirichlet(np.full(takers.sum(), self.concentration))
            # Divided by its own last value the running sum ends at exactly 1, so that no sample is left over.
            reached = share[c].cumsum()
            counts[c] = np.diff((reached / reached[-1] * totals[c]).astype(np.int64), prepend=0)
            sizes += counts[c]
        return share, counts


@dataclass(frozen=True)
class Iid:
    """Train and test samples are dealt at random, in parts of one size."""

    def __str__(self) -> str:
        return "iid"

    def draw(self, data: Dataset, workers: int, rng: np.random.Generator) -> Partition:
        group, test_group = np.zeros(len(data.x_train), np.int64), np.zeros(len(data.x_test), np.int64)
        share = np.full((1, workers), 1 / workers)
        return Partition(deal(group, largest_remainder(share, np.array([len(group)])), rng), share, test_group)


@dataclass(frozen=True)
class LabelShards:
    """The samples, sorted by class, are cut into equal pieces, and each worker gets a few (McMahan et al. 2017).

    The test samples of a class are dealt in the proportions in which its train samples came out.
    """

    per_worker: int

    def __post_init__(self) -> None:
        if self.per_worker < 1:
            raise UserError(f"{self}: the number of shards a worker gets must be 1 or more, as in shards:2.")

    def __str__(self) -> str:
        return f"shards:{self.per_worker}"

    def draw(self, data: Dataset, workers: int, rng: np.random.Generator) -> Partition:
        label, test_label, num_classes = _labels(data, self)
        pieces = workers * self.per_worker
        if pieces > len(label):
            raise UserError(
                f"{self} needs {pieces} train samples for {workers} workers, but {data.name} has {len(label)}: ask"
                " for fewer workers or shards."
            )
        in_classes = np.lexsort((rng.random(len(label)), label))
        piece_owner = rng.permutation(np.arange(pieces) % workers)
        owner = np.empty(len(label), np.int64)
        for worker, piece in zip(piece_owner, np.array_split(in_classes, pieces), strict=True):
            owner[piece] = worker
        counts = count(label, owner, num_classes, workers)
        return Partition(owner, counts / counts.sum(1, keepdims=True).clip(min=1), test_label)


@dataclass(frozen=True)
class Natural:
    """Every user is a worker, in the order of their numbers; with fewer workers, users are grouped at random.

    A worker's test samples are those of its own users. Without users there can be one worker, who has all samples.
    """

    def __str__(self) -> str:
        return "natural"

    def draw(self, data: Dataset, workers: int, rng: np.random.Generator) -> Partition:
        if data.user_train is None or data.user_test is None:
            if workers == 1:
                return Iid().draw(data, workers, rng)
            raise UserError(
                f"natural needs a data set with users, but {data.name} has none: use dirichlet:0.3, iid or shards:2."
            )
        names, user = np.unique(data.user_train.numpy(), return_inverse=True)
        if workers > len(names):
            whose = plural("part" if data.brought_by_workers else "user", len(names))
            fewer = ", or fewer" if len(names) > 1 and not data.brought_by_workers else ""
            raise UserError(
                f"{workers} workers for the {len(names)} {whose} of {data.name}: ask for --workers {len(names)}{fewer}."
            )
        worker_of = np.arange(len(names))
        notes: tuple[str, ...] = ()
        if workers < len(names):
            worker_of = rng.permutation(worker_of % workers)
            notes = (f"natural: the {len(names)} users of {data.name} were grouped into {counted(workers, 'worker')}",)
        # One more group for test users who never train: its share is zero, so nobody gets them.
        share = np.zeros((len(names) + 1, workers))
        share[np.arange(len(names)), worker_of] = 1
        place = np.searchsorted(names, data.user_test.numpy()).clip(max=len(names) - 1)
        known = names[place] == data.user_test.numpy()
        return Partition(worker_of[user], share, np.where(known, place, len(names)), notes)


_EXAMPLES = {
    "dirichlet": "dirichlet:0.3 or dirichlet:0.3:uncapped",
    "iid": "iid",
    "shards": "shards:2",
    "natural": "natural",
}


def parse_split(spec: str) -> SplitRule:
    """The split a spec names: ``dirichlet:0.3``, ``dirichlet:0.3:uncapped``, ``iid``, ``shards:2`` or ``natural``."""
    name, *values = spec.split(":")
    if name not in _EXAMPLES:
        raise unknown("split", name, _EXAMPLES)
    match name, values:
        case "iid", []:
            return Iid()
        case "natural", []:
            return Natural()
        case "dirichlet", [value] | [value, "uncapped"] if (concentration := _number(value)) is not None:
            return Dirichlet(concentration, capped=len(values) == 1)
        case "shards", [value] if value.isdecimal():
            return LabelShards(int(value))
    raise UserError(f"split '{spec}' cannot be read: write {_EXAMPLES[name]}.")


def draw_partition(data: Dataset, split: SplitRule, workers: int, seed: int) -> Partition:
    """Deal the train samples of a data set; every worker gets at least one."""
    if workers > len(data.x_train):
        num = len(data.x_train)
        raise UserError(f"{workers} workers for the {num} train samples of {data.name}: ask for at most {num}.")
    return split.draw(data, workers, generator(seed, "split"))


def largest_remainder(share: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Whole numbers [G, W] nearest to ``share * totals`` that sum to the totals [G]; rows without share stay 0."""
    quota = share * totals[:, None]
    counts = np.floor(quota).astype(np.int64)
    left = np.where(share.any(1), totals, 0) - counts.sum(1)
    by_remainder = np.argsort(counts - quota, axis=1, kind="stable")
    rank = np.argsort(by_remainder, axis=1, kind="stable")
    return counts + (rank < left[:, None])


def deal(group: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The owner of each sample [n], given its group [n] and how many of a group each worker gets, [G, W]."""
    num_groups, workers = counts.shape
    left = np.bincount(group, minlength=num_groups) - counts.sum(1)
    shuffled_by_group = np.lexsort((rng.random(len(group)), group))
    names = np.tile([*range(workers), NOBODY], num_groups)
    owner = np.empty(len(group), np.int64)
    owner[shuffled_by_group] = np.repeat(names, np.column_stack([counts, left]).ravel())
    return owner


def by_owner(owner: np.ndarray, workers: int) -> Entries:
    """The entries of every worker in ascending order, out of the owner of each pool row."""
    rows = np.argsort(owner, kind="stable")
    sizes = np.bincount(owner[owner != NOBODY], minlength=workers)
    return Entries(rows[len(rows) - sizes.sum() :], sizes)


def _top_up(
    owner: np.ndarray, share: np.ndarray, label: np.ndarray, smallest: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Move samples, and their part of the class's share, from the largest workers to those below ``smallest``."""
    owner, share = owner.copy(), share.copy()
    sizes = np.bincount(owner, minlength=share.shape[1])
    totals = np.bincount(label, minlength=len(share))
    for taker in np.flatnonzero(sizes < smallest):
        while sizes[taker] < smallest:
            giver = sizes.argmax()
            sample = rng.choice(np.flatnonzero(owner == giver))
            c = label[sample]
            part = min(1 / totals[c], share[c, giver])
            owner[sample] = taker
            sizes[[giver, taker]] += [-1, 1]
            share[c, [giver, taker]] += [-part, part]
    return owner, share


def _num_short(counts: np.ndarray, smallest: int) -> int:
    """Samples missing until every worker has ``smallest``; ``counts`` is [C, W]."""
    return int((smallest - counts.sum(0)).clip(min=0).sum())


def count(group: np.ndarray, owner: np.ndarray, num_groups: int, workers: int) -> np.ndarray:
    """How many samples of each group each worker owns, [G, W]."""
    return np.bincount(group * workers + owner, minlength=num_groups * workers).reshape(num_groups, workers)


def _labels(data: Dataset, split: SplitRule) -> tuple[np.ndarray, np.ndarray, int]:
    """Train labels, test labels and the number of classes of a data set that has them."""
    if data.num_classes is None:
        raise UserError(
            f"{split} needs classes, but {data.name} has float targets: give whole numbers (y.astype(int), or"
            " y.argmax(1) of one-hot rows), or for a regression iid and a --loss of your own."
        )
    return data.y_train.numpy(), data.y_test.numpy(), data.num_classes


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
