"""How the test samples are dealt to workers, so that everyone is tested on the mixture it trains on."""

from typing import Literal

import numpy as np

from manyheads.data.dataset import Dataset
from manyheads.data.partition import Entries, Partition, by_owner, count, deal, largest_remainder
from manyheads.randomness import generator

TestSplit = Literal["shared", "overlap", "reweighted"]


def split_test(kind: TestSplit, data: Dataset, partition: Partition, seed: int) -> Entries:
    """Deal the test samples so that every worker is tested on the mixture it trains on.

    ``shared``: every sample goes to one worker, each class in the proportions of the train split, rounded by largest
    remainder; under ``iid`` equal parts of the pool, under ``natural`` the samples of the worker's own users.
    ``overlap``: each worker draws about n_test / N samples with the class mixture of its train samples, without
    replacement, independently of the others.
    ``reweighted``: each worker is tested on all samples of the classes it trains on, weighted to its own class mixture.
    A regression counts as one class. The last two look at classes alone: under ``natural`` they mix users.
    """
    workers = partition.share.shape[1]
    rng = generator(seed, "test-split")
    if kind == "shared":
        totals = np.bincount(partition.test_group, minlength=len(partition.share))
        return by_owner(deal(partition.test_group, largest_remainder(partition.share, totals), rng), workers)
    if data.num_classes is None:
        label, test_label, num_classes = np.zeros(len(data.y_train), np.int64), np.zeros(len(data.y_test), np.int64), 1
    else:
        label, test_label, num_classes = data.y_train.numpy(), data.y_test.numpy(), data.num_classes
    mixture = count(label, partition.owner, num_classes, workers).T
    if kind == "overlap":
        return _overlap(mixture, test_label, rng)
    return _reweighted(mixture, test_label)


def _overlap(mixture: np.ndarray, test_label: np.ndarray, rng: np.random.Generator) -> Entries:
    """``mixture`` [W, C] holds numbers of train samples."""
    pools = [np.flatnonzero(test_label == c) for c in range(mixture.shape[1])]
    per_worker = -(-len(test_label) // len(mixture))
    wanted = -(-mixture * per_worker // mixture.sum(1, keepdims=True))
    rows = [
        np.sort(
            np.concatenate(
                [rng.choice(pool, min(n, len(pool)), replace=False) for pool, n in zip(pools, of, strict=True)]
            )
        )
        for of in wanted
    ]
    return Entries(np.concatenate(rows), np.array([len(of_worker) for of_worker in rows]))


def _reweighted(mixture: np.ndarray, test_label: np.ndarray) -> Entries:
    """``mixture`` [W, C] holds numbers of train samples."""
    per_test_sample = mixture / np.bincount(test_label, minlength=mixture.shape[1]).clip(min=1)
    rows, weights = [], []
    for of_class in per_test_sample:
        chosen = np.flatnonzero(of_class[test_label])
        weight = of_class[test_label[chosen]]
        rows.append(chosen)
        weights.append(weight * (len(chosen) / max(weight.sum(), 1e-300)))
    sizes = np.array([len(of_worker) for of_worker in rows])
    return Entries(np.concatenate(rows), sizes, np.concatenate(weights).astype(np.float32))
