"""What one window of the scan is multiplied by, and the products of a state's copies with it.

Tiles of steps and of the state have their columns in the order of `draws.lane_channels`. A state
lies in parts of its rows, tuples of tiles [V, BLOCK_K].
"""

import triton
import triton.language as tl

from quantlab_kernels.draws import lane_order
from quantlab_kernels.parts import dot_parts, split_parts, transposed
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
def _parts_of(x, decay, PARTS: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """Split a window's queries or keys, decayed if per channel: parts of [BLOCK_K, BLOCK_L]."""
    if PER_CHANNEL:
        return transposed(split_parts(x * decay, 3))
    else:
        return transposed(split_parts(x, PARTS))


@triton.jit
def copy_product(operand, factor, right, decay, PER_CHANNEL: tl.constexpr):
    """Form a copy times decayed keys or queries: [V, BLOCK_L] FP32."""
    shape: tl.constexpr = [operand[0].shape[0], right[0].shape[1]]
    product = dot_parts(operand, right, tl.zeros(shape, tl.float32)) * factor
    if PER_CHANNEL:
        return product
    else:
        return product * decay[None, :]


@triton.jit
def flush_keys(keys, L: tl.constexpr, KEY_RECORD: tl.constexpr):
    """Take the keys that a flush sees [BLOCK_L, BLOCK_K]: records, and token L's as it is."""
    is_last = tl.arange(0, keys.shape[0]) == L - 1
    return tl.where(is_last[:, None], keys, round_record(keys, KEY_RECORD))


@triton.jit
def operands_of_window(
    q_ptrs,
    k_ptrs,
    from_start_ptr,
    unit,
    window,
    T,
    channel,
    dk,
    stride_q_t,
    stride_k_t,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    DELTA: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    KEY_RECORD: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    FLUSH_PARTS: tl.constexpr,
):
    """Load what the copies are multiplied by: parts of queries, keys and keys of the flush.

    Without a delta rule keys are the queries again: nothing is multiplied by them.
    """
    step = tl.arange(0, BLOCK_L)
    t = window * L + step
    live = (step < L) & (t < T)
    decay = load_decays(from_start_ptr, unit, dk, channel, BLOCK_L, PER_CHANNEL)
    queries = lane_order(load_steps(q_ptrs, t, live, channel, dk, stride_q_t))
    query_parts = _parts_of(queries, decay, KEY_PARTS, PER_CHANNEL)
    if DELTA:
        keys = lane_order(load_steps(k_ptrs, t, live, channel, dk, stride_k_t))
        key_parts = _parts_of(keys, decay, KEY_PARTS, PER_CHANNEL)
        flush_parts = _parts_of(flush_keys(keys, L, KEY_RECORD), decay, FLUSH_PARTS, PER_CHANNEL)
        return decay, query_parts, key_parts, flush_parts
    else:
        return decay, query_parts, query_parts, query_parts


@triton.jit
def part_rows(p: tl.constexpr, BLOCK_V: tl.constexpr, TAIL_V: tl.constexpr):
    """Rows of the state in part p."""
    if p == 0:
        return tl.arange(0, BLOCK_V)
    else:
        return BLOCK_V + tl.arange(0, TAIL_V)


@triton.jit
def load_parts(
    ptrs, dv, dk, channel, PARTS: tl.constexpr, BLOCK_V: tl.constexpr, TAIL_V: tl.constexpr
):
    """Load a copy: a tuple of [V, BLOCK_K] FP32."""
    tiles = ()
    for p in tl.static_range(PARTS):
        value = part_rows(p, BLOCK_V, TAIL_V)
        mask = (value < dv)[:, None] & (channel < dk)[None, :]
        tile = tl.load(ptrs + value[:, None] * dk, mask=mask, other=0.0)
        tiles = tiles + (tile,)  # noqa: RUF005 (kernels know no unpacking)
    return tiles


@triton.jit
def loaded_products(tiles, right, decay, PER_CHANNEL: tl.constexpr):
    """Form `copy_product` of every part of a copy as loaded."""
    products = ()
    for p in tl.static_range(len(tiles)):
        product = copy_product(split_parts(tiles[p], 3), 1.0, right, decay, PER_CHANNEL)
        products = products + (product,)  # noqa: RUF005
    return products
