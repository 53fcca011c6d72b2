"""Storing one head's state in a format and reading it back, on chip, FP32 in and FP32 out.

Rounding points: scales as `quantlab.formats` forms them (FP32 block maximum, correctly rounded
division: division.py), elements as rounding.py does. A NaN or inf makes its scaled block NaN.
Formats: fp32 (kept), fp16 and bf16 (no scale), fp8 (E4M3, one FP32 scale per 128 along dk), nvfp4
(E2M1, one E4M3 scale per 16 along dk, one FP32 scale per state), int8, int6, int4 (one FP32 scale
per state row); each to nearest even or stochastic.
Not covered: scales in other types, other tiles (`store_kind` refuses them).
"""

from dataclasses import dataclass
from fractions import Fraction

import triton
import triton.language as tl

from quantlab.formats import Format
from quantlab.formats.block_scale import scale_cap
from quantlab.formats.scale import SCALE_TYPES
from quantlab_kernels.division import divide, divided, divisor, quotient
from quantlab_kernels.drawn import drawn_elements, drawn_fp16
from quantlab_kernels.draws import tile_words
from quantlab_kernels.rounding import (
    E2M1_MAX,
    E4M3_MAX,
    INF_BITS,
    abs_bits,
    round_bf16,
    round_size,
    with_sign_of,
)

STORE_NAMES = {
    "fp32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
    "fp8": "fp8",
    "nvfp4": "nvfp4",
    "int8@row": "int8",
    "int6@row": "int6",
    "int4@row": "int4",
}
"""Short name of a format, without its rounding, to FORMAT."""

FP8_BLOCK = tl.constexpr(128)
NVFP4_BLOCK = tl.constexpr(16)
INT8_MAX = tl.constexpr(127.0)
INT6_MAX = tl.constexpr(31.0)
INT4_MAX = tl.constexpr(7.0)


def _cap(factor: Fraction | int) -> tl.constexpr:
    """Find the largest FP32 scale whose product with `factor` is finite: the formats' cap."""
    return tl.constexpr(scale_cap(SCALE_TYPES["float32"], Fraction(factor)))


FP8_CAP = _cap(448)
INT8_CAP = _cap(127)
INT6_CAP = _cap(31)
INT4_CAP = _cap(7)
# less by 2^-20 for the two roundings of block scale times state scale
NVFP4_STATE_CAP = _cap(6 * 448 * (1 + Fraction(1, 1 << 20)))


@triton.jit
def has_nonfinite(x):
    """Whether any element of a tile is NaN or inf."""
    return tl.max(tl.max(abs_bits(x), axis=1), axis=0) >= INF_BITS


@triton.jit
def state_blocks(x, FORMAT: tl.constexpr):
    """View a tile [R, C] as its scale blocks [R * C / B, B]; a row no longer than B is one."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    if FORMAT == "nvfp4":
        B: tl.constexpr = NVFP4_BLOCK if NVFP4_BLOCK < C else C
    elif FORMAT == "fp8":
        B: tl.constexpr = FP8_BLOCK if FP8_BLOCK < C else C
    else:
        B: tl.constexpr = C
    return tl.reshape(x, [R * C // B, B])


@triton.jit
def _plain_scale(amax, QMAX: tl.constexpr, CAP: tl.constexpr):
    """FP32 scale amax / QMAX up to CAP, 1 where that is 0."""
    scale = tl.minimum(divide(amax, 1.0 / QMAX), CAP)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def scales_of(size_bits, FORMAT: tl.constexpr, FUSED: tl.constexpr = True):
    """Find the scales of blocks from the bits of their largest magnitudes.

    Args:
        size_bits: int32 [blocks], bits of the largest magnitude, above those of inf with a NaN; for
            NVFP4 all the blocks of a state, padded by zeros.
        FORMAT: "fp8", "nvfp4", "int8", "int6" or "int4".
        FUSED: how it divides (division.py).

    Returns:
        stored: FP32 [blocks], values of the scale's type; NaN for a block with a NaN or an inf.
        state: FP32 scalar, the state scale (1 where the format has none).
        used: FP32 [blocks], stored times state scale: what decoded elements are multiplied by.
    """
    if FORMAT == "nvfp4":
        state = state_scale(largest_sound(size_bits))
    else:
        state = tl.full((), 1.0, tl.float32)
    stored, used = block_scales(size_bits, state, FORMAT, FUSED)
    return stored, state, used


@triton.jit
def largest_sound(size_bits):
    """Find the largest of magnitudes given by their bits, blocks that are not finite left out."""
    return tl.max(tl.where(size_bits >= INF_BITS, 0, size_bits), axis=0)


@triton.jit
def state_scale(largest_bits):
    """Find the scale of an NVFP4 state from the bits of its largest magnitude."""
    state = divide(largest_bits.to(tl.float32, bitcast=True), 1.0 / (E4M3_MAX * E2M1_MAX))
    return tl.minimum(tl.where(state == 0.0, 1.0, state), NVFP4_STATE_CAP)


@triton.jit
def block_scales(size_bits, state, FORMAT: tl.constexpr, FUSED: tl.constexpr = True):
    """Find what `scales_of` does of some of a state's blocks: stored and used scales."""
    amax = size_bits.to(tl.float32, bitcast=True)
    if FORMAT == "nvfp4":
        shift, minus, inverse = divisor(state, FUSED)
        y = quotient(divide(amax, 1.0 / E2M1_MAX), shift, minus, inverse, FUSED)
        y = tl.minimum(y, E4M3_MAX)
        stored = round_size(y, 3, -6)
    elif FORMAT == "fp8":
        stored = _plain_scale(amax, E4M3_MAX, FP8_CAP)
    elif FORMAT == "int8":
        stored = _plain_scale(amax, INT8_MAX, INT8_CAP)
    elif FORMAT == "int6":
        stored = _plain_scale(amax, INT6_MAX, INT6_CAP)
    else:
        stored = _plain_scale(amax, INT4_MAX, INT4_CAP)
    stored = tl.where(size_bits >= INF_BITS, float("nan"), stored)
    used = stored * state if FORMAT == "nvfp4" else stored
    return stored, used


@triton.constexpr_function
def element_max(name):
    """Find the largest element of a scaled format."""
    return {"fp8": 448.0, "nvfp4": 6.0, "int8": 127.0, "int6": 31.0, "int4": 7.0}[name]


@triton.jit
def scaled_elements(blocks, used, FORMAT: tl.constexpr, FUSED: tl.constexpr = True):
    """Round blocks [blocks, B] divided by their scales to the nearest elements, without signs.

    Returns:
        FP32 magnitudes; in poisoned blocks 480, whose E4M3 code would be NaN's, or 0 for types
        that have no NaN.
    """
    # a scale that underflowed makes a zero block; a poisoned one is NaN, and the least of NaN and a
    # limit is the limit (on GPUs and under the interpreter, but for that of Triton 3.6)
    m = tl.abs(divided(blocks, used, FUSED))
    limit = tl.where(used == used, element_max(FORMAT), 480.0 if FORMAT == "fp8" else 0.0)
    m = tl.minimum(m, limit[:, None])
    if FORMAT == "nvfp4":
        return round_size(m, 1, 0)
    elif FORMAT == "fp8":
        return round_size(m, 3, -6)
    else:
        return round_size(m, 7, 7)


@triton.jit
def stored_fp16(x, words, SR: tl.constexpr):
    """Round FP32 values to FP16, inf from 65520 (below it, never), NaN kept."""
    if SR:
        return drawn_fp16(x, words)
    else:
        return x.to(tl.float16)


@triton.jit
def signed_elements(blocks, used, words, FORMAT: tl.constexpr, SR: tl.constexpr):
    """Round blocks divided by their scales: FP32 values with their signs, integers without -0.

    Elements of poisoned blocks are finite and of no meaning: their scales are NaN.
    """
    if SR:
        return drawn_elements(blocks, used, words, FORMAT, True, element_max(FORMAT))
    y = with_sign_of(scaled_elements(blocks, used, FORMAT), blocks)
    if FORMAT == "int8" or FORMAT == "int6" or FORMAT == "int4":
        y += 0.0  # no minus zero
    return y


@triton.jit
def _store_scaled(x, words, FORMAT: tl.constexpr, SR: tl.constexpr):
    blocks = state_blocks(x, FORMAT)
    if SR:
        words = tl.reshape(words, blocks.shape)
    _, _, used = scales_of(tl.max(abs_bits(blocks), axis=1), FORMAT)
    y = signed_elements(blocks, used, words, FORMAT, SR)
    return tl.reshape(y * used[:, None], x.shape)


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
        FORMAT: a value of `STORE_NAMES`.
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
        return stored_fp16(x, words, SR).to(tl.float32)
    elif FORMAT == "bf16":
        return round_bf16(x, words, SR)
    else:
        return _store_scaled(x, words, FORMAT, SR)


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
