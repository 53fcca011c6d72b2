"""Storing one head's state in a format and reading it back, on chip, FP32 in and FP32 out.

Rounding points: scales as `quantlab.formats` forms them (FP32 block maximum, correctly rounded
division), elements as rounding.py does. A NaN or inf makes its scaled block NaN.
Formats: fp32 (kept), fp16 and bf16 (no scale), fp8 (E4M3, one FP32 scale per 128 along dk), nvfp4
(E2M1, one E4M3 scale per 16 along dk, one FP32 scale per state), int8 and int4 (one FP32 scale per
state row); each to nearest even or stochastic.
Not covered: scales in other types, other tiles (`store_kind` refuses them).
"""

from dataclasses import dataclass
from fractions import Fraction

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantlab.formats import Format
from quantlab.formats.block_scale import scale_cap
from quantlab.formats.scale import SCALE_TYPES
from quantlab_kernels.draws import COPY_STRIDE, tile_words
from quantlab_kernels.rounding import (
    E2M1_MAX,
    E4M3_MAX,
    INF_BITS,
    abs_bits,
    round_bf16,
    round_fp16,
    round_magnitude,
    with_sign_of,
)

STORE_NAMES = {
    "fp32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
    "fp8": "fp8",
    "nvfp4": "nvfp4",
    "int8@row": "int8",
    "int4@row": "int4",
}
"""Short name of a format, without its rounding, to FORMAT."""

FP8_BLOCK = tl.constexpr(128)
NVFP4_BLOCK = tl.constexpr(16)


def _cap(factor: Fraction | int) -> tl.constexpr:
    """Find the largest FP32 scale whose product with `factor` is finite: the formats' cap."""
    return tl.constexpr(scale_cap(SCALE_TYPES["float32"], Fraction(factor)))


FP8_CAP = _cap(448)
INT8_CAP = _cap(127)
INT4_CAP = _cap(7)
# less by 2^-20 for the two roundings of block scale times state scale
NVFP4_STATE_CAP = _cap(6 * 448 * (1 + Fraction(1, 1 << 20)))


@triton.jit
def has_nonfinite(x):
    """Whether any element of a tile is NaN or inf."""
    return tl.max(tl.max(abs_bits(x), axis=1), axis=0) >= INF_BITS


@triton.jit
def _blocks(x, BLOCK: tl.constexpr):
    """View a tile [R, C] as its blocks [R * C / B, B]; a row no longer than BLOCK is one."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    B: tl.constexpr = BLOCK if BLOCK < C else C
    return tl.reshape(x, [R * C // B, B])


@triton.jit
def _scaled_element(
    x, divisor, words, QMAX: tl.constexpr, MAN: tl.constexpr, EMIN: tl.constexpr, SR: tl.constexpr
):
    """Round x / divisor to an element, saturating at QMAX; NaN divisors give unspecified values."""
    y = tl.div_rn(x, divisor)
    y = tl.minimum(tl.maximum(y, -QMAX), QMAX)
    return with_sign_of(round_magnitude(y, words, MAN, EMIN, SR), x)


@triton.jit
def _block_amax(blocks):
    """Largest magnitude of each block, and whether it holds a NaN or an inf."""
    bits = tl.max(abs_bits(blocks), axis=1)
    return bits.to(tl.float32, bitcast=True), bits >= INF_BITS


@triton.jit
def _plain_scale(amax, bad, QMAX: tl.constexpr, CAP: tl.constexpr):
    """FP32 scale amax / QMAX up to CAP, 1 where that is 0, NaN if poisoned: [blocks, 1]."""
    scale = tl.minimum(tl.div_rn(amax, QMAX), CAP)
    scale = tl.where(scale == 0.0, 1.0, scale)
    return tl.where(bad, float("nan"), scale)[:, None]


@triton.jit
def _nvfp4_scale(amax, bad):
    """Block scale times state scale, [blocks, 1] FP32: 0 where it underflows, NaN if poisoned."""
    largest = tl.max(tl.where(bad, 0.0, amax), axis=0)
    state = tl.div_rn(largest, E4M3_MAX * E2M1_MAX)
    state = tl.minimum(tl.where(state == 0.0, 1.0, state), NVFP4_STATE_CAP)
    block = tl.minimum(tl.div_rn(tl.div_rn(amax, E2M1_MAX), state), E4M3_MAX)
    scale = round_magnitude(block, block, 3, -6, False) * state
    return tl.where(bad, float("nan"), scale)[:, None]


@triton.jit
def _store_scaled(x, words, FORMAT: tl.constexpr, SR: tl.constexpr):
    if FORMAT == "nvfp4":
        blocks = _blocks(x, NVFP4_BLOCK)
    elif FORMAT == "fp8":
        blocks = _blocks(x, FP8_BLOCK)
    else:
        blocks = x
    if SR:
        words = tl.reshape(words, blocks.shape)
    amax, bad = _block_amax(blocks)
    if FORMAT == "nvfp4":
        scale = _nvfp4_scale(amax, bad)
        # a scale that underflowed makes a zero block
        divisor = tl.where(scale == 0.0, float("inf"), scale)
        y = _scaled_element(blocks, divisor, words, E2M1_MAX, 1, 0, SR)
    elif FORMAT == "fp8":
        scale = _plain_scale(amax, bad, E4M3_MAX, FP8_CAP)
        y = _scaled_element(blocks, scale, words, E4M3_MAX, 3, -6, SR)
    else:
        QMAX: tl.constexpr = 127.0 if FORMAT == "int8" else 7.0
        CAP: tl.constexpr = INT8_CAP if FORMAT == "int8" else INT4_CAP
        scale = _plain_scale(amax, bad, QMAX, CAP)
        y = _scaled_element(blocks, scale, words, QMAX, 7, 7, SR) + 0.0  # no minus zero
    return tl.reshape(y * scale, x.shape)


@triton.jit
def store_and_load(
    x,
    seed,
    layer_copy,
    stream,
    flush,
    first_element,
    dk,
    FORMAT: tl.constexpr,
    SR: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    QUADS: tl.constexpr,
):
    """Round a state tile to FORMAT and return the values that would be read back.

    Args:
        x: [BLOCK_V, BLOCK_K] FP32, zero outside [dv, dk].
        seed: see `quantlab_kernels.draws.tile_words`, as all scalars up to dk.
        layer_copy: layer + 2**24 * copy.
        stream: global stream id.
        flush: flush index.
        first_element: head * dv * dk.
        dk: elements of one state row.
        FORMAT: "fp32", "fp16", "bf16", "fp8", "nvfp4", "int8" or "int4".
        SR: stochastic rounding.
        BLOCK_V: padded rows.
        BLOCK_K: padded columns.
        QUADS: dk is a multiple of four.

    Returns:
        [BLOCK_V, BLOCK_K] FP32.
    """
    if SR:
        words = tile_words(
            seed, layer_copy, stream, flush, first_element, dk, BLOCK_V, BLOCK_K, QUADS
        )
    else:
        words = x
    if FORMAT == "fp32":
        return x
    elif FORMAT == "fp16":
        return round_fp16(x, words, SR)
    elif FORMAT == "bf16":
        return round_bf16(x, words, SR)
    else:
        return _store_scaled(x, words, FORMAT, SR)


@triton.jit(do_not_specialize=["seed", "layer_copy", "flush"])
def store_kernel(
    x_ptr,
    out_ptr,
    streams_ptr,
    seed,
    layer_copy,
    flush,
    heads,
    dv,
    dk,
    FORMAT: tl.constexpr,
    SR: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    QUADS: tl.constexpr,
):
    """One program per (head, row): its whole state, so that a state scale needs no second pass."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    value = tl.arange(0, BLOCK_V)
    channel = tl.arange(0, BLOCK_K)
    mask = (value < dv)[:, None] & (channel < dk)[None, :]
    start = (row.to(tl.int64) * heads + head) * dv * dk
    place = start + value[:, None] * dk + channel[None, :]
    x = tl.load(x_ptr + place, mask=mask, other=0.0)
    stream = tl.load(streams_ptr + row)
    y = store_and_load(
        x,
        seed,
        layer_copy,
        stream,
        flush,
        head * dv * dk,
        dk,
        FORMAT,
        SR,
        BLOCK_V,
        BLOCK_K,
        QUADS,
    )
    tl.store(out_ptr + place, y, mask=mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreKind:
    """A format as the kernels know it.

    Attributes:
        name: value of FORMAT.
        sr: value of SR.
    """

    name: str
    sr: bool


def store_kind(fmt: Format) -> StoreKind:
    """Find the kernels' name of a format.

    Raises:
        ValueError: the kernels do not have it.
    """
    base = fmt.short.removesuffix("-sr")
    if base not in STORE_NAMES:
        raise ValueError(
            f"the kernels cannot store {fmt.short}; they have {', '.join(STORE_NAMES)} (and -sr). "
            "Use the torch scan for this policy."
        )
    return StoreKind(name=STORE_NAMES[base], sr=fmt.needs_words)


def tile_shape(dv: int, dk: int) -> tuple[int, int]:
    """Pad a state tile to powers of two of at least 16, the least that a product takes."""
    return max(16, triton.next_power_of_2(dv)), max(16, triton.next_power_of_2(dk))


def tile_warps(block_v: int, block_k: int) -> int:
    """Choose warps for a state tile: 64 registers of a thread hold the state, 4 warps at least."""
    return min(16, max(4, block_v * block_k // (64 * 32)))


def signed_seed(seed: int) -> int:
    """Return the int64 with the bits of a 64-bit seed."""
    return (seed & 0xFFFFFFFFFFFFFFFF) - ((seed & (1 << 63)) << 1)


def store_states(
    x: Tensor, fmt: Format, *, seed: int, layer: int, copy: int, streams: Tensor, flush: int
) -> Tensor:
    """Store states and load them again, with the random words of `quantlab.formats.philox`.

    Args:
        x: [rows, H, dv, dk] FP32, contiguous.
        fmt: the format.
        seed: 64-bit seed.
        layer: ordinal of the recurrent layer.
        copy: 0 recurrence or shared, 1 read.
        streams: int64 [rows] global stream ids.
        flush: number of the store.

    Returns:
        [rows, H, dv, dk] FP32, bit for bit `quantlab.formats.quantize`.
    """
    rows, heads, dv, dk = x.shape
    kind = store_kind(fmt)
    block_v, block_k = tile_shape(dv, dk)
    out = torch.empty_like(x)
    store_kernel[(heads, rows)](
        x,
        out,
        streams,
        signed_seed(seed),
        layer + copy * COPY_STRIDE.value,
        flush,
        heads,
        dv,
        dk,
        FORMAT=kind.name,
        SR=kind.sr,
        BLOCK_V=block_v,
        BLOCK_K=block_k,
        QUADS=dk % 4 == 0,
        num_warps=tile_warps(block_v, block_k),
        enable_fp_fusion=False,
    )
    return out
