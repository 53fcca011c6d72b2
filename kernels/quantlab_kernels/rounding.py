"""Rounding of one FP32 value to a narrow element, to nearest even or stochastically.

Values stay FP32: the result is the element's value. Everything is exact FP32 or integer arithmetic
(and the cast to FP16), so it gives the same bits on the GPU and under the interpreter, whose own
BF16 and E4M3 casts are wrong. It relies on IEEE addition without reassociation and on
`enable_fp_fusion=False` at launch.

`round_size` rounds m = |y| to a multiple of the quantum q = 2**(max(e, EMIN) - MAN), e the
binary exponent of y, by adding and subtracting 2**23 quanta: the sum lies in [2**23, 2**24) quanta,
where FP32 keeps whole quanta and rounds half to even. Normal, subnormal and first-gap ranges are
one case.

Stochastic: y goes up, towards +infinity, when the draw is below floor(f * 2**32), f its position
between its neighbours. Seen from the nearest multiple n of |y| and the rest r = |y| - n, exact in
FP32 and at most half a quantum: the other neighbour is taken when draw < g for r > 0 and when
the draw's complement is below g for r < 0, with g = |r| / q * 2**32, at most 2**31. For negative y,
up is inwards, so the complement is taken once more and g is rounded up instead of down; g has a
fraction only where |y| < q / 2**9, with n = 0.

On Hopper a multiprocessor does 128 FP32 additions or products a clock but 64 integer operations,
comparisons or selections and 16 conversions, so powers of two are formed by products: stochastic
rounding takes some 9 integer operations, 2 conversions and 7 FP32 ones a value.

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
FP16_MAX = tl.constexpr(65504.0)
FP16_TO_INF = tl.constexpr(65520.0)  # nearest rounding overflows from here
FP16_TO_INF_BITS = tl.constexpr(0x477FF000)
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
def round_size(m, x, words, MAN: tl.constexpr, EMIN: tl.constexpr, SR: tl.constexpr):
    """Round m = |y| to MAN explicit bits with least exponent EMIN, as y itself would be rounded.

    Args:
        m: FP32, 0 <= m < 2**(104 + MAN).
        x: FP32 of m's shape with the sign of y; not looked at unless SR.
        words: uint32 of m's shape; likewise.
        MAN: explicit significand bits; MAN = EMIN gives whole numbers below 2**(MAN + 1).
        EMIN: exponent of the least normal value.
        SR: stochastic, not to nearest even.

    Returns:
        FP32 of m's shape, the rounded magnitude.
    """
    exponent = tl.maximum(m.to(tl.int32, bitcast=True) & INF_BITS, (EMIN + 127) << 23)
    binade = exponent.to(tl.float32, bitcast=True)  # 2**max(e, EMIN)
    magic = binade * (1 << (23 - MAN))
    nearest = (m + magic) - magic
    if SR:
        rest = m - nearest
        # 2**32 / quantum: its exponent field is 254 + 32 less the quantum's (in steps, for int32)
        field = ((MAN + 159) << 23) - exponent + (127 << 23)
        position = rest * field.to(tl.float32, bitcast=True)
        # a normal number or 0, so it is no matter that floor flushes subnormal ones on the GPU;
        # negative where the complement is due; its floor is then larger in magnitude, as it must be
        # where it has a fraction (rest > 0, so y < 0)
        turned = position.to(tl.int32, bitcast=True) ^ (x.to(tl.int32, bitcast=True) & SIGN_BIT)
        threshold = tl.abs(tl.floor(turned.to(tl.float32, bitcast=True))).to(tl.uint32)
        draw = words ^ (turned >> 31).to(tl.uint32, bitcast=True)
        step = with_sign_of(binade * (1.0 / (1 << MAN)), rest)
        return nearest + tl.where(draw < threshold, step, 0.0)
    else:
        return nearest


@triton.jit
def round_magnitude(y, words, MAN: tl.constexpr, EMIN: tl.constexpr, SR: tl.constexpr):
    """Round |y| as y would be rounded: see `round_size`."""
    return round_size(tl.abs(y), y, words, MAN, EMIN, SR)


@triton.jit
def round_fp16(x, words, SR: tl.constexpr):
    """Round to FP16: inf from 65520 (below it, never), NaN kept."""
    if SR:
        magnitude = tl.abs(x)
        rounded = round_size(tl.minimum(magnitude, FP16_MAX), x, words, 10, -14, True)
        beyond = magnitude + float("inf")  # NaN stays NaN
        return with_sign_of(tl.where(magnitude < FP16_TO_INF, rounded, beyond), x)
    else:
        return x.to(tl.float16).to(tl.float32)


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
        return round_fp16(x, x, False)
    elif RECORD == "bf16":
        return round_bf16(x, x, False)
    else:
        return x
