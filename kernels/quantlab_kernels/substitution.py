"""Corrections of a window's steps, each rounded to its record before the next one sees it.

    u_i = beta_i target_i - sum over j < i of A_ij u~_j,  u~ = record(u)

Once a step's correction is there, its record is taken off all later steps at once; a tile's own
column says nothing more afterwards, so corrections need no tile of their own. Short windows are
unrolled: the coefficients are then loaded ahead, and which registers hold a column is known.

Rounding points: the record of each correction. Additions run from the first token to the last.
Reference: quantlab.recurrence.window.
"""

import triton
import triton.language as tl

from quantlab_kernels.rounding import round_record

UNROLLED = tl.constexpr(16)
"""Most steps that are unrolled."""


@triton.jit
def _take_off(rest, couple_ptr, i, BLOCK_L: tl.constexpr, CORRECTION_RECORD: tl.constexpr):
    """Take the record of step i off the steps after it."""
    step = tl.arange(0, BLOCK_L)
    a_i = tl.load(couple_ptr + i * BLOCK_L + step)
    u_i = tl.sum(tl.where((step == i)[None, :], rest, 0.0), axis=1)
    record = round_record(u_i, CORRECTION_RECORD)
    return tl.fma(-record[:, None], a_i[None, :], rest)


@triton.jit
def substitute(
    target, couple_ptr, L: tl.constexpr, BLOCK_L: tl.constexpr, CORRECTION_RECORD: tl.constexpr
):
    """Solve forward for the corrections of a window's steps.

    Args:
        target: [V, BLOCK_L] FP32, times beta.
        couple_ptr: FP32 A of the window, [BLOCK_L, BLOCK_L], row j for the record of step j.
        L: steps of a window.
        BLOCK_L: L padded.
        CORRECTION_RECORD: "fp32", "fp16" or "bf16".

    Returns:
        corrections and their records, [V, BLOCK_L] FP32.
    """
    rest = target
    if L <= UNROLLED:
        for i in tl.static_range(L - 1):
            rest = _take_off(rest, couple_ptr, i, BLOCK_L, CORRECTION_RECORD)
    else:
        for i in range(0, L - 1):
            rest = _take_off(rest, couple_ptr, i, BLOCK_L, CORRECTION_RECORD)
    return rest, round_record(rest, CORRECTION_RECORD)
