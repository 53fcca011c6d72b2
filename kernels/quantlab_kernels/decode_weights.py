"""Replay decode, what the heads of a step share: how the token meets its records, once per head.

    w_j = g_j (k_j.q),   a_j = g_j (k_j.k),   own = k.q,   g the decay since the checkpoint

One small program per (planned row, unit), a unit being the value heads that share q and k (one head
where decays are per channel). What it leaves is ready for the products of decode_steps.py: q and k
split into columns, and the weights of every head likewise. It also appends the token's key, decay
and strength to the records. Decays are cumulated from the newest record back, so that no difference
of logs is taken.

Rounding points: the record of k.
Bytes: h records of k per key head, h logs per head; it leaves 2 KB a unit and 256 + 16 a head (1 KB
and 144 for FP32), which the step finds in the second-level cache.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from quantlab_kernels.decode_plan import COUNT, ROW, SLOT
from quantlab_kernels.decode_products import (
    as_bits,
    columns_of,
    fetch_codes,
    matrix_format,
    operand,
    operand_columns,
    pair_sums,
)
from quantlab_kernels.decode_records import load_record, store_record


@triton.jit
def _since(log_now, later, count, BLOCK_L: tl.constexpr):
    """Form the decay since each record, by age, and since the checkpoint: [BLOCK_L, N] and [N]."""
    age = tl.arange(0, BLOCK_L)[:, None]
    since = tl.cumsum(tl.where(age == 0, log_now[None, :], later), axis=0)
    whole = tl.sum(tl.where(age == count, since, 0.0), axis=0)
    return tl.exp(since), tl.exp(whole)


@triton.jit
def _channel_decays(
    log_ptrs, records_ptr, place, order, count, apart, BLOCK_L: tl.constexpr, DK: tl.constexpr
):
    """Load decays per channel, in some order: the token's logs, and as `_since`."""
    age = tl.arange(0, BLOCK_L)
    known = order < DK
    now = tl.load(log_ptrs + order, mask=known, other=0.0).to(tl.float32)
    later = tl.load(
        records_ptr + place + order[None, :] - (age * apart)[:, None],
        mask=((age > 0) & (age <= count))[:, None] & known[None, :],
        other=0.0,
    )
    since, whole = _since(now, later, count, BLOCK_L)
    return now, since, whole


@triton.jit(do_not_specialize=["n_rows"])
def step_weights_kernel(
    q_ptr,
    k_ptr,
    log_ptr,
    strength_ptr,
    key_records_ptr,
    log_records_ptr,
    strength_records_ptr,
    lines_ptr,
    counts_ptr,
    columns_ptr,
    weights_ptr,
    factors_ptr,
    n_rows,
    heads: tl.constexpr,
    key_heads: tl.constexpr,
    stride_q_row,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    stride_log_row,
    stride_log_head,
    stride_strength_row,
    stride_strength_head,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DK: tl.constexpr,
    COLUMNS: tl.constexpr,
    DELTA: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    HAS_DT: tl.constexpr,
    KEEP_V: tl.constexpr,
    FORMAT: tl.constexpr,
    KEY_RECORD: tl.constexpr,
    WRITTEN_RECORD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per (unit, planned row).

    columns_ptr: [rows, units, COLUMNS, 8] 16-bit, in operand order; fp32 [rows, units, 2, COLUMNS].
    weights_ptr: [rows, heads, BLOCK_L, 8] 16-bit; FP32 records [rows, heads, 2, BLOCK_L].
    factors_ptr: [rows, heads, 4] FP32: of the state's products, of the records', own, nothing.
    OVERLAP: the step may be started once every program has begun.
    """
    if OVERLAP:
        gdc_launch_dependents()
    HEADS_PER_KEY: tl.constexpr = heads // key_heads
    UNIT: tl.constexpr = 1 if PER_CHANNEL else HEADS_PER_KEY
    MATRIX_KEYS: tl.constexpr = KEY_RECORD != "fp32" and not PER_CHANNEL
    unit = tl.program_id(0)
    line = tl.program_id(1)
    head0 = unit * UNIT
    key_head = head0 // HEADS_PER_KEY
    n_steps = tl.load(counts_ptr)
    row = tl.load(lines_ptr + ROW * n_rows + line).to(tl.int64)
    slot = tl.load(lines_ptr + SLOT * n_rows + line).to(tl.int64)
    count = tl.load(lines_ptr + COUNT * n_rows + line)
    if line < n_steps:
        record = slot * (L - 1) + count  # the token's
        age = tl.arange(0, BLOCK_L)
        past = age < count
        channel = tl.arange(0, COLUMNS)
        known = channel < DK
        order = operand_columns(FORMAT, COLUMNS)
        q_ptrs = q_ptr + row * stride_q_row + key_head * stride_q_head
        k_ptrs = k_ptr + row * stride_k_row + key_head * stride_k_head
        key_row = (record - 1) * key_heads + key_head
        if MATRIX_KEYS:
            keys, _ = fetch_codes(
                key_records_ptr.to(tl.pointer_type(tl.int32), bitcast=True),
                key_records_ptr,
                key_row,
                -age,
                past,
                DK,
                COLUMNS,
                KEY_RECORD,
                1,
                key_heads,
            )
        else:
            keys = load_record(
                key_records_ptr + key_row * DK + channel - (age * (key_heads * DK))[:, None],
                past[:, None] & known[None, :],
                KEY_RECORD,
            )
        q = tl.load(q_ptrs + channel, mask=known, other=0.0).to(tl.float32)
        k = tl.load(k_ptrs + channel, mask=known, other=0.0).to(tl.float32)
        q_tile = tl.load(q_ptrs + order, mask=order < DK, other=0.0).to(tl.float32)
        k_tile = tl.load(k_ptrs + order, mask=order < DK, other=0.0).to(tl.float32)
        inner = tl.arange(0, BLOCK_H)
        head = head0 + inner
        mine = inner < UNIT
        scalar = slot * (heads * (L - 1)) + head * (L - 1) + count
        if PER_CHANNEL:
            log_ptrs = log_ptr + row * stride_log_row + head0 * stride_log_head
            place = (record * heads + head0) * DK
            apart: tl.constexpr = heads * DK
            now, since, _ = _channel_decays(
                log_ptrs, log_records_ptr, place, channel, count, apart, BLOCK_L, DK
            )
            tl.store(log_records_ptr + place + channel, now, mask=known)
            keys = keys * since
            # the same again for the columns, which are in another order
            _, _, whole = _channel_decays(
                log_ptrs, log_records_ptr, place, order, count, apart, BLOCK_L, DK
            )
            q_tile = q_tile * whole
            k_tile = k_tile * whole
            since = tl.full([BLOCK_L, BLOCK_H], 1.0, dtype=tl.float32)
            whole = tl.full([BLOCK_H], 1.0, dtype=tl.float32)
        else:
            log_place = row * stride_log_row + head * stride_log_head
            now = tl.load(log_ptr + log_place, mask=mine, other=0.0).to(tl.float32)
            tl.store(log_records_ptr + scalar, now, mask=mine)
            later = tl.load(
                log_records_ptr + scalar[None, :] - age[:, None],
                mask=((age > 0) & (age <= count))[:, None] & mine[None, :],
                other=0.0,
            )
            since, whole = _since(now, later, count, BLOCK_L)
        if HAS_DT or (DELTA and KEEP_V):
            strength_ptrs = strength_ptr + row * stride_strength_row + head * stride_strength_head
            strength = tl.load(strength_ptrs, mask=mine, other=0.0).to(tl.float32)
            tl.store(strength_records_ptr + scalar, strength, mask=mine)
        if HAS_DT:
            since *= tl.load(
                strength_records_ptr + scalar[None, :] - 1 - age[:, None],
                mask=past[:, None] & mine[None, :],
                other=0.0,
            )
        if head0 % HEADS_PER_KEY == 0:
            own_place = (record * key_heads + key_head) * DK + channel
            store_record(key_records_ptr + own_place, k, known, KEY_RECORD)

        if MATRIX_KEYS:
            order = operand_columns(KEY_RECORD, COLUMNS)
            q_keys = tl.load(q_ptrs + order, mask=order < DK, other=0.0).to(tl.float32)
            k_keys = tl.load(k_ptrs + order, mask=order < DK, other=0.0).to(tl.float32)
            columns, factor = columns_of(q_keys, k_keys, KEY_RECORD, DELTA)
            keys = operand(keys, 0, BLOCK_L, COLUMNS, KEY_RECORD, 1)
            met_q, met_k = pair_sums(tl.dot(keys, columns, out_dtype=tl.float32) * factor)
        else:
            met_q = tl.sum(keys * q[None, :], axis=1)
            met_k = tl.sum(keys * k[None, :], axis=1)
        place = line * (heads // UNIT) + unit
        state_factor = 1.0
        if matrix_format(FORMAT):
            columns, state_factor = columns_of(q_tile, k_tile, FORMAT, DELTA)
            part = tl.arange(0, 8)
            at = (place * COLUMNS + channel)[:, None] * 8 + part[None, :]
            tl.store(columns_ptr + at, as_bits(columns))
        else:
            tl.store(columns_ptr + place * (2 * COLUMNS) + channel, q_tile)
            tl.store(columns_ptr + place * (2 * COLUMNS) + COLUMNS + channel, k_tile)
        weight_q = met_q[:, None] * since
        weight_k = met_k[:, None] * since
        at = line * heads + head
        weight_factor = tl.full([BLOCK_H], 1.0, dtype=tl.float32)
        if WRITTEN_RECORD != "fp32":
            flat: tl.constexpr = BLOCK_L * BLOCK_H
            weight_q = tl.reshape(weight_q, [flat])
            weight_k = tl.reshape(weight_k, [flat])
            columns, factor = columns_of(weight_q, weight_k, WRITTEN_RECORD, DELTA)
            weight_factor = weight_factor * factor
            i = tl.arange(0, flat)
            part = tl.arange(0, 8)
            to = (line * heads + head0 + i % BLOCK_H) * BLOCK_L + i // BLOCK_H
            tl.store(
                weights_ptr + to[:, None] * 8 + part[None, :],
                as_bits(columns),
                mask=(i % BLOCK_H < UNIT)[:, None],
            )
        else:
            to = at[None, :] * (2 * BLOCK_L) + age[:, None]
            tl.store(weights_ptr + to, weight_q, mask=mine[None, :])
            tl.store(weights_ptr + to + BLOCK_L, weight_k, mask=mine[None, :])
        own = tl.sum(q * k, axis=0)
        tl.store(factors_ptr + at * 4, whole * state_factor, mask=mine)
        tl.store(factors_ptr + at * 4 + 1, weight_factor, mask=mine)
        tl.store(factors_ptr + at * 4 + 2, own + tl.zeros_like(whole), mask=mine)
