"""Storing states as the windowed scan holds them: values, and the factors of their operands.

Rounding points and draws: those of `folded.store_part`, which is what the scan stores by; so a scan
begins with the very operands that its windows leave behind.
Bytes: 8 an element.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantlab.formats import Format
from quantlab_kernels.cuts import lane_rows
from quantlab_kernels.draws import COPY_STRIDE, lane_channels
from quantlab_kernels.folded import sizes_of, store_part, whole_scale
from quantlab_kernels.held import held_as, store_factor
from quantlab_kernels.stores import signed_seed, store_kind, tile_shape, tile_warps


@triton.jit
def part_rows(p: tl.constexpr, BLOCK_V: tl.constexpr, TAIL_V: tl.constexpr):
    """Rows of the state in part p."""
    if p == 0:
        return tl.arange(0, BLOCK_V)
    else:
        return BLOCK_V + tl.arange(0, TAIL_V)


@triton.jit
def part_lane_rows(
    p: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TAIL_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CUTS: tl.constexpr,
):
    """Lane rows of part p, see `cuts.lane_rows`."""
    if p == 0:
        return lane_rows(BLOCK_V, BLOCK_K, CUTS)
    else:
        row, start = lane_rows(TAIL_V, BLOCK_K, CUTS)
        return BLOCK_V + row, start


@triton.jit(do_not_specialize=["seed", "layer_copy", "flush"])
def store_copy_kernel(
    x_ptr,
    out_ptr,
    factor_ptr,
    streams_ptr,
    applies_ptr,
    seed,
    layer_copy,
    flush,
    heads,
    dv,
    dk,
    FORMAT: tl.constexpr,
    SR: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TAIL_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    QUADS: tl.constexpr,
    PARTIAL: tl.constexpr,
    HELD: tl.constexpr,
    FACTORED: tl.constexpr,
):
    """One program per (head, row)."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    applies = True
    if PARTIAL:
        applies = tl.load(applies_ptr + row * heads + head) != 0
    draw = (seed, layer_copy, tl.load(streams_ptr + row), flush)
    channel = lane_channels(BLOCK_K)
    unit = row.to(tl.int64) * heads + head
    PARTS: tl.constexpr = 1 if TAIL_V == 0 else 2
    tiles = ()
    sizes = ()
    for p in tl.static_range(PARTS):
        value = part_rows(p, BLOCK_V, TAIL_V)
        mask = (value < dv)[:, None] & (channel < dk)[None, :]
        place = (unit * dv + value[:, None]) * dk + channel[None, :]
        x = tl.load(x_ptr + place, mask=mask, other=0.0)
        tiles = tiles + (x,)  # noqa: RUF005 (kernels know no unpacking)
        sizes = sizes + (sizes_of(x, FORMAT, 1),)  # noqa: RUF005
    scale = whole_scale(sizes, FORMAT)
    for p in tl.static_range(PARTS):
        rows = part_lane_rows(p, BLOCK_V, TAIL_V, BLOCK_K, 1)
        _, factor = store_part(
            tiles[p],
            sizes[p],
            scale,
            rows,
            head * dv * dk,
            draw,
            applies,
            True,
            out_ptr + unit * dv * dk,
            dv,
            dk,
            FORMAT,
            SR,
            QUADS,
            PARTIAL,
            HELD,
        )
        store_factor(factor_ptr + unit * dv, rows[0], dv, factor, FACTORED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A copy of states as stored.

    Attributes:
        values: [R, H, dv, dk] FP32, contiguous.
        factors: [R, H, dv] FP32, see held.py; 1 where operands are the values.
    """

    values: Tensor
    factors: Tensor


def row_parts(dv: int) -> tuple[int, int]:
    """Cut a state's rows into a power of two and a rest, padded to one: 160 into 128 and 64.

    A rest of fewer than 64 rows is none: the warps of a product would share too few.
    """
    whole = 1 << max(4, dv.bit_length() - 1)
    rest = max(0, dv - whole)
    tail = 0 if rest == 0 else max(64, triton.next_power_of_2(rest))
    return (whole, tail) if tail < whole else (2 * whole, 0)


def store_copy(
    x: Tensor,
    fmt: Format,
    *,
    seed: int,
    layer: int,
    copy: int,
    streams: Tensor,
    flush: int,
    applies: Tensor | None = None,
) -> Copy:
    """Store states for a scan to begin with.

    Args:
        x: [rows, H, dv, dk] FP32, contiguous.
        fmt: the format.
        seed: 64-bit seed.
        layer: ordinal of the recurrent layer.
        copy: 0 recurrence or shared, 1 read.
        streams: int64 [rows] global stream ids.
        flush: number of the store.
        applies: int8 [rows, H] whether states are stored in the format (else in FP32); None for
            all.

    Returns:
        values bit for bit `quantlab.formats.quantize`, and their factors.
    """
    rows, heads, dv, dk = x.shape
    kind = store_kind(fmt)
    block_v, tail_v = row_parts(dv)
    _, block_k = tile_shape(dv, dk)
    held, factored = held_as(kind.name, block_k, applies is not None)
    out = Copy(values=torch.empty_like(x), factors=x.new_ones((rows, heads, dv)))
    store_copy_kernel[(heads, rows)](
        x,
        out.values,
        out.factors,
        streams,
        streams if applies is None else applies,
        signed_seed(seed),
        layer + copy * COPY_STRIDE.value,
        flush,
        heads,
        dv,
        dk,
        FORMAT=kind.name,
        SR=kind.sr,
        BLOCK_V=block_v,
        TAIL_V=tail_v,
        BLOCK_K=block_k,
        QUADS=dk % 4 == 0,
        PARTIAL=applies is not None,
        HELD=held,
        FACTORED=factored,
        num_warps=tile_warps(block_v, block_k),
        enable_fp_fusion=False,
    )
    return out
