"""Correctly rounded FP32 quotients, many by one divisor, through its FP64 reciprocal.

`tl.div_rn` takes about a dozen operations and a branch to a slow path for every element, and its
branches keep a tile's elements apart. A block shares its divisor, so here an element takes one FP64
product between two conversions, and the interpreter does the very same.

Why the bits are right. Let a / b be a quotient of FP32 numbers with significands A, B < 2**24, and
r = fl64(1 / b). Then fl64(a r) is off by less than 2**-52 of the quotient, and fl32 of it is wrong
only if a midpoint of two FP32 numbers lies between. A midpoint has a significand M / 2 with an odd
M; |A 2**k / B - M / 2| is a multiple of 1 / (2 B) and not 0 (M B has more than 24 bits), so no
midpoint is nearer than 2**-49 of the quotient. Below 2**-126 quotients can be midpoints exactly:
there the result is right if b is a power of two or one of the constants 6, 7, 127, 448, whose
reciprocals are off by at most 2**-54 so that fl64(a r) is exact (tests/kernels/test_division.py),
and otherwise off by one step of 2**-149 at most, which no rounding to an element sees, unless the
step is the one from zero, in one draw of 2**32.

Casts divide so: between two runs nearest NVFP4 was at 0.89 of a copy with it and 0.69 with what
follows, INT4 at 1.02 and 0.87, stochastic FP8 at 0.58 and 0.50 (reports/performance/README.md).
The scan and decode steps that store have few warps to hide conversions behind (16 a clock of a
multiprocessor, FP32 operations 128); there `quotient` divides FUSED, by Newton's and Markstein's
steps in FP32 with fused products, again correctly rounded: 130 ms of the scan for 150.
With the divisor scaled to d in [1, 2), two Newton steps from any estimate within 2 ulp give
r = 1 / d correctly rounded for all 2**23 significands but the largest, which the maximum below
mends (tests/kernels/test_division.py tries them all). An estimate q of x / d and its exact rest
e = x - q d then give q + e r: the first time within 2**-22 ulp before it is rounded, so faithful,
the second time correctly rounded (Markstein 1990, theorem 4.1). Results below 2**-126 may be off
by a step, as above. The interpreter, which fuses nothing, divides by the FP64 reciprocal: the
same bits.

Source: Markstein 1990, "Computation of elementary functions on the IBM RISC System/6000 processor",
IBM J. Res. Dev. 34(1), section on division.
"""

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction


@triton.jit
def reciprocal(divisor):
    """Form 1 / divisor in FP64: inf for 0, 0 for inf, NaN for NaN."""
    return 1.0 / divisor.to(tl.float64)


@triton.jit
def divide(x, reciprocal_of_divisor):
    """Divide FP32 x by a divisor given as its FP64 reciprocal, rounded to nearest even."""
    return (x.to(tl.float64) * reciprocal_of_divisor).to(tl.float32)


INTERPRETED = tl.constexpr(not isinstance(divide, JITFunction))
LEAST_RECIPROCAL = tl.constexpr(0.5 + 2.0**-24)  # 1 / d of the largest d below 2


@triton.jit
def divisor(d, FUSED: tl.constexpr):
    """Prepare to divide by FP32 d >= 0; by 0 everything is 0.

    Args:
        d: the divisor.
        FUSED: by FP32 steps rather than through FP64.

    Returns:
        what `quotient` takes: a power of two, minus d times it (of a number negated in a product
        it would be formed once an element), and the reciprocal of d times it.
    """
    if INTERPRETED or not FUSED:
        return d, d, tl.where(d == 0.0, 0.0, reciprocal(d))
    else:
        # 2**(-e), and 2**127 and 2**-126 at the ends of the range
        field = d.to(tl.int32, bitcast=True) & 0x7F800000
        shift = tl.maximum((254 << 23) - field, 1 << 23).to(tl.float32, bitcast=True)
        scaled = d * shift
        # within 1 ulp
        r = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scaled], tl.float32, is_pure=True, pack=1
        )
        r = tl.fma(tl.fma(-scaled, r, 1.0), r, r)
        r = tl.fma(tl.fma(-scaled, r, 1.0), r, r)
        r = tl.where(scaled < 2.0, tl.maximum(r, LEAST_RECIPROCAL), r)
        # by zero: the shift must be 0 too, or 2**127 x is inf and its quotient NaN
        return tl.where(d == 0.0, 0.0, shift), -scaled, tl.where(d == 0.0, 0.0, r)


@triton.jit
def divided(blocks, scales, FUSED: tl.constexpr):
    """Divide FP32 blocks [blocks, B] by their scales [blocks], as `quotient` does; by 0: 0."""
    shift, minus, inverse = divisor(scales, FUSED)
    return quotient(blocks, shift[:, None], minus[:, None], inverse[:, None], FUSED)


@triton.jit
def quotient(x, shift, minus, inverse, FUSED: tl.constexpr):
    """Divide FP32 x by a prepared `divisor`, rounded to nearest even; FUSED as there."""
    if INTERPRETED or not FUSED:
        return divide(x, inverse)
    else:
        x = x * shift
        q = x * inverse
        q = tl.fma(tl.fma(q, minus, x), inverse, q)
        return tl.fma(tl.fma(q, minus, x), inverse, q)
