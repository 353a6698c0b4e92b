"""Small problems for the engine: a net, a few workers with ragged shards, rows that differ between workers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import pytest
import torch
from torch import Tensor, nn

from manyheads.data.shards import Shards
from manyheads.engine.batches import Source
from manyheads.engine.chain import ChainKernel
from manyheads.engine.local import LocalEngine
from manyheads.engine.loop import LoopKernel
from manyheads.engine.phase import SGD, Epochs, Phase, accuracy, cross_entropy, single_head
from manyheads.engine.vmapped import VmapKernel
from manyheads.engine.workload import Workload
from manyheads.models import build
from manyheads.models.nets import dnn
from manyheads.models.norm import has_batchnorm
from manyheads.randomness import torch_seed
from manyheads.threads import Threads

CLASSES = 4
WHOLE = frozenset({"representation", "head"})

RAGGED = (7, 3, 9, 5, 12)
"""In batches of 4: one worker smaller than a batch, two that leave one sample over, one that leaves three, one none."""


def normed(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """A small net with BatchNorm over images and over vectors."""
    size = 4 * input_shape[1] * input_shape[2]
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(size, 6),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Linear(6, num_outputs),
    )


class Centred(nn.Module):
    """A layer of the user's with statistics of its own: subtracts a mean that it keeps."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.3)
        return x - self.mean


def centred(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """A small net with such a layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), Centred(6), nn.ReLU(), nn.Linear(6, num_outputs))


class Summed(nn.Module):
    """A layer of the user's that adds parameters to each other, which have one gradient then, and takes a mean."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.one, self.other, self.third = (nn.Parameter(torch.full((size,), start)) for start in (0.1, 0.2, 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.one + self.other) + self.third.mean()


def summed(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """A small net with such a layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), Summed(6), nn.ReLU(), nn.Linear(6, num_outputs))


def narrow_dnn(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """The paper's dnn, dropout and all, with few weights."""
    return dnn(input_shape, num_outputs, hidden=(16, 12, 8, 6))


@dataclass(frozen=True)
class Problem:
    """What a phase can be run on."""

    work: Workload
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]

    def engine(self, kind: str, *, threads: int = 1, chunk: int = 3) -> LocalEngine:
        """The engine with one of the kernels, stacked ones in chunks of a few workers."""
        kernel = {"loop": LoopKernel, "chain": ChainKernel, "vmap": VmapKernel}[kind]
        size = 1 if kind == "loop" else chunk
        return LocalEngine(self.work, kernel, chunk_size=size, threads=Threads(threads), name=kind)

    def take(self, workers: Sequence[int]) -> "Problem":
        """The same workers' rows, samples and ids without the others."""
        chosen = list(workers)
        ids = tuple(self.work.ids[w] for w in chosen)
        work = replace(self.work, train=self.work.train.take(chosen), ids=ids)
        params, buffers = ({n: v[chosen].clone() for n, v in tree.items()} for tree in (self.params, self.buffers))
        return Problem(work, params, buffers)

    def anchor(self) -> dict[str, Tensor]:
        """Somewhere else, to be pulled to."""
        return {name: leaf.roll(1, 0) for name, leaf in self.params.items()}

    def mask(self) -> dict[str, Tensor]:
        """About half of the weights, others for each worker."""
        with torch_seed(9):
            return {name: torch.randint(0, 2, leaf.shape, dtype=torch.uint8) for name, leaf in self.params.items()}


def smooth(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """Activations whose last bits torch rounds otherwise where they fill no vector."""
    layers = [nn.Flatten(), nn.Linear(prod(input_shape), 7), nn.GELU(), nn.Linear(7, 5), nn.ELU(), nn.Linear(5, 3)]
    return nn.Sequential(*layers, nn.SiLU(), nn.Dropout(0.2), nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, num_outputs))


SMALL_NETS = {"batchnorm": normed, "centred": centred, "summed": summed, "narrow-dnn": narrow_dnn, "smooth": smooth}


def make_problem(
    net: str | Callable[..., nn.Module],
    *,
    input_shape: tuple[int, ...] = (1, 8, 8),
    sizes: Sequence[int] = RAGGED,
    batch_size: int = 4,
    dtype: torch.dtype = torch.float64,
    head: str | None = None,
    generic: bool = False,
) -> Problem:
    """A problem whose numbers are the same in every precision; ``generic`` adds FedRoD's second head.

    ``net`` is one of the library's nets, one of SMALL_NETS, or a factory.
    """
    with torch_seed(1):
        example = torch.linspace(0, 1, 2 * prod(input_shape)).view(2, *input_shape)
        model = build(SMALL_NETS.get(net, net), input_shape, CLASSES, head=head, example=example).to(dtype)
        if generic:
            model = model.with_head("generic", detach=frozenset({"head"}))
        total = sum(sizes)
        x = torch.randn(total, *input_shape, dtype=torch.float64).to(dtype)
        y = torch.randint(CLASSES, (total,))
        offsets = tuple(torch.tensor([0, *sizes]).cumsum(0).tolist())
        train = Shards(x, torch.randperm(total), y, offsets)

        def differing(leaf: Tensor) -> Tensor:
            if not leaf.is_floating_point():
                return leaf.repeat(len(sizes))
            exact = leaf.to(torch.float64)
            spread = 0.3 * float(exact.std(correction=0)) or 0.1
            return (exact + spread * (torch.rand(len(sizes), *leaf.shape, dtype=torch.float64) - 0.5)).to(dtype)

        params = {name: differing(p.detach()) for name, p in model.named_parameters()}
        persistent = model.state_dict()
        buffers = {name: differing(b) for name, b in model.named_buffers() if name in persistent}
    source = Source(seed=5, batch_size=batch_size, skip_single=has_batchnorm(model))
    ids = tuple(10 + 3 * worker for worker in range(len(sizes)))
    return Problem(Workload(model, train, ids, source, cross_entropy, accuracy), params, buffers)


def make_phase(**changes: object) -> Phase:
    """Two passes of plain SGD over everything, unless it is said otherwise."""
    plain = Phase("body", WHOLE, Epochs(2), SGD(0.1, weight_decay=0.01), single_head(cross_entropy))
    return replace(plain, **changes)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="session")
def problem() -> Callable[..., Problem]:
    return make_problem


@pytest.fixture(scope="session")
def phase() -> Callable[..., Phase]:
    return make_phase


@pytest.fixture(scope="session")
def small_nets() -> dict[str, Callable[..., nn.Module]]:
    return SMALL_NETS
