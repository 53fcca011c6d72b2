"""Conventional decode: read the state, take one token, write the state, at every step.

    S_t = S_{t-1} decay_t + u_t k_t^T,  o_t = S_t q_t,
    u_t = v_t, or beta_t (v_t - decay_t S_{t-1} k_t) with a delta rule

The baseline of the replay kernels, and decoding with L = 1. One program per (planned row, head,
BLOCK_V state rows).

Rounding points: o_t is read from the FP32 S_t, then S_t is stored.
Bytes: the state once in and once out, q, k, v, o. Floor: those over the bandwidth of a copy.
Not covered: dk that is not 16 * 2**n <= 128.
"""

import triton
import triton.language as tl

from quantlab_kernels.decode_formats import load_state, mark_diverged, row_product, store_tile
from quantlab_kernels.decode_plan import FLUSH, ROW, SLOT


@triton.jit(do_not_specialize=["n_rows", "seed", "layer"])
def conventional_step_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    log_ptr,
    strength_ptr,
    out_ptr,
    codes_ptr,
    scales_ptr,
    state_scale_ptr,
    lines_ptr,
    counts_ptr,
    streams_ptr,
    diverged_ptr,
    seed,
    layer,
    n_rows,
    heads,
    heads_per_key,
    dv,
    slot_states,
    stride_q_row,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    stride_v_row,
    stride_v_head,
    stride_log_row,
    stride_log_head,
    stride_strength_row,
    stride_strength_head,
    stride_out_row,
    stride_out_head,
    BLOCK_V: tl.constexpr,
    DK: tl.constexpr,
    WIDTH: tl.constexpr,
    DELTA: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    HAS_DT: tl.constexpr,
    FORMAT: tl.constexpr,
    SR: tl.constexpr,
):
    """One program per (dv block, head, planned row)."""
    first = tl.program_id(0) * BLOCK_V
    head = tl.program_id(1)
    rank = tl.program_id(2)
    n_steps = tl.load(counts_ptr)
    n_flush = tl.load(counts_ptr + 1)
    if rank < n_flush:
        line = n_steps + rank
        slot = tl.load(lines_ptr + SLOT * n_rows + line).to(tl.int64)
        state = slot * slot_states + head
        row0 = state * dv + first
        S = load_state(
            codes_ptr,
            scales_ptr,
            state_scale_ptr,
            row0,
            state,
            dv - first,
            FORMAT,
            BLOCK_V,
            DK,
            WIDTH,
        )
        row = tl.load(lines_ptr + ROW * n_rows + line).to(tl.int64)
        part = tl.arange(0, DK // WIDTH)
        channel = part[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        value = first + tl.arange(0, BLOCK_V)
        in_v = value < dv
        key_head = head // heads_per_key
        q = tl.load(q_ptr + row * stride_q_row + key_head * stride_q_head + channel)
        k = tl.load(k_ptr + row * stride_k_row + key_head * stride_k_head + channel)
        q = q.to(tl.float32)
        k = k.to(tl.float32)
        v_ptrs = v_ptr + row * stride_v_row + head * stride_v_head + value
        u = tl.load(v_ptrs, mask=in_v, other=0.0).to(tl.float32)
        log_ptrs = log_ptr + row * stride_log_row + head * stride_log_head
        if DELTA or HAS_DT:
            strength = tl.load(
                strength_ptr + row * stride_strength_row + head * stride_strength_head
            ).to(tl.float32)
        if HAS_DT:
            u = u * strength
        if PER_CHANNEL:
            S = S * tl.exp(tl.load(log_ptrs + channel).to(tl.float32))[None, :, :]
        else:
            S = S * tl.exp(tl.load(log_ptrs).to(tl.float32))
        if DELTA:
            u = strength * (u - row_product(S, k))
        S = tl.fma(u[:, None, None], k[None, :, :], S)
        out_ptrs = out_ptr + row * stride_out_row + head * stride_out_head + value
        tl.store(out_ptrs, row_product(S, q), mask=in_v)
        number = tl.load(lines_ptr + FLUSH * n_rows + line)
        largest = store_tile(
            S,
            codes_ptr,
            scales_ptr,
            state_scale_ptr,
            row0,
            state,
            dv - first,
            seed,
            layer,
            tl.load(streams_ptr + slot),
            number,
            (head * dv + first) * DK,
            FORMAT,
            SR,
            BLOCK_V,
            DK,
            WIDTH,
        )
        mark_diverged(diverged_ptr, slot, number, largest)
