"""Replay decode, a step that does not flush: outputs behind h records, the state only read.

    o = g S q + sum_j w_j u_j + (k.q) u,   w_j = g_j (k_j.q),   g_j the decay since record j,
    u = v, or beta (v - g S k - sum_j a_j u_j) with a_j = g_j (k_j.k) for a delta rule

One pass over the read copy serves S q and S k. With decays per key channel, q and k take the decay
before they meet S, and g_j sits inside the products with the records' keys.

How it runs: a unit is what shares q and k, the value heads of a key head (one head where decays are
per channel); its state rows are contiguous over heads. A program walks TILES tiles of BLOCK_V rows
of one unit, which may span heads, and meets the keys once. The first tile's codes, records and
values depend on one line of the plan, and are asked for before anything is computed; the next
tile's codes while one is worked on. Many small programs keep the memory busy.
Decays are cumulated from the newest record back, so that no difference of logs is taken.

Rounding points: the token's k, v and u are rounded to their records as they are appended; the step
itself uses them unrounded. The state is not written.
Bytes, per row and value head: the read copy once, h records of u (and h of k per key head), one
record appended. Floor: those over the bandwidth.
Not covered: L = 1 (decode_conventional.py), several tokens at once.
"""

import triton
import triton.language as tl

from quantlab_kernels.decode_plan import COUNT, ROW, SLOT
from quantlab_kernels.decode_products import (
    codes_per_word,
    fetch_codes,
    fetched_rows,
    multipliers,
    operand_columns,
    tile_products,
)
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
    heads: tl.constexpr,
    key_heads: tl.constexpr,
    dv: tl.constexpr,
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
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DK: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    SPAN: tl.constexpr,
    WARPS: tl.constexpr,
    DELTA: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    HAS_DT: tl.constexpr,
    KEEP_V: tl.constexpr,
    FORMAT: tl.constexpr,
    KEY_RECORD: tl.constexpr,
    WRITTEN_RECORD: tl.constexpr,
):
    """One program per (TILES tiles of BLOCK_V state rows of a unit, unit, planned row).

    strength: beta of a delta rule, dt of Mamba-2. written: records of u, or of x without a delta
    rule. Records are [slots, L - 1, heads, width], scalar ones [slots, heads, L - 1]. SPAN: most
    heads that a tile's rows belong to. WARPS: of the program.
    """
    HEADS_PER_KEY: tl.constexpr = heads // key_heads
    UNIT: tl.constexpr = 1 if PER_CHANNEL else HEADS_PER_KEY
    rows: tl.constexpr = UNIT * dv  # of a unit
    slot_records: tl.constexpr = L - 1
    slot_logs: tl.constexpr = heads * (L - 1)
    first0 = tl.program_id(0) * (TILES * BLOCK_V)
    head0 = tl.program_id(1) * UNIT
    line = tl.program_id(2)
    n_steps = tl.load(counts_ptr)
    row = tl.load(lines_ptr + ROW * n_rows + line).to(tl.int64)
    slot = tl.load(lines_ptr + SLOT * n_rows + line).to(tl.int64)
    count = tl.load(lines_ptr + COUNT * n_rows + line)
    if line < n_steps:
        key_head = head0 // HEADS_PER_KEY
        record = slot * slot_records + count  # the token's
        state0 = (slot * slot_states + head0) * dv + first0
        fetched = fetched_rows(BLOCK_V, WARPS, codes_per_word(FORMAT) > 1)
        codes, scales = fetch_codes(
            codes_ptr,
            scales_ptr,
            state0,
            fetched,
            fetched < rows - first0,
            DK,
            COLUMNS,
            FORMAT,
            WIDTH,
        )
        age = tl.arange(0, BLOCK_L)
        past = age < count
        tile_row = tl.arange(0, BLOCK_V)
        # neighbours along dv to neighbouring lanes, ages within one: sums over ages need no shuffle
        written_place = tl.max_contiguous(tile_row[:, None] - (age * (heads * dv))[None, :], [1, 1])

        channel = tl.arange(0, COLUMNS)
        known = channel < DK
        order = operand_columns(FORMAT, COLUMNS)
        q_ptrs = q_ptr + row * stride_q_row + key_head * stride_q_head
        k_ptrs = k_ptr + row * stride_k_row + key_head * stride_k_head
        q = tl.load(q_ptrs + channel, mask=known, other=0.0).to(tl.float32)
        k = tl.load(k_ptrs + channel, mask=known, other=0.0).to(tl.float32)
        q_tile = tl.load(q_ptrs + order, mask=order < DK, other=0.0).to(tl.float32)
        k_tile = tl.load(k_ptrs + order, mask=order < DK, other=0.0).to(tl.float32)
        key_place = ((record - 1) * key_heads + key_head) * DK
        keys = load_record(
            key_records_ptr + key_place + channel[None, :] - (age * (key_heads * DK))[:, None],
            past[:, None] & known[None, :],
            KEY_RECORD,
        )
        own = tl.sum(q * k, axis=0)
        if PER_CHANNEL:
            log_ptrs = log_ptr + row * stride_log_row + head0 * stride_log_head
            log_now = tl.load(log_ptrs + channel, mask=known, other=0.0).to(tl.float32)
            log_place = (record * heads + head0) * DK + channel
            later = tl.load(
                log_records_ptr + log_place[None, :] - (age * (heads * DK))[:, None],
                mask=((age > 0) & (age <= count))[:, None] & known[None, :],
                other=0.0,
            )
            since, whole = _decays(log_now, later, count, BLOCK_L, True)
            keys = keys * since
            # the same again for the operand: its columns are in another order
            log_tile = tl.load(log_ptrs + order, mask=order < DK, other=0.0).to(tl.float32)
            order_place = (record * heads + head0) * DK + order
            later = tl.load(
                log_records_ptr + order_place[None, :] - (age * (heads * DK))[:, None],
                mask=((age > 0) & (age <= count))[:, None] & (order < DK)[None, :],
                other=0.0,
            )
            _, whole = _decays(log_tile, later, count, BLOCK_L, True)
            q_tile = q_tile * whole
            k_tile = k_tile * whole
            if first0 == 0:
                tl.store(log_records_ptr + log_place, log_now, mask=known)
        met_q = tl.sum(keys * q[None, :], axis=1)
        met_k = tl.sum(keys * k[None, :], axis=1)
        if (first0 == 0) & (head0 % HEADS_PER_KEY == 0):
            own_place = (record * key_heads + key_head) * DK + channel
            store_record(key_records_ptr + own_place, k, known, KEY_RECORD)
        by, q_factor, k_factor = multipliers(q_tile, k_tile, FORMAT, DELTA, WIDTH)

        for tile in tl.range(0, TILES, num_stages=1):
            first = first0 + tile * BLOCK_V
            r = first + tile_row
            inside = r < rows
            if TILES > 1:
                following = first + BLOCK_V
                next_codes, next_scales = fetch_codes(
                    codes_ptr,
                    scales_ptr,
                    state0 + (tile + 1) * BLOCK_V,
                    fetched,
                    (fetched < rows - following) & (tile + 1 < TILES),
                    DK,
                    COLUMNS,
                    FORMAT,
                    WIDTH,
                )
            head = head0 + (r if SPAN > 1 else first + tl.zeros_like(r)) // dv
            value = r - (head - head0) * dv
            written_base = written_ptr + ((record - 1) * heads + head0) * dv + first
            written = record_value(
                tl.load(
                    written_base + written_place, mask=inside[:, None] & past[None, :], other=0
                ),
                WRITTEN_RECORD,
            )
            v_ptrs = v_ptr + row * stride_v_row + head * stride_v_head + value
            x = tl.load(v_ptrs, mask=inside, other=0.0).to(tl.float32)
            strength = 1.0
            if DELTA or HAS_DT:
                strength = tl.load(
                    strength_ptr + row * stride_strength_row + head * stride_strength_head,
                    mask=inside,
                    other=0.0,
                ).to(tl.float32)

            scalar = slot * slot_logs + head * (L - 1) + count
            if PER_CHANNEL:
                by_q = tl.sum(written * met_q[None, :], axis=1)
                by_k = tl.sum(written * met_k[None, :], axis=1)
                decay = 1.0
            else:
                log_place = row * stride_log_row + head * stride_log_head
                log_now = tl.load(log_ptr + log_place, mask=inside, other=0.0).to(tl.float32)
                tl.store(log_records_ptr + scalar, log_now, mask=inside & (value == 0))
                weight_q = tl.zeros([BLOCK_V, BLOCK_L], dtype=tl.float32)
                weight_k = weight_q
                decay = tl.zeros([BLOCK_V], dtype=tl.float32)
                for s in tl.static_range(SPAN):
                    spanned = tl.minimum(first // dv + s, UNIT - 1) + head0
                    base = slot * slot_logs + spanned * (L - 1) + count
                    now = tl.load(log_ptr + row * stride_log_row + spanned * stride_log_head)
                    later = tl.load(
                        log_records_ptr + base - age, mask=(age > 0) & (age <= count), other=0.0
                    )
                    since, whole = _decays(now.to(tl.float32), later, count, BLOCK_L, False)
                    if HAS_DT:
                        since *= tl.load(
                            strength_records_ptr + base - 1 - age, mask=past, other=0.0
                        )
                    if SPAN == 1:
                        weight_q = (met_q * since)[None, :]
                        weight_k = (met_k * since)[None, :]
                        decay = whole
                    else:
                        here = head == spanned
                        weight_q = tl.where(here[:, None], (met_q * since)[None, :], weight_q)
                        if DELTA:
                            weight_k = tl.where(here[:, None], (met_k * since)[None, :], weight_k)
                        decay = tl.where(here, whole, decay)
                by_q = tl.sum(written * weight_q, axis=1)
                if DELTA:
                    by_k = tl.sum(written * weight_k, axis=1)
            if HAS_DT or (DELTA and KEEP_V):
                tl.store(strength_records_ptr + scalar, strength, mask=inside & (value == 0))

            of_q, of_k = tile_products(codes, scales, by, BLOCK_V, COLUMNS, FORMAT, DELTA, WARPS)
            if FORMAT == "fp8" or FORMAT == "int8" or FORMAT == "int4":
                row_scale = tl.load(
                    scales_ptr + state0 + tile * BLOCK_V + tile_row, mask=inside, other=0.0
                )
                decay = decay * row_scale
            if FORMAT == "nvfp4":
                state_scale = tl.load(
                    state_scale_ptr + slot * slot_states + head, mask=inside, other=0.0
                )
                decay = decay * state_scale
            o = of_q * (q_factor * decay) + by_q
            u = x
            if DELTA:
                u = strength * (x - (of_k * (k_factor * decay) + by_k))
            elif HAS_DT:
                u = strength * x
            o += own * u
            out_ptrs = out_ptr + row * stride_out_row + head * stride_out_head + value
            tl.store(out_ptrs, o, mask=inside)
            place = (record * heads + head0) * dv + r
            if DELTA:
                store_record(written_ptr + place, u, inside, WRITTEN_RECORD)
                if KEEP_V:
                    store_record(value_records_ptr + place, x, inside, KEY_RECORD)
            else:
                store_record(written_ptr + place, x, inside, WRITTEN_RECORD)
            if TILES > 1:
                codes = next_codes
                scales = next_scales
