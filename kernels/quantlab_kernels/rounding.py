"""Rounding of one FP32 value to a narrow element, to nearest even or stochastically.

Values stay FP32: the result is the element's value. Everything is exact FP32 or integer arithmetic,
so it gives the same bits on the GPU and under the interpreter, whose own BF16 and E4M3 casts are
wrong. It relies on IEEE addition without reassociation and on `enable_fp_fusion=False` at launch.

`round_magnitude` rounds |y| to a multiple of the quantum q = 2**(max(e, EMIN) - MAN), e the binary
exponent of y, by adding and subtracting 2**23 quanta: the sum lies in [2**23, 2**24) quanta, where
FP32 keeps whole quanta and rounds half to even. Normal, subnormal and first-gap ranges are one
case.

Stochastic: y goes up, towards +infinity, when the draw is below floor(f * 2**32), f its position
between its neighbours. With g = f of the magnitude, exact in FP32 as g * 2**32, a positive y grows
when draw < floor(g * 2**32); a negative one, for which up is inwards, when
draw >= 2**32 - ceil(g * 2**32), that is when the complement of the draw is below ceil(g * 2**32).

Reference: quantlab.formats.rounding.
"""

import triton
import triton.language as tl

ABS_MASK = tl.constexpr(0x7FFFFFFF)
INF_BITS = tl.constexpr(0x7F800000)
# Source: IEEE 754-2019; OCP 8-bit
# floating point specification 1.0 (E4M3); OCP microscaling formats 1.0 (E2M1).
E4M3_MAX = tl.constexpr(448.0)
E2M1_MAX = tl.constexpr(6.0)
FP16_MAX = tl.constexpr(65504.0)
FP16_TO_INF = tl.constexpr(65520.0)  # nearest rounding overflows from here
BF16_MAX_BITS = tl.constexpr(0x7F7F0000)
BF16_TO_INF_BITS = tl.constexpr(0x7F7F8000)  # likewise


@triton.jit
def abs_bits(x):
    """Take the bits of |x| as int32: ordered as the magnitudes, NaN above inf above the finite."""
    return x.to(tl.int32, bitcast=True) & ABS_MASK


@triton.jit
def with_sign_of(magnitude, x):
    """Give a non-negative magnitude the sign bit of x (so that -0 stays -0)."""
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def round_magnitude(y, words, MAN: tl.constexpr, EMIN: tl.constexpr, SR: tl.constexpr):
    """Round |y| to MAN explicit bits with least exponent EMIN, as y itself would be rounded.

    Args:
        y: FP32, |y| < 2**(104 + MAN) and finite.
        words: uint32 of y's shape; not looked at unless SR.
        MAN: explicit significand bits; MAN = EMIN gives whole numbers below 2**(MAN + 1).
        EMIN: exponent of the least normal value.
        SR: stochastic, not to nearest even.

    Returns:
        FP32 of y's shape, the rounded magnitude.
    """
    m = tl.abs(y)
    exponent = tl.maximum(m.to(tl.int32, bitcast=True) & INF_BITS, (EMIN + 127) << 23)
    magic = (exponent + ((23 - MAN) << 23)).to(tl.float32, bitcast=True)
    nearest = (m + magic) - magic
    if SR:
        quantum = (exponent - (MAN << 23)).to(tl.float32, bitcast=True)
        lower = nearest - tl.where(nearest > m, quantum, 0.0)
        # 2**32 / quantum: its exponent field is 254 + 32 less the quantum's (in steps, for int32)
        field = ((MAN + 159) << 23) - exponent + (127 << 23)
        per_quantum = field.to(tl.float32, bitcast=True)
        position = (m - lower) * per_quantum
        negative = y < 0.0
        threshold = tl.where(negative, tl.ceil(position), position).to(tl.uint32)
        draw = tl.where(negative, words ^ 0xFFFFFFFF, words)
        return lower + tl.where(draw < threshold, quantum, 0.0)
    else:
        return nearest


@triton.jit
def round_fp16(x, words, SR: tl.constexpr):
    """Round to FP16: inf from 65520 (below it, never), NaN kept."""
    magnitude = tl.abs(x)
    inside = magnitude < FP16_TO_INF
    y = tl.where(inside, x, 0.0)
    y = tl.minimum(tl.maximum(y, -FP16_MAX), FP16_MAX)
    beyond = tl.where(magnitude >= FP16_TO_INF, float("inf"), magnitude)  # NaN stays itself
    return with_sign_of(tl.where(inside, round_magnitude(y, words, 10, -14, SR), beyond), x)


@triton.jit
def round_bf16(x, words, SR: tl.constexpr):
    """Round to BF16: inf from 2**128 - 2**119 (below it, never), NaN kept.

    BF16 is the upper half of FP32, so rounding is an addition to the bits below it.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & ABS_MASK
    if SR:
        largest = tl.minimum(size, BF16_MAX_BITS)
        draw = tl.where(bits < 0, words, words ^ 0xFFFFFFFF)
        rounded = (largest + (draw >> 16).to(tl.int32)) & -0x10000
    else:
        rounded = (size + 0x7FFF + ((size >> 16) & 1)) & -0x10000
    rounded = tl.where(size >= BF16_TO_INF_BITS, INF_BITS, rounded)
    rounded = tl.where(size > INF_BITS, size, rounded)
    return with_sign_of(rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def round_record(x, RECORD: tl.constexpr):
    """Round a value as its record in the replay buffer is: "fp32" (kept), "fp16" or "bf16"."""
    if RECORD == "fp16":
        return round_fp16(x, x, False)
    elif RECORD == "bf16":
        return round_bf16(x, x, False)
    else:
        return x
