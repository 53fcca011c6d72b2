"""Copies of states as the scan holds them between windows: operands and factors.

An operand has few significant bits and is the stored value but for a factor: NVFP4's is element
times block scale, the factor the state scale; that of FP8 and integers the element, the factor the
scale of its row; FP16, BF16 and FP32 are held as they are. Held in the least type with room for it,
a copy takes half or all of the registers of FP32 and is what tensor cores multiply. Both
are exact, so a segment that begins with values and factors begins with the very operands that the
last one ended with: the quotient, off by two roundings, has its few bits restored.

Rounding points: none; an operand times its factor may differ from its value by the rounding of that
product.
Not held like this: FP8 rows of several scales, and launches where some heads stay FP32 (FP32 then).
"""

import triton
import triton.language as tl

from quantlab_kernels.cuts import most_of_rows
from quantlab_kernels.draws import lane_channels
from quantlab_kernels.parts import OPERAND, split_parts
from quantlab_kernels.rounding import round_bf16


@triton.jit
def held_as_type(operand, HELD: tl.constexpr):
    """Hold operands in the type of HELD, which has room for all their bits."""
    if HELD == 1:
        return operand.to(tl.bfloat16).to(OPERAND)
    elif HELD == 2:
        return operand.to(tl.float16)
    else:
        return operand


@triton.jit
def held_parts(held, HELD: tl.constexpr):
    """Take a held copy apart into BF16 parts."""
    if HELD == 1:
        return (held,)
    else:
        return split_parts(held.to(tl.float32), HELD)


@triton.jit
def load_copy(
    ptr,
    factor_ptr,
    rows,
    dv,
    dk,
    applies,
    FORMAT: tl.constexpr,
    K: tl.constexpr,
    FACTORED: tl.constexpr,
    HELD: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Load lane rows of a copy as `store_part` left them: operands [V, K] and their factor."""
    row, start = rows
    channel = start[:, None] + lane_channels(K)[None, :]
    mask = (row < dv)[:, None] & (channel < dk)
    operand = tl.load(ptr + row[:, None] * dk + channel, mask=mask, other=0.0)
    factor = 1.0
    if FACTORED:
        values = operand
        if FORMAT == "nvfp4":
            factor = tl.load(factor_ptr)
        else:
            factor = tl.load(factor_ptr + row, mask=row < dv, other=1.0)[:, None]
        # few bits: what two roundings took away comes back
        operand = round_bf16(values / factor, values, False)
        if PARTIAL:
            operand = tl.where(applies, operand, values)
    return held_as_type(operand, HELD), factor


@triton.jit
def of_rows(factor, FORMAT: tl.constexpr, FACTORED: tl.constexpr, CUTS: tl.constexpr):
    """Take the factor of rows from that of lane rows."""
    if not FACTORED or FORMAT == "nvfp4" or CUTS == 1:
        return factor
    else:
        return most_of_rows(tl.reshape(factor, [factor.shape[0]]), CUTS)[:, None]


@triton.jit
def store_factor(ptr, row, dv, factor, FACTORED: tl.constexpr):
    """Store the factor of a copy's operands, in every row."""
    if FACTORED:
        tl.store(ptr + row[:, None], factor, mask=(row < dv)[:, None])


def held_as(name: str, block_k: int, partial: bool) -> tuple[int, bool]:
    """Find how copies of a format are held.

    Args:
        name: a value of `stores.STORE_NAMES`.
        block_k: padded dk.
        partial: some heads are in FP32.

    Returns:
        HELD, the BF16 parts of an operand (1 BF16, 2 FP16, 3 FP32), and FACTORED, whether operands
        are values but for a factor.
    """
    factored = name in ("nvfp4", "int8", "int6", "int4") or (name == "fp8" and block_k <= 128)
    if partial:
        return 3, factored
    if factored or name == "bf16":
        return 1, factored
    return (2 if name == "fp16" else 3), factored
