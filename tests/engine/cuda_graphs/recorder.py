"""CUDA graphs emulated on a CPU: a step's operations are recorded once and replayed on the same memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from manyheads.engine.cuda_graphs.lane import _WARM_UPS

_ATEN = torch.ops.aten
_INDEXING = {_ATEN.index, _ATEN.index_put, _ATEN.index_put_}
_BY_NUMBERS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Mistake(AssertionError):
    """Something that a CUDA graph would refuse or not survive. Not a RuntimeError, some of which the engine handles."""


class _Outside:
    """Memory from before the recording, which, like a CUDA graph, knows its address and does not keep it alive."""

    def __init__(self, storage: UntypedStorage) -> None:
        self.storage, self.address = ref(storage), storage.data_ptr()

    def find(self) -> UntypedStorage:
        storage = self.storage()
        if storage is None:
            raise Mistake("a recording reads memory that was freed.")
        if storage.data_ptr() != self.address:
            raise Mistake("a recording reads memory that has moved.")
        return storage


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: in memory from outside, or in a piece that the recording allocates, by its number."""

    memory: _Outside | int
    dtype: torch.dtype
    offset: int
    shape: Sequence[int]
    stride: Sequence[int]

    def tensor(self, allocated: dict[int, UntypedStorage]) -> Tensor:
        storage = self.memory.find() if isinstance(self.memory, _Outside) else allocated[self.memory]
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True)
class _Call:
    """An operation, with a place for every tensor it is given and the pieces of memory that its outputs lie in."""

    operation: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    outputs: list[int | None]
    """None: memory from outside, where the output is a view of it or was written there."""


class Recording:
    """The tensor operations of one run of a step. Whatever else the step does is not repeated."""

    def __init__(self, step: Callable[[], None]) -> None:
        for _ in range(_WARM_UPS):
            step()
        with _Capture() as capture:
            step()
        self._calls = capture.calls

    @torch.no_grad()
    def replay(self) -> None:
        allocated: dict[int, UntypedStorage] = {}
        for call in self._calls:
            args, options = tree_map_only(_Place, lambda place: place.tensor(allocated), (call.args, call.options))
            outputs = _storages(call.operation(*args, **options))
            allocated.update((n, s) for n, s in zip(call.outputs, outputs, strict=True) if n is not None)


class _Capture(TorchDispatchMode):
    """Inside, operations run and are written down in the form that autograd, autocast and vmap give them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        # Kept until the capture is over: memory that is not in here counts as memory from outside.
        self.allocated: dict[UntypedStorage, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        if _refused(func, args):
            raise Mistake(f"{func} waits for the device, or brings numbers from the host: it cannot be captured.")
        outside = {storage for storage in _storages(given) if storage not in self.allocated}
        places = tree_map_only(Tensor, self._place, given)
        output = func(*given[0], **given[1])
        self.calls.append(_Call(func, *places, [None if s in outside else self._number(s) for s in _storages(output)]))
        return output

    def _place(self, tensor: Tensor) -> _Place:
        storage = tensor.untyped_storage()
        memory = self._number(storage) if storage in self.allocated else _Outside(storage)
        return _Place(memory, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _number(self, storage: UntypedStorage) -> int:
        return self.allocated.setdefault(storage, len(self.allocated))


def _storages(tree: object) -> list[UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _refused(operation: Any, args: Sequence[Any]) -> bool:
    """Whether an operation has to read numbers, for its result or its shape, or brings numbers from the host."""
    if operation.overloadpacket in _INDEXING:
        # Integer indices are harmless; a mask has to be counted.
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return operation is _ATEN.lift_fresh.default or not _BY_NUMBERS.isdisjoint(operation.tags)
