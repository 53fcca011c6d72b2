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
"""

import triton
import triton.language as tl


@triton.jit
def reciprocal(divisor):
    """Form 1 / divisor in FP64: inf for 0, 0 for inf, NaN for NaN."""
    return 1.0 / divisor.to(tl.float64)


@triton.jit
def divide(x, reciprocal_of_divisor):
    """Divide FP32 x by a divisor given as its FP64 reciprocal, rounded to nearest even."""
    return (x.to(tl.float64) * reciprocal_of_divisor).to(tl.float32)
