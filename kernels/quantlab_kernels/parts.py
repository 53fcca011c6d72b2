"""Products of FP32 tiles on tensor cores, exact but for the order of additions: BF16 parts.

An FP32 value is the sum of three BF16 values exactly (8 + 8 + 8 bits), an FP16 value of two, and
elements of the narrow formats are BF16 values themselves. A product of two values is formed from
the products of their parts, those below 2**-24 of it left out: one for BF16 by BF16, three for BF16
by FP32, six for FP32 by FP32, where TF32 takes three at half the rate and drops more (2**-22).
BF16 operands take half the registers of TF32, and the layout that a product leaves its result in is
the layout that the next takes its first operand in.

Products are those of batches of 16 rows, each a warp's own (mma.sync): Hopper's products of 64 rows
(wgmma) here have 16 columns, wait for each other, and their descriptors fill the registers.

Parts have FP32's range. inf has parts inf and NaN, so what is not finite gives NaN.
Under the interpreter, which has no BF16 arithmetic, operands are the same values in FP32, and the
casts to BF16 truncate: other parts, with the same sum.
"""

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction


@triton.jit
def _upper_half(x):
    """Round FP32 to a BF16 value, ties away from zero, without a conversion (an eighth the rate).

    NaN may become a number; what it leaves over is NaN then.
    """
    bits = (x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def split_parts(x, PARTS: tl.constexpr):
    """Split FP32 x into PARTS BF16 parts, the largest first; the rest beyond them is dropped.

    Returns:
        a tuple of tensors of x's shape, OPERAND.
    """
    parts = ()
    rest = x
    for p in tl.static_range(PARTS):
        if p + 1 < PARTS:
            part = _upper_half(rest)
            rest = rest - part
        else:
            part = rest
        parts = parts + (part.to(tl.bfloat16).to(OPERAND),)  # noqa: RUF005 (kernels know no unpacking)
    return parts


OPERAND = tl.constexpr(tl.bfloat16 if isinstance(split_parts, JITFunction) else tl.float32)
"""Type of parts: that of tensor cores, FP32 under the interpreter."""
INTERPRETED = tl.constexpr(not isinstance(split_parts, JITFunction))


@triton.jit
def settled(x):
    """Keep one layout of x: what follows an assembly with effects is not moved before it."""
    if INTERPRETED:
        return x
    elif x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=False, pack=2
        )
    elif x.dtype.primitive_bitwidth == 64:
        return tl.inline_asm_elementwise(
            "mov.b64 $0, $1;", "=l,l", [x], x.dtype, is_pure=False, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=False, pack=1
        )


@triton.jit
def spread_parts(x, PARTS: tl.constexpr):
    """Split as `split_parts` does, each element by one lane.

    Every warp needs all of a product's right side: the parts are handed around, not formed by each.
    """
    parts = split_parts(x, PARTS)
    spread = ()
    for p in tl.static_range(PARTS):
        spread = spread + (settled(parts[p]),)  # noqa: RUF005
    return spread


@triton.jit
def transposed(parts):
    """Transpose parts."""
    turned = ()
    for p in tl.static_range(len(parts)):
        turned = turned + (tl.trans(parts[p]),)  # noqa: RUF005
    return turned


@triton.jit
def _batches(b, BATCHES: tl.constexpr):
    """Repeat a matrix, or each of CUTS, to BATCHES of them."""
    if len(b.shape) == 2:
        return tl.broadcast_to(b[None, :, :], [BATCHES, b.shape[0], b.shape[1]])
    else:
        CUTS: tl.constexpr = b.shape[0]
        K: tl.constexpr = b.shape[1]
        N: tl.constexpr = b.shape[2]
        b = tl.broadcast_to(b[:, None, :, :], [CUTS, BATCHES // CUTS, K, N])
        return tl.reshape(b, [BATCHES, K, N])


@triton.jit
def dot_parts(a, b, start, FIRST: tl.constexpr = 0):
    """Form start + A B from parts, smallest products first: FP32 [M, N].

    A warp multiplies 16 rows: in a product of batches, warps share the batches.

    Args:
        a: parts of [M, K].
        b: parts of [K, N], or of [CUTS, K, N]: the first M / CUTS rows of A are multiplied by the
            first matrix, the next by the next.
        start: FP32 [M, N].
        FIRST: parts of b begin 8 FIRST bits below what is left of it.
    """
    M: tl.constexpr = a[0].shape[0]
    K: tl.constexpr = a[0].shape[1]
    N: tl.constexpr = start.shape[1]
    total = tl.reshape(start, [M // 16, 16, N])
    for order in tl.static_range(3):
        for i in tl.static_range(len(a)):
            for j in tl.static_range(len(b)):
                if i + j + FIRST == 2 - order:
                    left = tl.reshape(a[i], [M // 16, 16, K])
                    right = _batches(b[j], M // 16)
                    total = tl.dot(left, right, total)
    return tl.reshape(total, [M, N])
