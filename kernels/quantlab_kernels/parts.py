"""Products of FP32 tiles on tensor cores, exact but for the order of additions: BF16 parts.

An FP32 value is the sum of three BF16 values exactly (8 + 8 + 8 bits), an FP16 value of two, and
elements of the narrow formats are BF16 values themselves. A product of two values is formed from
the products of their parts, those below 2**-24 of it left out: one for BF16 by BF16, three for BF16
by FP32, six for FP32 by FP32, where TF32 takes three at half the rate and drops more (2**-22).
BF16 operands take half the registers of TF32, and the layout that a product leaves its result in is
the layout that the next takes its first operand in.

Parts have FP32's range. inf has parts inf and NaN, so what is not finite gives NaN.
Under the interpreter, which has no BF16 arithmetic, operands are the same values in FP32, and the
casts to BF16 truncate: other parts, with the same sum.
"""

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction


@triton.jit
def split_parts(x, PARTS: tl.constexpr):
    """Split FP32 x into PARTS BF16 parts, the largest first; the rest beyond them is dropped.

    Returns:
        a tuple of tensors of x's shape, OPERAND.
    """
    parts = ()
    rest = x
    for p in tl.static_range(PARTS):
        part = rest.to(tl.bfloat16)
        parts = parts + (part.to(OPERAND),)  # noqa: RUF005 (kernels know no unpacking)
        if p + 1 < PARTS:
            rest = rest - part.to(tl.float32)
    return parts


OPERAND = tl.constexpr(tl.bfloat16 if isinstance(split_parts, JITFunction) else tl.float32)
"""Type of parts: that of tensor cores, FP32 under the interpreter."""


@triton.jit
def transposed(parts):
    """Transpose parts."""
    turned = ()
    for p in tl.static_range(len(parts)):
        turned = turned + (tl.trans(parts[p]),)  # noqa: RUF005
    return turned


@triton.jit
def dot_parts(a, b, start):
    """Form start + A B from parts, smallest products first: FP32 [M, N]."""
    total = start
    for order in tl.static_range(3):
        for i in tl.static_range(len(a)):
            for j in tl.static_range(len(b)):
                if i + j == 2 - order:
                    total = tl.dot(a[i], b[j], total)
    return total
