"""What one window of the scan is multiplied by, and the products of a state's copies with it.

Tiles of steps and of the state have their columns in the order of `draws.lane_channels`. A state
lies in parts of its rows, tuples of tiles [V, BLOCK_K].
"""

import triton
import triton.language as tl

from quantlab_kernels.cuts import cut_rows, sum_of_rows
from quantlab_kernels.draws import lane_order
from quantlab_kernels.parts import dot_parts, spread_parts, transposed
from quantlab_kernels.rounding import round_record


@triton.jit
def load_steps(base_ptr, t, live, col, width, stride_t):
    """Load [BLOCK_L, columns] FP32 of the window's tokens; zero beyond the window or the width."""
    mask = live[:, None] & (col < width)[None, :]
    x = tl.load(base_ptr + t[:, None] * stride_t + col[None, :], mask=mask, other=0.0)
    return x.to(tl.float32)


@triton.jit
def load_square(base_ptr, unit, BLOCK_L: tl.constexpr):
    """Load [BLOCK_L, BLOCK_L] FP32 coefficients of a window."""
    step = tl.arange(0, BLOCK_L)
    return tl.load(base_ptr + unit * BLOCK_L * BLOCK_L + step[:, None] * BLOCK_L + step[None, :])


@triton.jit
def load_decays(base_ptr, unit, dk, channel, BLOCK_L: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """Load decays of the window's steps: [BLOCK_L, BLOCK_K] per channel, [BLOCK_L] per head."""
    step = tl.arange(0, BLOCK_L)
    if PER_CHANNEL:
        ptrs = base_ptr + (unit * BLOCK_L + step[:, None]) * dk + channel[None, :]
        return lane_order(tl.load(ptrs, mask=(channel < dk)[None, :], other=0.0))
    else:
        return tl.load(base_ptr + unit * BLOCK_L + step)


@triton.jit
def load_total(
    base_ptr, unit, dk, channel, L: tl.constexpr, BLOCK_L: tl.constexpr, PER_CHANNEL: tl.constexpr
):
    """Load a full window's decay of the state: [1, BLOCK_K] per channel, a number per head."""
    if PER_CHANNEL:
        ptrs = base_ptr + (unit * BLOCK_L + L - 1) * dk + channel
        return lane_order(tl.load(ptrs, mask=channel < dk, other=0.0)[None, :])
    else:
        return tl.load(base_ptr + unit * BLOCK_L + L - 1)


@triton.jit
def decayed_parts(x, decay, PARTS: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """Split a window's queries or keys, decayed if per channel: parts of [BLOCK_K, BLOCK_L]."""
    if PER_CHANNEL:
        return transposed(spread_parts(x * decay, 3))
    else:
        return transposed(spread_parts(x, PARTS))


@triton.jit
def product_scale(factor, decay, PER_CHANNEL: tl.constexpr):
    """Form what products of a copy's operands are multiplied by; keys hold decays per channel."""
    if PER_CHANNEL:
        return factor
    else:
        return factor * decay[None, :]


@triton.jit
def copy_product(operand, scale, right, CUTS: tl.constexpr):
    """Form a copy times decayed keys or queries: [V, BLOCK_L] FP32."""
    none = tl.zeros([operand[0].shape[0], right[0].shape[1]], tl.float32)
    return sum_of_rows(dot_parts(operand, cut_rows(right, CUTS), none), CUTS) * scale


@triton.jit
def flush_keys(keys, L: tl.constexpr, KEY_RECORD: tl.constexpr):
    """Take the keys that a flush sees [BLOCK_L, BLOCK_K]: records, and token L's as it is."""
    is_last = tl.arange(0, keys.shape[0]) == L - 1
    return tl.where(is_last[:, None], keys, round_record(keys, KEY_RECORD))


@triton.jit
def key_parts(
    keys, decay, KEY_RECORD: tl.constexpr, KEY_PARTS: tl.constexpr, PER_CHANNEL: tl.constexpr
):
    """Split a window's keys [BLOCK_L, BLOCK_K] into their records and what those leave out.

    Returns:
        parts of the records and of the rests as `key_products` takes them; no
        rests where keys are their records.
    """
    record = round_record(keys, KEY_RECORD)
    PARTS: tl.constexpr = KEY_PARTS if KEY_RECORD == "fp32" else (1 if KEY_RECORD == "bf16" else 2)
    records = decayed_parts(record, decay, PARTS, PER_CHANNEL)
    if KEY_RECORD == "fp32" or (KEY_RECORD == "bf16" and KEY_PARTS == 1):
        return records, ()
    elif PER_CHANNEL:
        return records, transposed(spread_parts((keys - record) * decay, 2))
    else:
        return records, transposed(spread_parts(keys - record, 2))


@triton.jit
def key_products(operand, scale, records, rests, CUTS: tl.constexpr):
    """Form a copy times decayed keys, unrounded and as the flush sees all but the last."""
    none = tl.zeros([operand[0].shape[0], records[0].shape[1]], tl.float32)
    recorded = dot_parts(operand, cut_rows(records, CUTS), none)
    product = sum_of_rows(recorded, CUTS) * scale
    if len(rests) == 0:
        return product, product
    else:
        whole = dot_parts(operand, cut_rows(rests, CUTS), recorded, 1)
        return sum_of_rows(whole, CUTS) * scale, product
