"""The Triton kernel of ``fused.layer_update``; imported only where Triton is."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from manyheads.engine.cuda_graphs.descent import Rule
from manyheads.engine.cuda_graphs.fused import Update
from manyheads.engine.cuda_graphs.rows import Part

_TILE = 64
_TILE_BATCH = 64


@triton.jit
def _move(
    weight, copy, momentum, anchor, mask, at, inside, gradient, step, mu, decay, pull,
    COPY: tl.constexpr, MOMENTUM: tl.constexpr, ANCHOR: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """descent.descend_ on the numbers at ``at``."""
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
    weight, copy, momentum, anchor, mask, d, x, count, factor, rate,
    row_size, weight_at, bias_at, d_row, d_sample, x_row, x_sample, mu, decay, pull,
    BATCH: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    TILE_BATCH: tl.constexpr, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr,
    BIAS: tl.constexpr, COPY: tl.constexpr, MOMENTUM: tl.constexpr, ANCHOR: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of one worker's weights: [TILE_OUT, TILE_IN]."""
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
        scale, step = tl.load(factor + row), tl.load(rate)
        at = row * row_size + weight_at + outputs[:, None] * INPUTS + inputs[None, :]
        inside = (outputs[:, None] < OUTPUTS) & (inputs[None, :] < INPUTS)
        _move(
            weight, copy, momentum, anchor, mask, at, inside, gradient * scale, step, mu, decay, pull,
            COPY, MOMENTUM, ANCHOR, MASK,
        )  # fmt: skip
        if BIAS:
            # The bias goes with the first tile of its outputs.
            at_bias = row * row_size + bias_at + outputs
            inside_bias = (outputs < OUTPUTS) & (tl.program_id(0) % columns == 0)
            _move(
                weight, copy, momentum, anchor, mask, at_bias, inside_bias, bias_gradient * scale, step, mu, decay,
                pull, COPY, MOMENTUM, ANCHOR, MASK,
            )  # fmt: skip


def triton_update(rule: Rule, *, tensor_cores: bool) -> Update:
    """For float32 rows on a GPU."""

    def update(
        part: Part, layer: str, d: Tensor, x: Tensor, factor: Tensor, count: Tensor, rate: Tensor, *, bias: bool
    ) -> None:
        d = d if d.stride(2) == 1 else d.contiguous()
        x = x if x.stride(2) == 1 else x.contiguous()
        (rows, batch, outputs), inputs = d.shape, x.shape[2]
        offsets, weight = part.layout.offsets, part.weight
        tiles = triton.cdiv(outputs, _TILE) * triton.cdiv(inputs, _TILE)
        # What is not there is never read; the weights stand in for its address.
        present = [weight if flat is None else flat for flat in (part.momentum, part.anchor, part.mask)]
        _update[(tiles, rows)](  # pyright: ignore[reportIndexIssue]
            weight, part.compute, *present, d, x, count, factor, rate,
            weight.stride(0), offsets[f"{layer}.weight"], offsets[f"{layer}.bias"] if bias else 0,
            d.stride(0), d.stride(1), x.stride(0), x.stride(1), rule.momentum, rule.weight_decay, rule.pull,
            BATCH=batch, OUTPUTS=outputs, INPUTS=inputs,
            TILE_BATCH=min(_TILE_BATCH, max(16, triton.next_power_of_2(batch))), TILE_OUT=_TILE, TILE_IN=_TILE,
            BIAS=bias, COPY=part.compute is not weight, MOMENTUM=part.momentum is not None,
            ANCHOR=part.anchor is not None, MASK=part.mask is not None,
            PRECISION="tf32" if tensor_cores else "ieee",
        )  # fmt: skip

    return update
