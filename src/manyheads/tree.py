"""Arithmetic on named tensors stacked over workers: every leaf is [workers, ...]."""

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

Params = dict[str, Tensor]
"""Named tensors, every leaf [workers, ...]; a name starts with its group: ``representation.``, ``head.``, ..."""

Buffers = dict[str, Tensor]
"""BatchNorm statistics, named and stacked like Params: never masked, anchored, decayed or tracked."""


def group(name: str) -> str:
    """The group a leaf belongs to: the first part of its name."""
    return name.split(".", 1)[0]


def select(params: Mapping[str, Tensor], groups: Iterable[str]) -> Params:
    """The leaves of some groups."""
    wanted = frozenset(groups)
    return {name: leaf for name, leaf in params.items() if group(name) in wanted}


def add_prefix(params: Mapping[str, Tensor], prefix: str) -> Params:
    """Put a whole tree into one group: ``head.weight`` becomes ``personal.head.weight``."""
    return {f"{prefix}.{name}": leaf for name, leaf in params.items()}


def strip_prefix(params: Mapping[str, Tensor], prefix: str) -> Params:
    """The leaves of one group under their names inside it: the inverse of ``add_prefix``."""
    start = f"{prefix}."
    return {name[len(start) :]: leaf for name, leaf in params.items() if name.startswith(start)}


def clone(params: Mapping[str, Tensor]) -> Params:
    """A copy that shares no memory, each leaf's numbers in their order."""
    return {name: leaf.clone(memory_format=torch.contiguous_format) for name, leaf in params.items()}


def leading(params: Mapping[str, Tensor], count: int) -> Params:
    """The rows of the first workers, in the same memory."""
    return {name: leaf[:count] for name, leaf in params.items()}


def with_rows(old: Mapping[str, Tensor], new: Mapping[str, Tensor], workers: Tensor | None) -> Params:
    """The old tree with some workers' rows from the new one; None: all of them."""
    if workers is None:
        return dict(new)
    return {
        name: leaf.index_copy(0, workers.to(leaf.device), new[name][workers.to(leaf.device)])
        for name, leaf in old.items()
    }


def stack(trees: Iterable[Mapping[str, Tensor]]) -> Params:
    """One tree [W, ...] out of W trees without the worker axis."""
    all_trees = list(trees)
    return {name: torch.stack([tree[name] for tree in all_trees]) for name in all_trees[0]}


def repeat(params: Mapping[str, Tensor], num_workers: int) -> Params:
    """The same values for every worker, copied: [...] -> [W, ...]."""
    return {name: leaf.expand(num_workers, *leaf.shape).clone() for name, leaf in params.items()}


def flatten(leaf: Tensor) -> Tensor:
    """One row of numbers for each worker: [W, ...] -> [W, n]; a single number each, [W] -> [W, 1]."""
    return leaf.unsqueeze(-1).flatten(1)


def by_row(values: Tensor, leaf: Tensor) -> Tensor:
    """Values [W] shaped to multiply the rows of a leaf [W, ...]."""
    return values.view(-1, *[1] * (leaf.ndim - 1))


def forms(leaves: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and type of every leaf, to see whether two trees can replace each other."""
    return {name: (leaf.shape, leaf.dtype) for name, leaf in leaves.items()}


def row_forms(leaves: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The same for one worker's row of leaves [W, ...], whatever W is."""
    return {name: (leaf.shape[1:], leaf.dtype) for name, leaf in leaves.items()}


def nbytes(params: Mapping[str, Tensor]) -> int:
    """Bytes of one worker's row."""
    return sum(leaf[0].numel() * leaf.element_size() for leaf in params.values() if leaf.shape[0])


def as_uint8(leaf: Tensor) -> Tensor:
    """A tensor's values as bytes, [bytes] uint8; in the same memory, unless they lie apart there."""
    whole = leaf.contiguous()
    # Not view(-1): a single number may keep the stride of an expanded tensor, which cannot be viewed as bytes.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def as_bytes(leaf: Tensor) -> memoryview:
    """The same for a file or a hash, also of types that numpy does not know."""
    return as_uint8(leaf.detach().cpu()).numpy().data


def fingerprint(leaves: Mapping[str, Tensor]) -> str:
    """A hash of names and values."""
    digest = hashlib.sha256()
    for name, leaf in leaves.items():
        digest.update(name.encode())
        digest.update(as_bytes(leaf))
    return digest.hexdigest()[:12]
