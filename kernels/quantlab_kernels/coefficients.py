"""What a window's replay needs besides the state: decays, read-out weights, solved corrections.

None of it depends on the state, so it is computed for all windows of a segment at once and the
scan's serial walk is left with products. For the tokens i = 1..L of one window, with c_i the
cumulated log decay (sums of logs in FP64, never products) and D_ij = exp(c_i - c_j), j <= i:

    weights[j, i] = D_ij (k~_j . q_i), j < i;    own[i] = k_i . q_i
    A[i, j]       = beta_i D_ij (k~_j . k_i), j < i                       (delta rule)
    solve         = (I + A)^-1 diag(beta), so that U = solve (V - D S k)  (delta rule)

k~ is the key's record. With per-channel decays D sits inside the dot product, channel by channel,
as exp(c_ic - c_jc): k / decay would overflow. Where keys are rounded there are two A: `couple`, of
the steps (own key against earlier records), and the one that `solve` inverts, of the flush, where
tokens 1..L-1 enter by their records alone and token L by its unrounded key.

Source: papers/replayssm.md, Eq. 6 and 9-11; Yang et al. 2024, "Parallelizing linear transformers
with the delta rule over sequence length", section 3.
Bytes: reads q, k, decays and beta once; writes 4 (L + 3) bytes per token and head, 8 L more with a
delta rule, 8 (dk - 1) more with per-channel decays. Rounding points: key records only. Exponentials
are the GPU's (2 ulp and 2^-23 |c| relative).
Not covered: L = 1, which has no window.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantlab.recurrence import OpInputs
from quantlab.recurrence.gates import MIN_LOG_DECAY as _MIN_LOG_DECAY
from quantlab_kernels.parts import dot_parts, split_parts, transposed
from quantlab_kernels.rounding import round_record

MIN_LOG_DECAY = tl.constexpr(_MIN_LOG_DECAY)


@triton.jit
def _load_steps(base_ptr, t, live, col, width, stride_t):
    """Load [steps, columns] FP32 of the window's tokens; zero beyond the window or the width."""
    mask = live[:, None] & (col < width)[None, :]
    x = tl.load(base_ptr + t[:, None] * stride_t + col[None, :], mask=mask, other=0.0)
    return x.to(tl.float32)


@triton.jit(do_not_specialize=["T", "n_windows", "stride_decay_row", "stride_beta_row"])
def window_coefficients_kernel(
    q_ptr,
    k_ptr,
    decay_ptr,
    beta_ptr,
    rows_ptr,
    from_start_ptr,
    to_end_ptr,
    weights_ptr,
    own_ptr,
    couple_ptr,
    solve_ptr,
    T,
    heads,
    heads_per_key,
    dk,
    n_windows,
    stride_q_row,
    stride_q_t,
    stride_q_head,
    stride_k_row,
    stride_k_t,
    stride_k_head,
    stride_decay_row,
    stride_decay_t,
    stride_decay_head,
    stride_beta_row,
    stride_beta_t,
    stride_beta_head,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DELTA: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    KEY_RECORD: tl.constexpr,
):
    """One program per (window, head, row of the group)."""
    window = tl.program_id(0)
    head = tl.program_id(1)
    group_row = tl.program_id(2)
    row = tl.load(rows_ptr + group_row)
    step = tl.arange(0, BLOCK_L)
    channel = tl.arange(0, BLOCK_K)
    t = window * L + step
    live = (step < L) & (t < T)

    q_ptrs = q_ptr + row * stride_q_row + (head // heads_per_key) * stride_q_head
    k_ptrs = k_ptr + row * stride_k_row + (head // heads_per_key) * stride_k_head
    unit = (group_row.to(tl.int64) * heads + head) * n_windows + window
    decay_ptrs = decay_ptr + row * stride_decay_row + head * stride_decay_head
    # cumulated in FP64: after one strong gate FP32 sums would have lost digits of all later decays
    if PER_CHANNEL:
        decay = _load_steps(decay_ptrs, t, live, channel, dk, stride_decay_t).to(tl.float64)
        cumulated = tl.cumsum(tl.maximum(decay, MIN_LOG_DECAY), axis=0)
        last = tl.sum(tl.where((step == L - 1)[:, None], cumulated, 0.0), axis=0)[None, :]
        place = unit * BLOCK_L * dk + step[:, None] * dk + channel[None, :]
        inside = (channel < dk)[None, :] & (step < BLOCK_L)[:, None]
    else:
        decay = tl.load(decay_ptrs + t * stride_decay_t, mask=live, other=0.0).to(tl.float64)
        cumulated = tl.cumsum(tl.maximum(decay, MIN_LOG_DECAY), axis=0)
        last = tl.sum(tl.where(step == L - 1, cumulated, 0.0), axis=0)
        place = unit * BLOCK_L + step
        inside = step < BLOCK_L
    tl.store(from_start_ptr + place, tl.exp(cumulated.to(tl.float32)), mask=inside)
    tl.store(to_end_ptr + place, tl.exp((last - cumulated).to(tl.float32)), mask=inside)

    earlier = step[:, None] > step[None, :]  # record j of step i, as [i, j]
    read = tl.zeros([BLOCK_L, BLOCK_L], dtype=tl.float32)
    couple = tl.zeros([BLOCK_L, BLOCK_L], dtype=tl.float32)
    flush_couple = tl.zeros([BLOCK_L, BLOCK_L], dtype=tl.float32)
    rest = tl.zeros([BLOCK_L, BLOCK_L], dtype=tl.float32)
    own = tl.zeros([BLOCK_L], dtype=tl.float32)
    RECORD_PARTS: tl.constexpr = 3 if KEY_RECORD == "fp32" else (2 if KEY_RECORD == "fp16" else 1)
    if PER_CHANNEL:
        q = _load_steps(q_ptrs, t, live, channel, dk, stride_q_t)
        k = _load_steps(k_ptrs, t, live, channel, dk, stride_k_t)
        record = round_record(k, KEY_RECORD)
        flushed = tl.where((step == L - 1)[:, None], k, record)
        own = tl.sum(q * k, axis=1)
        for j in range(0, L):
            is_j = (step == j)[:, None]
            c_j = tl.sum(tl.where(is_j, cumulated, 0.0), axis=0)
            k_j = tl.sum(tl.where(is_j, record, 0.0), axis=0)
            # rows before j are masked below; the minimum keeps their exponentials finite
            gap = tl.minimum(cumulated - c_j[None, :], 0.0).to(tl.float32)
            decayed = k_j[None, :] * tl.exp(gap)
            to_j = (step == j)[None, :]
            read = tl.where(to_j, tl.sum(decayed * q, axis=1)[:, None], read)
            if DELTA:
                couple = tl.where(to_j, tl.sum(decayed * k, axis=1)[:, None], couple)
                if KEY_RECORD != "fp32":
                    row_j = tl.sum(decayed * flushed, axis=1)
                    flush_couple = tl.where(to_j, row_j[:, None], flush_couple)
    else:
        for first in range(0, BLOCK_K, BLOCK_C):
            part = first + tl.arange(0, BLOCK_C)
            q = _load_steps(q_ptrs, t, live, part, dk, stride_q_t)
            k = _load_steps(k_ptrs, t, live, part, dk, stride_k_t)
            own += tl.sum(q * k, axis=1)
            record = round_record(k, KEY_RECORD)
            records = split_parts(record, RECORD_PARTS)
            right = transposed(records)
            read = dot_parts(split_parts(q, 3), right, read)
            if DELTA:
                flush_couple = dot_parts(records, right, flush_couple)
                if KEY_RECORD != "fp32":
                    rest = dot_parts(split_parts(k - record, 2), right, rest, 1)
        couple = flush_couple + rest
        flush_couple = tl.where((step == L - 1)[:, None], couple, flush_couple)
        gap = tl.minimum(cumulated[:, None] - cumulated[None, :], 0.0).to(tl.float32)
        between = tl.exp(gap)
        read = read * between
        couple = couple * between
        flush_couple = flush_couple * between

    square = unit * BLOCK_L * BLOCK_L + step[:, None] * BLOCK_L + step[None, :]
    tl.store(weights_ptr + square, tl.trans(tl.where(earlier, read, 0.0)))
    tl.store(own_ptr + unit * BLOCK_L + step, own)
    if DELTA:
        beta_ptrs = beta_ptr + row * stride_beta_row + head * stride_beta_head
        beta = tl.load(beta_ptrs + t * stride_beta_t, mask=live, other=0.0).to(tl.float32)
        couple = tl.where(earlier, couple, 0.0) * beta[:, None]
        tl.store(couple_ptr + square, tl.trans(couple))
        if KEY_RECORD != "fp32":
            couple = tl.where(earlier, flush_couple, 0.0) * beta[:, None]
        # rows of (I + A)^-1 diag(beta) from the first down: x_i = beta_i e_i - sum_j A_ij x_j
        solve = tl.where(step[:, None] == step[None, :], beta[:, None], 0.0)
        for i in range(1, L):
            is_i = (step == i)[:, None]
            a_i = tl.sum(tl.where(is_i, couple, 0.0), axis=0)
            solve = solve - tl.where(is_i, tl.sum(a_i[:, None] * solve, axis=0)[None, :], 0.0)
        tl.store(solve_ptr + square, tl.trans(solve))


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """Coefficients of all windows of a segment: R rows, H heads, W windows, steps padded to B.

    Attributes:
        from_start: [R, H, W, B] or [R, H, W, B, dk] FP32 decay from before step 1 to after step i.
        to_end: likewise, from after step i to after step L.
        weights: [R, H, W, B, B] FP32, [.., j, i] as in the module's docstring.
        own: [R, H, W, B] FP32.
        couple: [R, H, W, B, B] FP32, [.., j, i], 0 unless j < i; empty without a delta rule.
        solve: [R, H, W, B, B] FP32, [.., j, i]; empty without a delta rule.
    """

    from_start: Tensor
    to_end: Tensor
    weights: Tensor
    own: Tensor
    couple: Tensor
    solve: Tensor


def window_coefficients(
    inputs: OpInputs, rows: Tensor, *, window: int, key_record: str
) -> Coefficients:
    """Form the coefficients of some rows' windows.

    Args:
        inputs: T steps from a window's first on.
        rows: int64 [R] rows of `inputs`.
        window: L, 2 to 64.
        key_record: "fp32", "fp16" or "bf16".

    Returns:
        Coefficients of ceil(T / L) windows; steps beyond T are zero.
    """
    n_rows, heads, dk = rows.shape[0], inputs.heads, inputs.dk
    n_windows = -(-inputs.steps // window)
    block = max(16, triton.next_power_of_2(window))
    block_k = max(16, triton.next_power_of_2(dk))
    lead = (n_rows, heads, n_windows)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=rows.device)

    per_step = (*lead, block, dk) if inputs.per_channel else (*lead, block)
    square = (*lead, block, block)
    delta = inputs.is_delta
    out = Coefficients(
        from_start=empty(*per_step),
        to_end=empty(*per_step),
        weights=empty(*square),
        own=empty(*lead, block),
        couple=empty(*square) if delta else empty(0),
        solve=empty(*square) if delta else empty(0),
    )
    beta = inputs.beta if inputs.beta is not None else inputs.log_decay
    window_coefficients_kernel[(n_windows, heads, n_rows)](
        inputs.q,
        inputs.k,
        inputs.log_decay,
        beta,
        rows,
        out.from_start,
        out.to_end,
        out.weights,
        out.own,
        out.couple,
        out.solve,
        inputs.steps,
        heads,
        heads // inputs.k.shape[2],
        dk,
        n_windows,
        *inputs.q.stride()[:3],
        *inputs.k.stride()[:3],
        *inputs.log_decay.stride()[:3],
        *beta.stride()[:3],
        L=window,
        BLOCK_L=block,
        BLOCK_K=block_k,
        BLOCK_C=min(32, block_k),
        DELTA=delta,
        PER_CHANNEL=inputs.per_channel,
        KEY_RECORD=key_record,
        # a warp of its own reduces without barriers
        num_warps=4 if inputs.per_channel else max(1, min(4, block * block // 256)),
        enable_fp_fusion=False,
    )
    return out
