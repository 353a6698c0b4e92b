"""The Triton kernels of ``fused.layer_update``, imported only where they are used, as Triton may be missing."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from manyheads.engine.cuda_graphs.descent import UpdateRule
from manyheads.engine.cuda_graphs.rows import Part

_TILE_OUT, _TILE_IN, _TILE_BATCH = 16, 64, 64
_BLOCK = 2048


@triton.jit
def _move(
    weight, copy, momentum, anchor, mask, at, inside, gradient, step, mu, decay, pull,
    COPY: tl.constexpr, MOMENTUM: tl.constexpr, ANCHOR: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """What ``descent.descend_`` does, for the numbers at ``at``."""
    before = tl.load(weight + at, mask=inside, other=0.0)
    direction = gradient + decay * before
    if MOMENTUM:
        direction += mu * tl.load(momentum + at, mask=inside, other=0.0)
        tl.store(momentum + at, direction, mask=inside)
    if ANCHOR:
        direction += pull * (before - tl.load(anchor + at, mask=inside, other=0.0))
    after = before - step * direction
    if MASK:
        after *= tl.load(mask + at, mask=inside, other=0.0)
    tl.store(weight + at, after, mask=inside)
    if COPY:
        tl.store(copy + at, after.to(tl.bfloat16), mask=inside)


@triton.jit
def _update(
    weight, copy, momentum, anchor, mask, d, x, count, clip, rate,
    row_size, weight_at, bias_at, d_row, d_sample, x_row, x_sample, mu, decay, pull,
    BATCH: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    TILE_BATCH: tl.constexpr, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr,
    BIAS: tl.constexpr, COPY: tl.constexpr, MOMENTUM: tl.constexpr, ANCHOR: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Move one tile [TILE_OUT, TILE_IN] of one worker's weights."""
    row = tl.program_id(1).to(tl.int64)
    if tl.load(count + row) > 0:
        columns: tl.constexpr = (INPUTS + TILE_IN - 1) // TILE_IN
        outputs = (tl.program_id(0) // columns) * TILE_OUT + tl.arange(0, TILE_OUT)
        inputs = (tl.program_id(0) % columns) * TILE_IN + tl.arange(0, TILE_IN)
        gradient = tl.zeros([TILE_OUT, TILE_IN], dtype=tl.float32)
        bias_gradient = tl.zeros([TILE_OUT], dtype=tl.float32)
        for first in range(0, BATCH, TILE_BATCH):
            samples = first + tl.arange(0, TILE_BATCH)
            d_tile = tl.load(
                d + row * d_row + samples[None, :] * d_sample + outputs[:, None],
                mask=(samples[None, :] < BATCH) & (outputs[:, None] < OUTPUTS),
                other=0.0,
            ).to(tl.float32)
            x_tile = tl.load(
                x + row * x_row + samples[:, None] * x_sample + inputs[None, :],
                mask=(samples[:, None] < BATCH) & (inputs[None, :] < INPUTS),
                other=0.0,
            ).to(tl.float32)
            gradient = tl.dot(d_tile, x_tile, gradient, input_precision=PRECISION)
            bias_gradient += tl.sum(d_tile, 1)
        scale, step = tl.load(clip + row), tl.load(rate)
        at = row * row_size + weight_at + outputs[:, None] * INPUTS + inputs[None, :]
        inside = (outputs[:, None] < OUTPUTS) & (inputs[None, :] < INPUTS)
        _move(
            weight, copy, momentum, anchor, mask, at, inside, gradient * scale, step, mu, decay, pull,
            COPY, MOMENTUM, ANCHOR, MASK,
        )  # fmt: skip
        if BIAS:
            # The first of the tiles that share these outputs moves their bias too.
            at_bias = row * row_size + bias_at + outputs
            inside_bias = (outputs < OUTPUTS) & (tl.program_id(0) % columns == 0)
            _move(
                weight, copy, momentum, anchor, mask, at_bias, inside_bias, bias_gradient * scale, step, mu, decay,
                pull, COPY, MOMENTUM, ANCHOR, MASK,
            )  # fmt: skip


@triton.jit
def _apply(
    weight, copy, momentum, anchor, mask, gradient, count, clip, rate,
    row_size, leaf_at, size, mu, decay, pull, BLOCK: tl.constexpr,
    COPY: tl.constexpr, MOMENTUM: tl.constexpr, ANCHOR: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Move one block of one worker's leaf along its gradient."""
    row = tl.program_id(1).to(tl.int64)
    if tl.load(count + row) > 0:
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = place < size
        along = tl.load(gradient + row * size + place, mask=inside, other=0.0).to(tl.float32) * tl.load(clip + row)
        _move(
            weight, copy, momentum, anchor, mask, row * row_size + leaf_at + place, inside, along, tl.load(rate),
            mu, decay, pull, COPY, MOMENTUM, ANCHOR, MASK,
        )  # fmt: skip


class TritonUpdate:
    """For float32 rows on a GPU."""

    def __init__(self, rule: UpdateRule, *, tensor_cores: bool) -> None:
        self.rule, self.precision = rule, "tf32" if tensor_cores else "ieee"

    def by_factors(
        self, part: Part, layer: str, d: Tensor, x: Tensor, clip: Tensor, count: Tensor, rate: Tensor, *, bias: bool
    ) -> None:
        d = d if d.stride(2) == 1 else d.contiguous()
        x = x if x.stride(2) == 1 else x.contiguous()
        (rows, batch, outputs), inputs = d.shape, x.shape[2]
        offsets, rule = part.layout.offsets, self.rule
        tiles = triton.cdiv(outputs, _TILE_OUT) * triton.cdiv(inputs, _TILE_IN)
        _update[(tiles, rows)](  # pyright: ignore[reportIndexIssue]
            *_flats(part), d, x, count, clip, rate,
            part.weight.stride(0), offsets[f"{layer}.weight"], offsets[f"{layer}.bias"] if bias else 0,
            d.stride(0), d.stride(1), x.stride(0), x.stride(1), rule.momentum, rule.weight_decay, rule.pull,
            BATCH=batch, OUTPUTS=outputs, INPUTS=inputs,
            TILE_BATCH=min(_TILE_BATCH, max(16, triton.next_power_of_2(batch))),
            TILE_OUT=_TILE_OUT, TILE_IN=_TILE_IN,
            BIAS=bias, PRECISION=self.precision, **_present(part),
        )  # fmt: skip

    def by_gradient(self, part: Part, name: str, gradient: Tensor, clip: Tensor, count: Tensor, rate: Tensor) -> None:
        gradient, rule = gradient.contiguous(), self.rule
        rows, size = gradient.shape
        _apply[(triton.cdiv(size, _BLOCK), rows)](  # pyright: ignore[reportIndexIssue]
            *_flats(part), gradient, count, clip, rate,
            part.weight.stride(0), part.layout.offsets[name], size, rule.momentum, rule.weight_decay, rule.pull,
            BLOCK=_BLOCK, **_present(part),
        )  # fmt: skip


def _flats(part: Part) -> list[Tensor]:
    """A part's memory. What it does not have is never read, but a kernel needs an address: that of the weights."""
    there = (part.weight, part.compute, part.momentum, part.anchor, part.mask)
    return [part.weight if flat is None else flat for flat in there]


def _present(part: Part) -> dict[str, bool]:
    flags = {"MOMENTUM": part.momentum, "ANCHOR": part.anchor, "MASK": part.mask}
    return {"COPY": part.compute is not part.weight} | {name: flat is not None for name, flat in flags.items()}
