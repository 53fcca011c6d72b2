"""Stochastic rounding of FP32 values to codes or elements, in fixed point.

With y in quanta, floor(y * 2**32) as a 64-bit integer holds the lower neighbour above 32 bits that
are floor(f * 2**32), f the position between the neighbours; it does so for either sign of y. The
value goes up when the draw is below these bits: just when adding the draw's complement carries. So
one conversion and one 64-bit addition round.

Everything is exact: quanta are powers of two, 2**32 / quantum is a normal FP32 number, and products
with it only grow.

Reference: quantlab.formats.rounding, quantlab.formats.codes.
"""

import triton
import triton.language as tl

from quantlab_kernels.division import INTERPRETED, divided
from quantlab_kernels.rounding import (
    FP16_TO_INF_BITS,
    INF_BITS,
    SIGN_BIT,
    abs_bits,
    with_sign_of,
)

DRAWS = tl.constexpr(2.0**32)
E4M3_LARGEST = tl.constexpr(0x7E)
E4M3_NAN = tl.constexpr(0x7F)
E2M1_LARGEST = tl.constexpr(0x7)
WHOLE = tl.constexpr(1.5 * 2**23)  # plus a small whole number: it in the low bits
WHOLE_BITS = tl.constexpr(0x4B400000)
FP16_LARGEST = tl.constexpr(0x7BFF)
UNSEEN = tl.constexpr(20)
UNSEEN_BIT = tl.constexpr(1 << 20)


@triton.jit
def drawn_quanta(y, per_quantum, words):
    """Round y / quantum to a whole number, up when the draw says so.

    Args:
        y: FP32.
        per_quantum: FP32, 2**32 / quantum.
        words: uint32 of y's shape.

    Returns:
        int32 of y's shape; of no meaning where it does not fit or y is NaN.
    """
    scaled = y * per_quantum
    if INTERPRETED:
        fixed = tl.floor(scaled).to(tl.int64)
    else:
        fixed = tl.inline_asm_elementwise(
            "cvt.rmi.s64.f32 $0, $1;", "=l,f", [scaled], tl.int64, is_pure=True, pack=1
        )
    return ((fixed + (words ^ 0xFFFFFFFF).to(tl.int64)) >> 32).to(tl.int32)


@triton.jit
def _binade_quanta(y, words, MAN: tl.constexpr, EMIN: tl.constexpr):
    """Find the bits of y's binade, 2**EMIN at least, and y rounded in that binade's quanta."""
    binade = tl.maximum(y.to(tl.int32, bitcast=True) & INF_BITS, (EMIN + 127) << 23)
    per_quantum = ((MAN + 159) << 23) - binade + (127 << 23)  # in steps, for int32
    return binade, drawn_quanta(y, per_quantum.to(tl.float32, bitcast=True), words)


@triton.jit
def drawn_sizes(y, words, LARGEST, MAN: tl.constexpr, EMIN: tl.constexpr):
    """Round y to a narrow float and encode its magnitude: exponent field above MAN bits.

    Codes count quanta from 0 on, binade after binade, so a carry into the next binade is right.

    Args:
        y: FP32.
        words: uint32 of y's shape.
        LARGEST: uint32, the code that larger ones, inf and NaN become.
        MAN: explicit significand bits.
        EMIN: exponent of the least normal value, at most 0.

    Returns:
        uint32 of y's shape, codes; and what they were before LARGEST and an offset.
    """
    BASE: tl.constexpr = (EMIN + 127) << MAN  # subtracted last, where it costs least
    binade, quanta = _binade_quanta(y, words, MAN, EMIN)
    sizes = ((binade >> (23 - MAN)) + tl.abs(quanta)).to(tl.uint32, bitcast=True)
    return tl.minimum(sizes, LARGEST + BASE) - BASE, sizes


@triton.jit
def drawn_scaled_codes(blocks, used, words, FORMAT: tl.constexpr, FUSED: tl.constexpr):
    """Divide blocks [blocks, B] by their scales, round and encode: as `codes.scaled_codes` gives.

    Args:
        blocks: FP32 [blocks, B].
        used: FP32 [blocks], scales; NaN for poisoned blocks, whose elements are then NaN, or 0 in
            types without NaN.
        words: uint32 [blocks, B].
        FORMAT: "fp8", "nvfp4", "int8" or "int4".
        FUSED: how it divides (division.py).

    Returns:
        uint32 [blocks, B], codes in the highest bits, those below 0; but of poisoned NVFP4 blocks,
        bit UNSEEN may be anything, and of sound ones the compiler cannot tell that it is 0.
    """
    good = used == used
    y = divided(blocks, used, FUSED)
    if FORMAT == "fp8" or FORMAT == "nvfp4":
        if FORMAT == "fp8":
            largest = tl.where(good, E4M3_LARGEST, E4M3_NAN).to(tl.uint32)
            codes, _ = drawn_sizes(y, words, largest[:, None], 3, -6)
            codes = codes << 24
        else:
            largest = tl.where(good, E2M1_LARGEST, 0).to(tl.uint32)
            codes, raw = drawn_sizes(y, words, largest[:, None], 1, 0)
            codes = codes << 28 | raw & UNSEEN_BIT
        sign = blocks.to(tl.int32, bitcast=True) & tl.where(good, SIGN_BIT, 0)[:, None]
        return codes | sign.to(tl.uint32, bitcast=True)
    else:
        BITS: tl.constexpr = 4 if FORMAT == "int4" else 8
        limit = tl.where(good, (1 << (BITS - 1)) - 1, 0)[:, None]
        whole = drawn_quanta(y, DRAWS, words)
        whole = tl.minimum(tl.maximum(whole, -limit), limit)
        return whole.to(tl.uint32, bitcast=True) << (32 - BITS)


@triton.jit
def drawn_elements(
    blocks, used, words, FORMAT: tl.constexpr, FUSED: tl.constexpr, MAX: tl.constexpr
):
    """Divide blocks [blocks, B] by their scales and round: elements as values, with their signs.

    Args:
        blocks: FP32 [blocks, B].
        used: FP32 [blocks], scales; NaN for poisoned blocks, whose elements are of no meaning.
        words: uint32 [blocks, B].
        FORMAT: "fp8", "nvfp4", "int8", "int6" or "int4".
        FUSED: how it divides (division.py).
        MAX: the largest element.

    Returns:
        FP32 [blocks, B]; integers have no -0.
    """
    y = divided(blocks, used, FUSED)
    if FORMAT == "fp8" or FORMAT == "nvfp4":
        MAN: tl.constexpr = 3 if FORMAT == "fp8" else 1
        EMIN: tl.constexpr = -6 if FORMAT == "fp8" else 0
        binade, quanta = _binade_quanta(y, words, MAN, EMIN)
        # a number whose last bit stands for 2**-MAN takes up small whole numbers as they are
        MAGIC: tl.constexpr = 1.5 * 2.0 ** (23 - MAN)
        MAGIC_BITS: tl.constexpr = ((150 - MAN) << 23) + (1 << 22)
        size = (quanta + MAGIC_BITS).to(tl.float32, bitcast=True) - MAGIC
        size = tl.abs(size * binade.to(tl.float32, bitcast=True))
        return with_sign_of(tl.minimum(size, MAX), blocks)
    else:
        whole = drawn_quanta(y, DRAWS, words) + WHOLE_BITS
        whole = whole.to(tl.float32, bitcast=True) - WHOLE
        return tl.minimum(tl.maximum(whole, -MAX), MAX)


@triton.jit
def drawn_fp16(x, words):
    """Round FP32 values to FP16, inf from 65520 (below it, never), NaN kept.

    On a GPU two values go together. What nearest rounding makes of them, times 2**-48, is less than
    half the least FP16 number, so adding it in one rounding changes nothing, nor the sign of a
    zero; unless it is inf or NaN, which nearest rounding gives just where they are due.

    Returns:
        FP16 of x's shape.
    """
    size, _ = drawn_sizes(x, words, FP16_LARGEST, 10, -14)
    if INTERPRETED:
        code = (size | (x.to(tl.uint32, bitcast=True) >> 16) & 0x8000).to(tl.uint16)
        rounded = code.to(tl.float16, bitcast=True)
        return tl.where(abs_bits(x) < FP16_TO_INF_BITS, rounded, x.to(tl.float16))
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 sizes, signs, nearest, least;
            prmt.b32 sizes, $1, $2, 0x5410;
            prmt.b32 signs, $3, $4, 0x7632;
            lop3.b32 sizes, sizes, signs, 0x80008000, 0xF8;
            cvt.rn.f16x2.f32 nearest, $4, $3;
            mov.b32 least, 0x00010001;
            mul.rn.f16x2 nearest, nearest, least;
            fma.rn.f16x2 $0, nearest, least, sizes;
            }
            """,
            "=r,r,r,f,f",
            [size, x],
            tl.float16,
            is_pure=True,
            pack=2,
        )
