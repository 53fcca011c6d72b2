"""Rounding of one FP32 value to a narrow element, to nearest even; to BF16 stochastically too.

Values stay FP32: the result is the element's value. Everything is exact FP32 or integer arithmetic
(and the cast to FP16), so it gives the same bits on the GPU and under the interpreter, whose own
BF16 and E4M3 casts are wrong. It relies on IEEE addition without reassociation and on
`enable_fp_fusion=False` at launch.

`round_size` rounds m = |y| to a multiple of the quantum q = 2**(max(e, EMIN) - MAN), e the
binary exponent of y, by adding and subtracting 2**23 quanta: the sum lies in [2**23, 2**24) quanta,
where FP32 keeps whole quanta and rounds half to even. Normal, subnormal and first-gap ranges are
one case.

Stochastic rounding to other elements: drawn.py.

Reference: quantlab.formats.rounding.
"""

import triton
import triton.language as tl

ABS_MASK = tl.constexpr(0x7FFFFFFF)
INF_BITS = tl.constexpr(0x7F800000)
SIGN_BIT = tl.constexpr(-0x80000000)
# Source: IEEE 754-2019; OCP 8-bit
# floating point specification 1.0 (E4M3); OCP microscaling formats 1.0 (E2M1).
E4M3_MAX = tl.constexpr(448.0)
E2M1_MAX = tl.constexpr(6.0)
FP16_TO_INF_BITS = tl.constexpr(0x477FF000)  # 65520: nearest rounding overflows from here
BF16_MAX_BITS = tl.constexpr(0x7F7F0000)
BF16_TO_INF_BITS = tl.constexpr(0x7F7F8000)  # likewise


@triton.jit
def abs_bits(x):
    """Take the bits of |x| as int32: ordered as the magnitudes, NaN above inf above the finite."""
    return x.to(tl.int32, bitcast=True) & ABS_MASK


@triton.jit
def largest_size(a, b):
    """Take the larger of |a| and |b|, NaN if one is."""
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def with_sign_of(magnitude, x):
    """Give a non-negative magnitude the sign bit of x (so that -0 stays -0)."""
    sign = x.to(tl.int32, bitcast=True) & SIGN_BIT
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def round_size(m, MAN: tl.constexpr, EMIN: tl.constexpr):
    """Round m to MAN explicit bits with least exponent EMIN, to nearest even.

    Args:
        m: FP32, 0 <= m < 2**(104 + MAN).
        MAN: explicit significand bits; MAN = EMIN gives whole numbers below 2**(MAN + 1).
        EMIN: exponent of the least normal value.

    Returns:
        FP32 of m's shape.
    """
    exponent = tl.maximum(m.to(tl.int32, bitcast=True) & INF_BITS, (EMIN + 127) << 23)
    magic = exponent.to(tl.float32, bitcast=True) * (1 << (23 - MAN))
    return (m + magic) - magic


@triton.jit
def round_bf16(x, words, SR: tl.constexpr):
    """Round to BF16: inf from 2**128 - 2**119 (below it, never), NaN kept.

    BF16 is the upper half of FP32, so rounding is an addition to the bits below it.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & ABS_MASK
    if SR:
        largest = tl.minimum(size, BF16_MAX_BITS)
        inwards = (bits >> 31).to(tl.uint32, bitcast=True)
        noise = ((words ^ inwards) ^ 0xFFFFFFFF) >> 16
        rounded = (largest + noise.to(tl.int32)) & -0x10000
        rounded = tl.where(size >= BF16_TO_INF_BITS, INF_BITS, rounded)
    else:
        # carries into the exponent, up to that of inf, where it overflows
        rounded = (size + 0x7FFF + ((size >> 16) & 1)) & -0x10000
    rounded = tl.where(size > INF_BITS, size, rounded)
    return with_sign_of(rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def round_record(x, RECORD: tl.constexpr):
    """Round a value as its record in the replay buffer is: "fp32" (kept), "fp16" or "bf16"."""
    if RECORD == "fp16":
        return x.to(tl.float16).to(tl.float32)
    elif RECORD == "bf16":
        return round_bf16(x, x, False)
    else:
        return x
