"""Replay decode, a step that does not flush: outputs behind h records, the state only read.

    o = g S q + sum_j w_j u_j + (k.q) u,   w_j = g_j (k_j.q),   g_j the decay since record j,
    u = v, or beta (v - g S k - sum_j a_j u_j) with a_j = g_j (k_j.k) for a delta rule

One pass over the read copy serves S q and S k. With decays per key channel, q and k take the decay
before they meet S, and g_j sits inside the products with the records' keys.

How it runs: a program walks items (row, key head, part of its value heads) and, inside, tiles of
BLOCK_V state rows. Before it works on a tile, or on the keys of a new item, it has issued the loads
of the next tile: the state's codes, the records behind them and the value. They depend on the
plan's line alone.
Decays are cumulated from the newest record back, so that no difference of logs is taken.

Rounding points: the token's k, v and u are rounded to their records as they are appended; the step
itself uses them unrounded. The state is not written.
Bytes, per row and value head: the read copy once, h records of u (and h of k per key head), one
record appended. Floor: those over the bandwidth.
Not covered: L = 1 (decode_conventional.py), several tokens at once.
"""

import triton
import triton.language as tl

from quantlab_kernels.decode_formats import (
    as_multiplier,
    fetch_tile,
    tile_product,
)
from quantlab_kernels.decode_plan import COUNT, ROW, SLOT
from quantlab_kernels.rounding import round_bf16


@triton.jit
def load_record(ptrs, mask, RECORD: tl.constexpr):
    """Load records as FP32; bf16 is kept as int16 bit patterns."""
    x = tl.load(ptrs, mask=mask, other=0)
    return record_value(x, RECORD)


@triton.jit
def record_value(x, RECORD: tl.constexpr):
    """Widen a loaded record to FP32."""
    if RECORD == "bf16":
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def store_record(ptrs, x, mask, RECORD: tl.constexpr):
    """Round FP32 to a record and append it."""
    if RECORD == "bf16":
        bits = round_bf16(x, x, False).to(tl.int32, bitcast=True) >> 16
        tl.store(ptrs, bits.to(tl.int16), mask=mask)
    elif RECORD == "fp16":
        tl.store(ptrs, x.to(tl.float16), mask=mask)
    else:
        tl.store(ptrs, x, mask=mask)


@triton.jit
def _fetch(
    tile,
    n_tiles,
    codes_ptr,
    scales_ptr,
    state_scale_ptr,
    written_ptr,
    v_ptr,
    lines_ptr,
    n_rows,
    per_row,
    heads,
    dv,
    slot_states,
    slot_records,
    stride_v_row,
    stride_v_head,
    FORMAT: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_L: tl.constexpr,
    DK: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Issue the large loads of this program's tile number `tile`: state rows, records, the value.

    Nothing is read beyond its last tile.
    """
    live = tile < n_tiles
    tile = tl.where(live, tile, 0)
    item = tl.program_id(0) + tile // (HEADS * BLOCKS) * tl.num_programs(0)
    local = tile % (HEADS * BLOCKS)
    line = item // per_row
    within = item - line * per_row
    row = tl.load(lines_ptr + ROW * n_rows + line)
    slot = tl.load(lines_ptr + SLOT * n_rows + line)
    count = tl.load(lines_ptr + COUNT * n_rows + line)
    head = within // SPLITS * HEADS + local // BLOCKS
    first = (within % SPLITS * BLOCKS + local % BLOCKS) * BLOCK_V
    rows_left = tl.where(live, dv - first, 0)
    state = slot.to(tl.int64) * slot_states + head
    codes, scales, state_scale = fetch_tile(
        codes_ptr,
        scales_ptr,
        state_scale_ptr,
        state * dv + first,
        state,
        rows_left,
        FORMAT,
        BLOCK_V,
        DK,
        WIDTH,
    )
    value = tl.arange(0, BLOCK_V)
    age = tl.arange(0, BLOCK_L)
    inside = value < rows_left
    record = slot.to(tl.int64) * slot_records + count - 1 - age
    place = (record[:, None] * heads + head) * dv + first + value[None, :]
    mask = (age < count)[:, None] & inside[None, :]
    written = tl.load(written_ptr + place, mask=mask, other=0)
    v = tl.load(
        v_ptr + row.to(tl.int64) * stride_v_row + head * stride_v_head + first + value,
        mask=inside,
        other=0.0,
    )
    return codes, scales, state_scale, written, v


@triton.jit
def _fetch_head(
    log_ptr,
    log_records_ptr,
    strength_ptr,
    strength_records_ptr,
    slot,
    row,
    count,
    head,
    heads,
    slot_records,
    slot_logs,
    stride_log_row,
    stride_log_head,
    stride_strength_row,
    stride_strength_head,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    DK: tl.constexpr,
    DELTA: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    HAS_DT: tl.constexpr,
):
    """Issue the small loads of a head: log decays and strengths, the token's and the records'.

    Returns:
        log decay of the token, log decays [BLOCK_L] (or [BLOCK_L, DK]) of what came after each
        record, by age, but for the token's; strength of the token; step sizes by age, [BLOCK_L].
    """
    age = tl.arange(0, BLOCK_L)
    after = (age > 0) & (age <= count)
    log_ptrs = log_ptr + row.to(tl.int64) * stride_log_row + head * stride_log_head
    base = slot.to(tl.int64) * slot_logs + head * (L - 1) + count
    if PER_CHANNEL:
        channel = tl.arange(0, DK)
        log_now = tl.load(log_ptrs + channel).to(tl.float32)
        record = slot.to(tl.int64) * slot_records + count - age
        place = (record[:, None] * heads + head) * DK + channel[None, :]
        later = tl.load(log_records_ptr + place, mask=after[:, None], other=0.0)
    else:
        log_now = tl.load(log_ptrs).to(tl.float32)
        later = tl.load(log_records_ptr + base - age, mask=after, other=0.0)
    strength = 1.0
    dts = 1.0
    if DELTA or HAS_DT:
        strength_ptrs = strength_ptr + row.to(tl.int64) * stride_strength_row
        strength = tl.load(strength_ptrs + head * stride_strength_head).to(tl.float32)
    if HAS_DT:
        dts = tl.load(strength_records_ptr + base - 1 - age, mask=age < count, other=0.0)
    return log_now, later, strength, dts


@triton.jit
def _decays(log_now, later, count, BLOCK_L: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """Form the decay since each record, by age, and since the checkpoint."""
    age = tl.arange(0, BLOCK_L)
    if PER_CHANNEL:
        age = age[:, None]
        since = tl.cumsum(tl.where(age == 0, log_now[None, :], later), axis=0)
    else:
        since = tl.cumsum(tl.where(age == 0, log_now, later), axis=0)
    whole = tl.sum(tl.where(age == count, since, 0.0), axis=0)
    return tl.exp(since), tl.exp(whole)


@triton.jit(do_not_specialize=["n_rows"])
def replay_step_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    log_ptr,
    strength_ptr,
    out_ptr,
    codes_ptr,
    scales_ptr,
    state_scale_ptr,
    key_records_ptr,
    value_records_ptr,
    written_ptr,
    log_records_ptr,
    strength_records_ptr,
    lines_ptr,
    counts_ptr,
    n_rows,
    heads,
    key_heads,
    dv,
    slot_states,
    slot_records,
    slot_logs,
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
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DK: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr,
    DELTA: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    HAS_DT: tl.constexpr,
    KEEP_V: tl.constexpr,
    FORMAT: tl.constexpr,
    KEY_RECORD: tl.constexpr,
    WRITTEN_RECORD: tl.constexpr,
):
    """Programs walk items: (planned row, key head, HEADS value heads of it, BLOCKS tiles of dv).

    strength: beta of a delta rule, dt of Mamba-2. written: records of u, or of x without a delta
    rule. Records are [slots, L - 1, heads, width], scalar ones [slots, heads, L - 1].
    """
    n_steps = tl.load(counts_ptr)
    PARTS: tl.constexpr = HEADS_PER_KEY // HEADS
    per_row = key_heads * PARTS * SPLITS
    n_items = n_steps * per_row
    item = tl.program_id(0)
    stride = tl.num_programs(0)
    age = tl.arange(0, BLOCK_L)
    channel = tl.arange(0, DK)
    value = tl.arange(0, BLOCK_V)
    n_tiles = (n_items - item + stride - 1) // stride * (HEADS * BLOCKS)
    if item < n_items:
        codes, scales, state_scale, written, v = _fetch(
            0,
            n_tiles,
            codes_ptr,
            scales_ptr,
            state_scale_ptr,
            written_ptr,
            v_ptr,
            lines_ptr,
            n_rows,
            per_row,
            heads,
            dv,
            slot_states,
            slot_records,
            stride_v_row,
            stride_v_head,
            FORMAT,
            BLOCK_V,
            BLOCK_L,
            DK,
            WIDTH,
            HEADS,
            BLOCKS,
            SPLITS,
        )
        next_codes, next_scales, next_state_scale, next_written, next_v = _fetch(
            1,
            n_tiles,
            codes_ptr,
            scales_ptr,
            state_scale_ptr,
            written_ptr,
            v_ptr,
            lines_ptr,
            n_rows,
            per_row,
            heads,
            dv,
            slot_states,
            slot_records,
            stride_v_row,
            stride_v_head,
            FORMAT,
            BLOCK_V,
            BLOCK_L,
            DK,
            WIDTH,
            HEADS,
            BLOCKS,
            SPLITS,
        )
        tile = 2  # the next to be fetched
        while item < n_items:
            line = item // per_row
            row = tl.load(lines_ptr + ROW * n_rows + line)
            slot = tl.load(lines_ptr + SLOT * n_rows + line)
            count = tl.load(lines_ptr + COUNT * n_rows + line)
            within = item - line * per_row
            head0 = within // SPLITS * HEADS
            first0 = (within % SPLITS) * (BLOCKS * BLOCK_V)
            key_head = head0 // HEADS_PER_KEY

            next_log, next_later, next_strength, next_dts = _fetch_head(
                log_ptr,
                log_records_ptr,
                strength_ptr,
                strength_records_ptr,
                slot,
                row,
                count,
                head0,
                heads,
                slot_records,
                slot_logs,
                stride_log_row,
                stride_log_head,
                stride_strength_row,
                stride_strength_head,
                L,
                BLOCK_L,
                DK,
                DELTA,
                PER_CHANNEL,
                HAS_DT,
            )
            row64 = row.to(tl.int64)
            q = tl.load(q_ptr + row64 * stride_q_row + key_head * stride_q_head + channel)
            k = tl.load(k_ptr + row64 * stride_k_row + key_head * stride_k_head + channel)
            q = q.to(tl.float32)
            k = k.to(tl.float32)
            record = slot.to(tl.int64) * slot_records + count
            place = ((record - 1 - age)[:, None] * key_heads + key_head) * DK + channel[None, :]
            keys = load_record(key_records_ptr + place, (age < count)[:, None], KEY_RECORD)
            if (first0 == 0) & (head0 % HEADS_PER_KEY == 0):
                key_place = (record * key_heads + key_head) * DK + channel
                store_record(key_records_ptr + key_place, k, channel < DK, KEY_RECORD)
            own = tl.sum(q * k, axis=0)
            if not PER_CHANNEL:
                met_q = tl.sum(keys * q[None, :], axis=1)
                met_k = tl.sum(keys * k[None, :], axis=1)
                q_tile = as_multiplier(q, FORMAT, DK, WIDTH)
                k_tile = as_multiplier(k, FORMAT, DK, WIDTH)

            for part in range(0, HEADS):
                head = head0 + part
                log_now = next_log
                strength = next_strength
                since, whole = _decays(log_now, next_later, count, BLOCK_L, PER_CHANNEL)
                if PER_CHANNEL:
                    decayed = keys * since
                    weight_q = tl.sum(decayed * q[None, :], axis=1)
                    weight_k = tl.sum(decayed * k[None, :], axis=1)
                    q_tile = as_multiplier(q * whole, FORMAT, DK, WIDTH)
                    k_tile = as_multiplier(k * whole, FORMAT, DK, WIDTH)
                    decay = 1.0
                else:
                    weight_q = met_q * since
                    weight_k = met_k * since
                    decay = whole
                if HAS_DT:
                    weight_q *= next_dts
                if HEADS > 1:
                    following = tl.minimum(part + 1, HEADS - 1) + head0
                    next_log, next_later, next_strength, next_dts = _fetch_head(
                        log_ptr,
                        log_records_ptr,
                        strength_ptr,
                        strength_records_ptr,
                        slot,
                        row,
                        count,
                        following,
                        heads,
                        slot_records,
                        slot_logs,
                        stride_log_row,
                        stride_log_head,
                        stride_strength_row,
                        stride_strength_head,
                        L,
                        BLOCK_L,
                        DK,
                        DELTA,
                        PER_CHANNEL,
                        HAS_DT,
                    )
                scalar = slot.to(tl.int64) * slot_logs + head * (L - 1) + count
                if first0 == 0:
                    if PER_CHANNEL:
                        log_place = (record * heads + head) * DK + channel
                        tl.store(log_records_ptr + log_place, log_now)
                    else:
                        tl.store(log_records_ptr + scalar, log_now)
                    if HAS_DT or (DELTA and KEEP_V):
                        tl.store(strength_records_ptr + scalar, strength)

                for block in range(0, BLOCKS):
                    first = first0 + block * BLOCK_V
                    in_v = first + value < dv
                    past = record_value(written, WRITTEN_RECORD)
                    o = decay * tile_product(codes, scales, state_scale, q_tile, FORMAT)
                    o += tl.sum(past * weight_q[:, None], axis=0)
                    x = v.to(tl.float32)
                    u = x
                    if DELTA:
                        met = decay * tile_product(codes, scales, state_scale, k_tile, FORMAT)
                        met += tl.sum(past * weight_k[:, None], axis=0)
                        u = strength * (x - met)
                    elif HAS_DT:
                        u = strength * x
                    o += own * u
                    tl.store(
                        out_ptr + row64 * stride_out_row + head * stride_out_head + first + value,
                        o,
                        mask=in_v,
                    )
                    written_place = (record * heads + head) * dv + first + value
                    if DELTA:
                        store_record(written_ptr + written_place, u, in_v, WRITTEN_RECORD)
                        if KEEP_V:
                            store_record(value_records_ptr + written_place, x, in_v, KEY_RECORD)
                    else:
                        store_record(written_ptr + written_place, x, in_v, WRITTEN_RECORD)
                    codes = next_codes
                    scales = next_scales
                    state_scale = next_state_scale
                    written = next_written
                    v = next_v
                    next_codes, next_scales, next_state_scale, next_written, next_v = _fetch(
                        tile,
                        n_tiles,
                        codes_ptr,
                        scales_ptr,
                        state_scale_ptr,
                        written_ptr,
                        v_ptr,
                        lines_ptr,
                        n_rows,
                        per_row,
                        heads,
                        dv,
                        slot_states,
                        slot_records,
                        stride_v_row,
                        stride_v_head,
                        FORMAT,
                        BLOCK_V,
                        BLOCK_L,
                        DK,
                        WIDTH,
                        HEADS,
                        BLOCKS,
                        SPLITS,
                    )
                    tile += 1
            item += stride
