"""How much memory a run on a GPU will need, estimated before it starts: rows, slots or stack, activations, data."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from manyheads.data.shards import Shards
from manyheads.engine.cuda_graphs.compiled import wanted
from manyheads.engine.cuda_graphs.footprint import Footprint, footprint_of
from manyheads.engine.cuda_graphs.forward import WIDTH
from manyheads.engine.cuda_graphs.stacked import stackable
from manyheads.engine.precision import Precision
from manyheads.errors import UserError
from manyheads.memory import LEAST_COPIES
from manyheads.models.split import Split, constants_of, statistics
from manyheads.units import counted, human_bytes

_COPIES = 3
"""Copies of every worker's row in a round: as the round began, as its phases leave it, as mixing makes it."""
_PER_ACTIVATION = 3
"""Numbers held for each number in a layer's output: itself for backward, its gradient, and a temporary one."""
_PER_PATCH = 2
"""Numbers held for each number in the patches of convolutions: itself for backward, and a temporary one."""
_LIBRARIES = 3 << 29
"""Bytes for the CUDA context, kernels and workspaces."""
_HEAVY_STEP = 20_000_000_000
"""A worker's step with more products than this keeps the device busy alone: a few slots are then enough."""
_FEW_SLOTS, _MANY_SLOTS = 4, 8


@dataclass(frozen=True)
class MemoryPlan:
    """What a run needs, in bytes, and how it is arranged."""

    num_workers: int
    row: int
    """One worker's weights and statistics."""
    kept: int
    """All that a state holds of one worker."""
    stacked: bool
    """Whether workers are stacked in a chunk, or go through slots."""
    lanes: int
    """Workers in the chunk, or slots."""
    lane: int
    """What one of them takes: its weights while they are trained, and its activations."""
    data: int
    rows_on_host: bool = False

    @property
    def rows(self) -> int:
        """All workers' rows, in as many copies as a round holds at once."""
        return self.num_workers * self.kept * _COPIES

    @property
    def host(self) -> int:
        """What the host may have to hold."""
        return self.rows if self.rows_on_host else 0

    @property
    def work(self) -> int:
        return self.lanes * self.lane

    @property
    def device(self) -> int:
        """What the device must hold."""
        return self.work + self.data + _LIBRARIES + self.rows - self.host

    def fits(self, free: int, host: int | None = None) -> bool:
        """Whether ``free`` bytes on the device suffice, and ``host`` bytes for the fewest copies (None: no limit)."""
        return self.device <= free and (host is None or self.host * LEAST_COPIES <= host * _COPIES)

    def largest(self, free: int) -> int:
        """The most workers whose rows fit on the device beside everything else."""
        rest = replace(self, num_workers=0, rows_on_host=False).device
        return self.workers_in(max(0, free - rest))

    def workers_in(self, size: int) -> int:
        """The most workers whose rows fit into so many bytes."""
        return size // max(1, self.kept * _COPIES)


def plan_memory(
    model: Split,
    train: Shards,
    *,
    batch_size: int,
    precision: Precision,
    footprint: Footprint | None = None,
    extra_rows: float = 0.0,
) -> MemoryPlan:
    """What workers need to train a net on some shards.

    ``extra_rows``: what the algorithm's state holds of a worker besides its net, in multiples of the net.
    """
    num_workers = train.num_workers
    footprint = footprint or footprint_of(model, tuple(train.x.shape[1:]))
    number = next((p.element_size() for p in model.parameters()), 4)
    weights = sum(p.numel() for p in model.parameters())
    row = weights * number + sum(b.numel() * b.element_size() for b in statistics(model).values())
    stack_images = stacks_images(footprint, batch_size, precision)
    stacked = stackable(model, images=stack_images)
    # A weight that is trained has momentum and gradient beside it; in bf16, the gradient and a copy take 2 bytes each.
    # So has an anchor or a mask, which algorithms have whose state holds more than the net.
    at_work = weights * (2 * number + (number if not precision.low else 4) + (number if extra_rows else 0))
    # Slots also score WIDTH samples at once, but without backward: about half as many numbers for each.
    width = batch_size if stacked else max(batch_size, WIDTH // 2)
    numbers = footprint.activations * _PER_ACTIVATION + (footprint.patches * _PER_PATCH if stacked else 0)
    activations = numbers * width * (2 if precision.low else number)
    lanes = num_workers if stacked else choose_slots(footprint, batch_size)
    images = any(isinstance(layer, nn.Conv2d) for layer in model.modules())
    data = train.x.numel() * number * (2 if images else 1)
    data += sum(c.numel() * c.element_size() for c in constants_of(model).values())
    return MemoryPlan(num_workers, row, round(row * (1 + extra_rows)), stacked, lanes, at_work + activations, data)


def settle(plan: MemoryPlan, free: int, host: int | None = None) -> MemoryPlan:
    """The plan made to fit ``free`` bytes: by fewer slots or a smaller chunk, else by rows in host memory.

    ``host``: the bytes that are free there; None: unknown. A UserError if it cannot be made to fit.
    """
    for on_host in (False, True):
        lanes = plan.lanes
        while lanes >= 1:
            tried = replace(plan, lanes=lanes, rows_on_host=on_host)
            if tried.fits(free, host):
                return tried
            lanes //= 2
    smallest = replace(plan, lanes=1)
    if host is not None and replace(smallest, rows_on_host=True).fits(free):
        most = max(smallest.largest(free), smallest.workers_in(host))
        raise UserError(
            f"the rows of {plan.num_workers} workers of this model need {human_bytes(plan.rows)}, and the GPU has "
            f"{human_bytes(free)} free and its host {human_bytes(host)}, which is enough for {most}: lower --workers."
        )
    raise UserError(
        f"{plan.num_workers} workers of this model need {human_bytes(smallest.device)} on the GPU and "
        f"{human_bytes(free)} are free, which is enough for {smallest.largest(free)}: lower --workers or --batch-size."
    )


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still use on a GPU, including those that torch has reserved but does not use.

    A limit set by torch.cuda.set_per_process_memory_fraction is respected.
    """
    free, total = torch.cuda.mem_get_info(device)
    taken = torch.cuda.memory_allocated(device)
    # torch 2.6 can set this limit, but not report it.
    share = getattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    return min(free + torch.cuda.memory_reserved(device), int(share * total)) - taken


def stacks_images(footprint: Footprint, batch_size: int, precision: Precision) -> bool:
    """Whether chains with convolutions are stacked: if a worker's step is small and may be compiled."""
    compiles = wanted(torch.device("cuda")) and not precision.deterministic
    return compiles and footprint.products * batch_size <= _HEAVY_STEP


def choose_slots(footprint: Footprint, batch_size: int) -> int:
    """How many workers train side by side in slots."""
    return _FEW_SLOTS if footprint.products * batch_size > _HEAVY_STEP else _MANY_SLOTS


def describe(plan: MemoryPlan, host: int | None = None) -> list[tuple[str, str]]:
    """The plan as pairs of a label and a value, with a remark if the rows need more than ``host`` bytes there."""
    where = "host memory" if plan.rows_on_host else "device memory"
    lanes = f"{counted(plan.lanes, 'worker')} stacked" if plan.stacked else counted(plan.lanes, "slot")
    short = f", and this machine has {human_bytes(host)} free" if host is not None and plan.host > host else ""
    return [
        ("one worker", human_bytes(plan.kept)),
        (f"rows of {plan.num_workers} workers, {_COPIES} copies, in {where}", human_bytes(plan.rows) + short),
        (f"training: {lanes}", human_bytes(plan.work)),
        ("data", human_bytes(plan.data)),
        ("libraries", human_bytes(_LIBRARIES)),
        ("device memory in all", human_bytes(plan.device)),
    ]
