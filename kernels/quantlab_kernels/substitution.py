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
def _record_of(rest, i, CORRECTION_RECORD: tl.constexpr):
    """Find the record of the correction in column i, [V, 1]."""
    column = tl.arange(0, rest.shape[1]) == i
    u_i = tl.sum(tl.where(column[None, :], rest, 0.0), axis=1)
    return round_record(u_i, CORRECTION_RECORD)[:, None]


@triton.jit
def _taken_off(rest, record, couple_ptr):
    """Take a step's record off later steps, their coefficients at couple_ptr."""
    a = tl.load(couple_ptr + tl.arange(0, rest.shape[1]))
    return tl.fma(-record, a[None, :], rest)


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
    if BLOCK_L <= UNROLLED:
        # once the first half is there, only the second half changes
        V: tl.constexpr = target.shape[0]
        HALF: tl.constexpr = BLOCK_L // 2
        first, second = tl.split(tl.trans(tl.reshape(target, [V, 2, HALF]), 0, 2, 1))
        for i in tl.static_range(L - 1):
            row_ptr = couple_ptr + i * BLOCK_L
            if i < HALF:
                record = _record_of(first, i, CORRECTION_RECORD)
                if i + 1 < HALF:
                    first = _taken_off(first, record, row_ptr)
            else:
                record = _record_of(second, i - HALF, CORRECTION_RECORD)
            second = _taken_off(second, record, row_ptr + HALF)
        rest = tl.reshape(tl.trans(tl.join(first, second), 0, 2, 1), [V, BLOCK_L])
    else:
        rest = target
        for i in range(0, L - 1):
            record = _record_of(rest, i, CORRECTION_RECORD)
            rest = _taken_off(rest, record, couple_ptr + i * BLOCK_L)
    return rest, round_record(rest, CORRECTION_RECORD)
