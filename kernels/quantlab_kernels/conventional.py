"""Conventional decoding, L = 1: the state is rounded to its format at every step.

    S_t = S_{t-1} decay_t + u_t k_t^T,  o_t = S_t q_t,
    u_t = v_t, or beta_t (v_t - decay_t S_{t-1} k_t) with a delta rule

One program walks a whole segment for one (row, head) with its state on chip.

Rounding points: o_t is read from the FP32 S_t, then S_t is stored (rounded and read back). There
are no records.
Bytes: per token and head, q, k, v and o once; the state moves once a segment. The floor is the
latency of three dependent passes over the tile and of the store, per token.
Not covered: FP64.
"""

import triton
import triton.language as tl
from torch import Tensor

from quantlab.formats import Format
from quantlab.recurrence import OpInputs
from quantlab_kernels.stores import (
    has_nonfinite,
    signed_seed,
    store_and_load,
    store_kind,
    tile_shape,
    tile_warps,
)

UNSPECIALIZED = [
    *("T", "seed", "layer", "first_flush"),
    *("stride_dt_row", "stride_beta_row", "stride_decay_row"),
]
"""Arguments that differ from call to call: their values must not ask for another compilation."""


@triton.jit(do_not_specialize=UNSPECIALIZED)
def conventional_scan_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dt_ptr,
    beta_ptr,
    decay_ptr,
    state_ptr,
    out_ptr,
    bad_flush_ptr,
    rows_ptr,
    streams_ptr,
    applies_ptr,
    seed,
    layer,
    first_flush,
    T,
    heads,
    heads_per_key,
    dv,
    dk,
    stride_q_row,
    stride_q_t,
    stride_q_head,
    stride_k_row,
    stride_k_t,
    stride_k_head,
    stride_v_row,
    stride_v_t,
    stride_v_head,
    stride_dt_row,
    stride_dt_t,
    stride_dt_head,
    stride_beta_row,
    stride_beta_t,
    stride_beta_head,
    stride_decay_row,
    stride_decay_t,
    stride_decay_head,
    stride_out_row,
    stride_out_t,
    stride_out_head,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    QUADS: tl.constexpr,
    DELTA: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    HAS_DT: tl.constexpr,
    FORMAT: tl.constexpr,
    SR: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """One program per (head, row of the group)."""
    head = tl.program_id(0)
    group_row = tl.program_id(1)
    row = tl.load(rows_ptr + group_row)
    stream = tl.load(streams_ptr + group_row)
    if PARTIAL:
        applies = tl.load(applies_ptr + group_row * heads + head) != 0
    first_element = head * dv * dk

    value = tl.arange(0, BLOCK_V)
    channel = tl.arange(0, BLOCK_K)
    in_v = value < dv
    in_k = channel < dk
    key_head = head // heads_per_key
    q_ptrs = q_ptr + row * stride_q_row + key_head * stride_q_head + channel
    k_ptrs = k_ptr + row * stride_k_row + key_head * stride_k_head + channel
    v_ptrs = v_ptr + row * stride_v_row + head * stride_v_head + value
    dt_ptrs = dt_ptr + row * stride_dt_row + head * stride_dt_head
    beta_ptrs = beta_ptr + row * stride_beta_row + head * stride_beta_head
    decay_ptrs = decay_ptr + row * stride_decay_row + head * stride_decay_head
    out_ptrs = out_ptr + row * stride_out_row + head * stride_out_head + value

    state_offset = (group_row.to(tl.int64) * heads + head) * dv * dk
    state_ptrs = state_ptr + state_offset + value[:, None] * dk + channel[None, :]
    state_mask = in_v[:, None] & in_k[None, :]
    S = tl.load(state_ptrs, mask=state_mask, other=0.0)
    bad_flush = tl.load(bad_flush_ptr + group_row * heads + head)

    for t in range(0, T):
        q = tl.load(q_ptrs + t * stride_q_t, mask=in_k, other=0.0).to(tl.float32)
        k = tl.load(k_ptrs + t * stride_k_t, mask=in_k, other=0.0).to(tl.float32)
        u = tl.load(v_ptrs + t * stride_v_t, mask=in_v, other=0.0).to(tl.float32)
        if HAS_DT:
            u = u * tl.load(dt_ptrs + t * stride_dt_t).to(tl.float32)
        if PER_CHANNEL:
            log_decay = tl.load(decay_ptrs + t * stride_decay_t + channel, mask=in_k, other=0.0)
            S = S * tl.exp(log_decay.to(tl.float32))[None, :]
        else:
            S = S * tl.exp(tl.load(decay_ptrs + t * stride_decay_t).to(tl.float32))
        if DELTA:
            beta = tl.load(beta_ptrs + t * stride_beta_t).to(tl.float32)
            u = beta * (u - tl.sum(S * k[None, :], axis=1))
        S = S + u[:, None] * k[None, :]
        o = tl.sum(S * q[None, :], axis=1)
        tl.store(out_ptrs + t * stride_out_t, o, mask=in_v)
        exact = S
        S = store_and_load(
            S,
            seed,
            layer,
            stream,
            first_flush + t,
            first_element,
            dk,
            FORMAT,
            SR,
            BLOCK_V,
            BLOCK_K,
            QUADS,
        )
        if PARTIAL:
            S = tl.where(applies, S, exact)
        bad_flush = tl.where(has_nonfinite(S) & (bad_flush < 0), first_flush + t, bad_flush)

    tl.store(state_ptrs, S, mask=state_mask)
    tl.store(bad_flush_ptr + group_row * heads + head, bad_flush)


def conventional_scan(
    inputs: OpInputs,
    rows: Tensor,
    streams: Tensor,
    state: Tensor,
    out: Tensor,
    bad_flush: Tensor,
    fmt: Format,
    applies: Tensor | None = None,
    *,
    seed: int,
    layer: int,
    first_flush: int,
) -> None:
    """Run some rows of a segment, storing the state at every step.

    Args:
        inputs: T steps, unit stride along the last axes of q, k, v.
        rows: int64 [R] rows of `inputs` and of `out`.
        streams: int64 [R] global stream ids.
        state: [R, H, dv, dk] FP32 as stored.
        out: [rows, T, H, dv] FP32.
        bad_flush: int32 [R, H] first flush after which a state was not finite, -1 for none.
        fmt: of the state.
        applies: int8 [R, H] whether it is stored in that format (else in FP32); None for all.
        seed: 64-bit seed.
        layer: ordinal of the recurrent layer.
        first_flush: number of the first store.

    Mutates:
        state, out, bad_flush.
    """
    kind = store_kind(fmt)
    block_v, block_k = tile_shape(inputs.dv, inputs.dk)
    dt = inputs.dt if inputs.dt is not None else inputs.log_decay
    beta = inputs.beta if inputs.beta is not None else inputs.log_decay
    conventional_scan_kernel[(inputs.heads, rows.shape[0])](
        inputs.q,
        inputs.k,
        inputs.v,
        dt,
        beta,
        inputs.log_decay,
        state,
        out,
        bad_flush,
        rows,
        streams,
        bad_flush if applies is None else applies,
        signed_seed(seed),
        layer,
        first_flush,
        inputs.steps,
        inputs.heads,
        inputs.heads // inputs.k.shape[2],
        inputs.dv,
        inputs.dk,
        *inputs.q.stride()[:3],
        *inputs.k.stride()[:3],
        *inputs.v.stride()[:3],
        *dt.stride()[:3],
        *beta.stride()[:3],
        *inputs.log_decay.stride()[:3],
        *out.stride()[:3],
        BLOCK_V=block_v,
        BLOCK_K=block_k,
        QUADS=inputs.dk % 4 == 0,
        DELTA=inputs.is_delta,
        PER_CHANNEL=inputs.per_channel,
        HAS_DT=inputs.dt is not None,
        FORMAT=kind.name,
        SR=kind.sr,
        PARTIAL=applies is not None,
        num_warps=tile_warps(block_v, block_k),
        enable_fp_fusion=False,
    )
