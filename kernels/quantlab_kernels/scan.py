"""The windowed scan: a gated linear recurrence, its state stored in a narrow format every L tokens.

    S_t = S_{t-1} decay_t + u_t k_t^T,  o_t = S_t q_t,
    u_t = v_t, or beta_t (v_t - decay_t S_{t-1} k_t) with a delta rule

One program walks a whole segment for one (row, head) with its state on chip; decay is one number
per head or one per key channel (PER_CHANNEL), corrections exist or not (DELTA).

Rounding points, in the order they happen in a window, the same as in `quantlab.replay.scan`:
1. Steps 1..L-1 read the read copy. A step uses its own k, v, u unrounded; later steps its record
   (KEY_RECORD for k and v, CORRECTION_RECORD for u, row by row inside the substitution).
2. Step L reads the recurrence copy: corrections of all L tokens re-derived in FP32 from the records
   of tokens 1..L-1 and the unrounded token L (FLUSH "rederive"), or the recorded ones (FLUSH
   "fold"); o_L = S_L q_L from the state about to be stored.
3. Both copies are then stored from that FP32 S_L: rounded to their formats and read back.
An open last window (T not a multiple of L) gives outputs and leaves the state as it was.

Precision: each FP32 product is three TF32 products of split operands, never one.
Bytes: per token and head q, v, o once, k twice, and the coefficients of coefficients.py; the state
moves once a segment. At 128 x 128 the floor is arithmetic: the store's, some 60 operations a word.
Not covered: L = 1 (conventional.py), exact FP64 records, formats whose block spans state rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantlab.recurrence import OpInputs
from quantlab.replay.policy import Policy
from quantlab.replay.records import RecordTypes
from quantlab_kernels.coefficients import window_coefficients
from quantlab_kernels.draws import COPY_STRIDE
from quantlab_kernels.rounding import round_record
from quantlab_kernels.stores import (
    has_nonfinite,
    signed_seed,
    store_and_load,
    store_kind,
    tile_shape,
    tile_warps,
)

MAX_WINDOW = 64
RECORD_NAMES = {None: "fp32", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
"""Type of a record to KEY_RECORD and CORRECTION_RECORD."""
UNSPECIALIZED = [
    *("T", "n_windows", "seed", "layer", "first_flush"),
    *("stride_dt_row", "stride_beta_row"),
]
"""Arguments that differ from call to call: their values must not ask for another compilation."""


@triton.jit
def _load_steps(base_ptr, t, live, width, stride_t, BLOCK: tl.constexpr):
    """Load [BLOCK_L, BLOCK] FP32 of the window's tokens; zero beyond the window or the width."""
    col = tl.arange(0, BLOCK)
    mask = live[:, None] & (col < width)[None, :]
    x = tl.load(base_ptr + t[:, None] * stride_t + col[None, :], mask=mask, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _load_square(base_ptr, unit, BLOCK_L: tl.constexpr):
    step = tl.arange(0, BLOCK_L)
    return tl.load(base_ptr + unit * BLOCK_L * BLOCK_L + step[:, None] * BLOCK_L + step[None, :])


@triton.jit
def _load_decays(
    base_ptr, unit, dk, BLOCK_L: tl.constexpr, BLOCK_K: tl.constexpr, PER_CHANNEL: tl.constexpr
):
    """Load decays of the window's steps: [BLOCK_L, BLOCK_K] per channel, [BLOCK_L, 1] per head."""
    step = tl.arange(0, BLOCK_L)
    if PER_CHANNEL:
        channel = tl.arange(0, BLOCK_K)
        ptrs = base_ptr + (unit * BLOCK_L + step[:, None]) * dk + channel[None, :]
        return tl.load(ptrs, mask=(channel < dk)[None, :], other=0.0)
    else:
        return tl.load(base_ptr + unit * BLOCK_L + step)[:, None]


@triton.jit
def _load_total(
    base_ptr,
    unit,
    dk,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
):
    """Load a full window's decay of the state: [1, BLOCK_K] per channel, a number per head."""
    if PER_CHANNEL:
        channel = tl.arange(0, BLOCK_K)
        ptrs = base_ptr + (unit * BLOCK_L + L - 1) * dk + channel
        return tl.load(ptrs, mask=channel < dk, other=0.0)[None, :]
    else:
        return tl.load(base_ptr + unit * BLOCK_L + L - 1)


@triton.jit
def _split(x):
    """Split FP32 into a TF32 value and a rest, x = big + rest exactly (not at inf)."""
    bits = x.to(tl.int32, bitcast=True)
    big = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return big, x - big


@triton.jit
def _state_products(S_big, S_rest, decayed):
    """Form S x for decayed keys or queries [BLOCK_L, BLOCK_K]: [BLOCK_V, BLOCK_L].

    Three TF32 products, smallest first; the dropped one is below 2**-22 of |S| |x|.
    """
    big, rest = _split(tl.trans(decayed))
    product = tl.dot(S_rest, big, input_precision="tf32")
    product = tl.dot(S_big, rest, product, input_precision="tf32")
    return tl.dot(S_big, big, product, input_precision="tf32")


@triton.jit
def _window_products(
    stored,
    S,
    k_ptrs,
    q_ptrs,
    from_start_ptr,
    unit,
    t,
    live,
    dk,
    stride_q_t,
    stride_k_t,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DELTA: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    SEPARATE: tl.constexpr,
    FLUSH: tl.constexpr,
    SECOND: tl.constexpr,
    KEY_RECORD: tl.constexpr,
):
    """Form the products of the stored copies with a window's decayed queries and keys.

    They are formed right after a store, so the read copy lives no longer than that.

    Returns:
        read copy times queries, read copy times keys, recurrence copy times the keys of the flush
        ([BLOCK_V, BLOCK_L] each; unused ones repeat the first), and S, which is its two parts put
        together again: the whole need not live beside them.
    """
    queries = _load_steps(q_ptrs, t, live, dk, stride_q_t, BLOCK_K)
    decay = _load_decays(from_start_ptr, unit, dk, BLOCK_L, BLOCK_K, PER_CHANNEL)
    big, rest = _split(stored)
    read_q = _state_products(big, rest, queries * decay)
    read_k = read_q
    recur_k = read_q
    if DELTA:
        keys = _load_steps(k_ptrs, t, live, dk, stride_k_t, BLOCK_K)
        read_k = _state_products(big, rest, keys * decay)
        if SECOND:
            if FLUSH == "rederive":
                is_last = tl.arange(0, BLOCK_L) == L - 1
                keys = tl.where(is_last[:, None], keys, round_record(keys, KEY_RECORD))
            if SEPARATE:
                big, rest = _split(S)
            recur_k = _state_products(big, rest, keys * decay)
    if (not SEPARATE) or (DELTA and SECOND):
        S = big + rest
    return read_q, read_k, recur_k, S


@triton.jit(do_not_specialize=UNSPECIALIZED)
def windowed_scan_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dt_ptr,
    beta_ptr,
    from_start_ptr,
    to_end_ptr,
    weights_ptr,
    own_ptr,
    couple_ptr,
    solve_ptr,
    recur_ptr,
    read_ptr,
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
    n_windows,
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
    stride_out_row,
    stride_out_t,
    stride_out_head,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    QUADS: tl.constexpr,
    DELTA: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    HAS_DT: tl.constexpr,
    SEPARATE: tl.constexpr,
    READ_FORMAT: tl.constexpr,
    READ_SR: tl.constexpr,
    RECUR_FORMAT: tl.constexpr,
    RECUR_SR: tl.constexpr,
    KEY_RECORD: tl.constexpr,
    CORRECTION_RECORD: tl.constexpr,
    FLUSH: tl.constexpr,
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

    ROUNDED: tl.constexpr = (KEY_RECORD != "fp32") or (CORRECTION_RECORD != "fp32")
    # a second set of corrections, on the recurrence copy, is formed only where it can differ
    SECOND: tl.constexpr = DELTA and (SEPARATE or (ROUNDED and FLUSH == "rederive"))

    step = tl.arange(0, BLOCK_L)
    value = tl.arange(0, BLOCK_V)
    channel = tl.arange(0, BLOCK_K)
    is_last = step == L - 1

    unit0 = (group_row.to(tl.int64) * heads + head) * n_windows
    q_ptrs = q_ptr + row * stride_q_row + (head // heads_per_key) * stride_q_head
    k_ptrs = k_ptr + row * stride_k_row + (head // heads_per_key) * stride_k_head
    v_ptrs = v_ptr + row * stride_v_row + head * stride_v_head
    dt_ptrs = dt_ptr + row * stride_dt_row + head * stride_dt_head
    beta_ptrs = beta_ptr + row * stride_beta_row + head * stride_beta_head
    out_ptrs = out_ptr + row * stride_out_row + head * stride_out_head

    state_offset = (group_row.to(tl.int64) * heads + head) * dv * dk
    state_tile = value[:, None] * dk + channel[None, :]
    state_mask = (value < dv)[:, None] & (channel < dk)[None, :]
    S = tl.load(recur_ptr + state_offset + state_tile, mask=state_mask, other=0.0)
    if SEPARATE:
        stored = tl.load(read_ptr + state_offset + state_tile, mask=state_mask, other=0.0)
    else:
        stored = S

    t = step
    live = (step < L) & (t < T)
    read_q, read_k, recur_k, S = _window_products(
        stored,
        S,
        k_ptrs,
        q_ptrs,
        from_start_ptr,
        unit0,
        t,
        live,
        dk,
        stride_q_t,
        stride_k_t,
        L,
        BLOCK_L,
        BLOCK_K,
        DELTA,
        PER_CHANNEL,
        SEPARATE,
        FLUSH,
        SECOND,
        KEY_RECORD,
    )
    bad_flush = tl.load(bad_flush_ptr + group_row * heads + head)
    for window in range(0, n_windows):
        t = window * L + step
        live = (step < L) & (t < T)
        full = (window + 1) * L <= T
        unit = unit0 + window
        keys = _load_steps(k_ptrs, t, live, dk, stride_k_t, BLOCK_K)
        v = tl.trans(_load_steps(v_ptrs, t, live, dv, stride_v_t, BLOCK_V))
        v_record = round_record(v, KEY_RECORD)
        if HAS_DT:
            dt = tl.load(dt_ptrs + t * stride_dt_t, mask=live, other=0.0).to(tl.float32)
            v = v * dt[None, :]
            v_record = v_record * dt[None, :]
        weights = _load_square(weights_ptr, unit, BLOCK_L)
        own = tl.load(own_ptr + unit * BLOCK_L + step)

        # corrections of the steps, from the read copy
        if DELTA:
            if ROUNDED:
                beta = tl.load(beta_ptrs + t * stride_beta_t, mask=live, other=0.0).to(tl.float32)
                target = (v - read_k) * beta[None, :]
                u = tl.zeros([BLOCK_V, BLOCK_L], dtype=tl.float32)
                u_record = tl.zeros([BLOCK_V, BLOCK_L], dtype=tl.float32)
                for i in range(0, L):
                    a_i = tl.load(couple_ptr + (unit * BLOCK_L + i) * BLOCK_L + step)
                    is_i = (step == i)[None, :]
                    u_i = tl.sum(tl.where(is_i, target, u_record * -a_i[None, :]), axis=1)
                    u = tl.where(is_i, u_i[:, None], u)
                    u_record = tl.where(
                        is_i, round_record(u_i, CORRECTION_RECORD)[:, None], u_record
                    )
            else:
                solve = _load_square(solve_ptr, unit, BLOCK_L)
                u = tl.dot(v - read_k, solve, input_precision="tf32x3")
                u_record = u
        else:
            u = v
            u_record = v_record

        o = read_q + tl.dot(u_record, weights, input_precision="tf32x3") + u * own[None, :]

        # what is folded: records of tokens 1..L-1, token L as it is
        if SECOND and FLUSH == "rederive":
            solve = _load_square(solve_ptr, unit, BLOCK_L)
            v_flush = tl.where(is_last[None, :], v, v_record)
            u_flush = tl.dot(v_flush - recur_k, solve, input_precision="tf32x3")
        elif SECOND:
            beta = tl.load(beta_ptrs + t * stride_beta_t, mask=live, other=0.0).to(tl.float32)
            a_last = tl.load(couple_ptr + (unit * BLOCK_L + L - 1) * BLOCK_L + step)
            target = (v - recur_k) * beta[None, :]
            u_last = tl.sum(tl.where(is_last[None, :], target, u_record * -a_last[None, :]), axis=1)
            u_flush = tl.where(is_last[None, :], u_last[:, None], u_record)
        else:
            u_flush = tl.where(is_last[None, :], u, u_record)

        flushed = tl.where(is_last[:, None], keys, round_record(keys, KEY_RECORD))
        flushed *= _load_decays(to_end_ptr, unit, dk, BLOCK_L, BLOCK_K, PER_CHANNEL)
        total = _load_total(from_start_ptr, unit, dk, L, BLOCK_L, BLOCK_K, PER_CHANNEL)
        folded = tl.dot(u_flush, flushed, S * total, input_precision="tf32x3")

        out_tile = out_ptrs + t[None, :] * stride_out_t + value[:, None]
        out_mask = live[None, :] & (value < dv)[:, None]
        if SEPARATE or SECOND:
            # step L reads the state being stored; an open window has none, and does not store it
            t_last = tl.minimum(window * L + L - 1, T - 1)
            q_last = tl.load(q_ptrs + t_last * stride_q_t + channel, mask=channel < dk, other=0.0)
            o_last = tl.sum(folded * q_last.to(tl.float32)[None, :], axis=1)
            o = tl.where(is_last[None, :], o_last[:, None], o)
        tl.store(out_tile, o, mask=out_mask)

        if full:
            flush = first_flush + window
            if SEPARATE:
                stored = store_and_load(
                    folded,
                    seed,
                    layer + COPY_STRIDE,
                    stream,
                    flush,
                    first_element,
                    dk,
                    READ_FORMAT,
                    READ_SR,
                    BLOCK_V,
                    BLOCK_K,
                    QUADS,
                )
                if PARTIAL:
                    stored = tl.where(applies, stored, folded)
                if (window + 2) * L > T:
                    tl.store(read_ptr + state_offset + state_tile, stored, mask=state_mask)
            S = store_and_load(
                folded,
                seed,
                layer,
                stream,
                flush,
                first_element,
                dk,
                RECUR_FORMAT,
                RECUR_SR,
                BLOCK_V,
                BLOCK_K,
                QUADS,
            )
            if PARTIAL:
                S = tl.where(applies, S, folded)
            if SEPARATE:
                bad = has_nonfinite(stored) | has_nonfinite(S)
            else:
                stored = S
                bad = has_nonfinite(S)
            bad_flush = tl.where(bad & (bad_flush < 0), flush, bad_flush)

            t = t + L
            live = (step < L) & (t < T)
            following = unit0 + tl.minimum(window + 1, n_windows - 1)
            read_q, read_k, recur_k, S = _window_products(
                stored,
                S,
                k_ptrs,
                q_ptrs,
                from_start_ptr,
                following,
                t,
                live,
                dk,
                stride_q_t,
                stride_k_t,
                L,
                BLOCK_L,
                BLOCK_K,
                DELTA,
                PER_CHANNEL,
                SEPARATE,
                FLUSH,
                SECOND,
                KEY_RECORD,
            )

    tl.store(recur_ptr + state_offset + state_tile, S, mask=state_mask)
    tl.store(bad_flush_ptr + group_row * heads + head, bad_flush)


def windowed_scan(
    inputs: OpInputs,
    rows: Tensor,
    streams: Tensor,
    recur: Tensor,
    read: Tensor | None,
    out: Tensor,
    bad_flush: Tensor,
    policy: Policy,
    applies: Tensor | None = None,
    *,
    seed: int,
    layer: int,
    first_flush: int,
) -> None:
    """Run some rows of a segment that starts at a window's first step.

    Args:
        inputs: T steps, unit stride along the last axes of q, k, v.
        rows: int64 [R] rows of `inputs` and of `out`.
        streams: int64 [R] global stream ids.
        recur: [R, H, dv, dk] FP32, the recurrence or shared copy as stored.
        read: likewise the read copy; None unless the policy is separate.
        out: [rows, T, H, dv] FP32.
        bad_flush: int32 [R, H] first flush after which a copy was not finite, -1 for none.
        policy: of these rows, 2 <= L <= 64.
        applies: int8 [R, H] whether copies are stored in its formats (else in FP32); None for all.
        seed: 64-bit seed.
        layer: ordinal of the recurrent layer.
        first_flush: number of the first store.

    Mutates:
        recur, read, out, bad_flush.

    Raises:
        ValueError: a window or a format that the kernel does not have.
    """
    if not 2 <= policy.window <= MAX_WINDOW:
        raise ValueError(f"the kernel has windows of 2 to {MAX_WINDOW}, got {policy.window}")
    recur_kind, read_kind = store_kind(policy.recur), store_kind(policy.read)
    types = RecordTypes.of(policy.records, inputs)
    key_record = RECORD_NAMES[types.k or types.v]
    coefficients = window_coefficients(inputs, rows, window=policy.window, key_record=key_record)
    block_v, block_k = tile_shape(inputs.dv, inputs.dk)
    dt = inputs.dt if inputs.dt is not None else inputs.log_decay
    beta = inputs.beta if inputs.beta is not None else inputs.log_decay
    windowed_scan_kernel[(inputs.heads, rows.shape[0])](
        inputs.q,
        inputs.k,
        inputs.v,
        dt,
        beta,
        coefficients.from_start,
        coefficients.to_end,
        coefficients.weights,
        coefficients.own,
        coefficients.couple,
        coefficients.solve,
        recur,
        recur if read is None else read,
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
        coefficients.own.shape[2],
        *inputs.q.stride()[:3],
        *inputs.k.stride()[:3],
        *inputs.v.stride()[:3],
        *dt.stride()[:3],
        *beta.stride()[:3],
        *out.stride()[:3],
        L=policy.window,
        BLOCK_L=coefficients.own.shape[3],
        BLOCK_V=block_v,
        BLOCK_K=block_k,
        QUADS=inputs.dk % 4 == 0,
        DELTA=inputs.is_delta,
        PER_CHANNEL=inputs.per_channel,
        HAS_DT=inputs.dt is not None,
        SEPARATE=read is not None,
        READ_FORMAT=read_kind.name,
        READ_SR=read_kind.sr,
        RECUR_FORMAT=recur_kind.name,
        RECUR_SR=recur_kind.sr,
        KEY_RECORD=key_record,
        CORRECTION_RECORD=RECORD_NAMES[types.u],
        FLUSH=policy.corrections,
        PARTIAL=applies is not None,
        num_warps=tile_warps(block_v, block_k),
        num_stages=2,
        enable_fp_fusion=False,
    )
