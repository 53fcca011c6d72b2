"""Replay decode, the step that fills a window, with a decay per key channel.

    S_j = S_{j-1} decay_j + u_j k_j^T,  o_L = S_L q_L

from the recurrence copy, records first, the L-th token last and as it is. Corrections are derived
again step by step in FP32, u_j = beta_j (v_j - decay_j S_{j-1} k_j) (REDERIVE), or the records of
what was written are folded: those, weighted by the decay to the end, need no state, so they are
summed while it is on its way, and the last step alone is taken on it.

How it runs: a program walks items (planned row, head, BLOCK_V state rows; a state scale takes the
whole state). A step is three operations an element and one sum along each row; rows stay in eight
lanes, so that is three shuffles and no barrier. Keys and values of the next record are loaded
before a step is taken. Products of all records at once, as decode_flush.py takes them, would need
decays between each pair of records in every channel.

Rounding points: both copies are stored from the FP32 S_L, which o_L is read from; nothing else is
rounded, and the L-th token is not recorded.
Bytes, per row and head: the recurrence copy once in, each copy once out, L - 1 records. Floor:
those over the bandwidth of a copy.
Not covered: L = 1 (decode_conventional.py), several tokens at once, decays per head
(decode_flush.py).
"""

import triton
import triton.language as tl

from quantlab_kernels.decode_formats import load_state, mark_diverged, row_product, store_tile
from quantlab_kernels.decode_plan import FLUSH as STORE_NUMBER
from quantlab_kernels.decode_plan import ROW, SLOT
from quantlab_kernels.decode_records import load_record, record_value
from quantlab_kernels.draws import COPY_STRIDE


@triton.jit(do_not_specialize=["n_rows", "seed", "layer"])
def replay_flush_channels_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    log_ptr,
    strength_ptr,
    out_ptr,
    codes_ptr,
    scales_ptr,
    state_scale_ptr,
    read_codes_ptr,
    read_scales_ptr,
    read_state_scale_ptr,
    key_records_ptr,
    value_records_ptr,
    written_ptr,
    log_records_ptr,
    strength_records_ptr,
    lines_ptr,
    counts_ptr,
    streams_ptr,
    diverged_ptr,
    seed,
    layer,
    n_rows,
    heads: tl.constexpr,
    key_heads: tl.constexpr,
    dv: tl.constexpr,
    slot_states,
    read_slot_states,
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
    BLOCK_V: tl.constexpr,
    DK: tl.constexpr,
    WIDTH: tl.constexpr,
    DELTA: tl.constexpr,
    HAS_DT: tl.constexpr,
    REDERIVE: tl.constexpr,
    SEPARATE: tl.constexpr,
    FORMAT: tl.constexpr,
    SR: tl.constexpr,
    READ_FORMAT: tl.constexpr,
    READ_SR: tl.constexpr,
    KEY_RECORD: tl.constexpr,
    WRITTEN_RECORD: tl.constexpr,
):
    """Programs walk items (planned row, head, BLOCK_V rows of dv)."""
    heads_per_key: tl.constexpr = heads // key_heads
    slot_records: tl.constexpr = L - 1
    slot_logs: tl.constexpr = heads * (L - 1)
    n_steps = tl.load(counts_ptr)
    n_flush = tl.load(counts_ptr + 1)
    parts = (dv + BLOCK_V - 1) // BLOCK_V
    per_row = heads * parts
    n_items = n_flush * per_row
    item = tl.program_id(0)
    part = tl.arange(0, DK // WIDTH)
    channel = part[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    while item < n_items:
        line = n_steps + item // per_row
        head = item % per_row // parts
        first = (item % parts) * BLOCK_V
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
        value = first + tl.arange(0, BLOCK_V)
        in_v = value < dv
        key_head = head // heads_per_key
        log_ptrs = log_ptr + row * stride_log_row + head * stride_log_head
        # records from here on are counted from the slot's first
        record = slot * slot_records
        keys = key_records_ptr + (record * key_heads + key_head) * DK + channel
        key_step = key_heads * DK
        scalars = slot * slot_logs + head * (L - 1)
        logs = log_records_ptr + (record * heads + head) * DK + channel
        log_step = heads * DK
        strengths = strength_records_ptr + scalars
        if REDERIVE:
            values = value_records_ptr + (record * heads + head) * dv + value
            k_next = tl.load(keys)
            v_next = tl.load(values, mask=in_v, other=0)
            log_next = tl.load(logs)
            beta_next = tl.load(strengths)
            for j in range(0, L - 1):
                k = record_value(k_next, KEY_RECORD)
                v = record_value(v_next, KEY_RECORD)
                log = log_next
                beta = beta_next
                ahead = tl.minimum(j + 1, L - 2)
                k_next = tl.load(keys + ahead * key_step)
                v_next = tl.load(values + ahead * heads * dv, mask=in_v, other=0)
                log_next = tl.load(logs + ahead * log_step)
                beta_next = tl.load(strengths + ahead)
                S = S * tl.exp(log)[None, :, :]
                u = beta * (v - row_product(S, k))
                S = tl.fma(u[:, None, None], k[None, :, :], S)
        else:
            written = written_ptr + (record * heads + head) * dv + value
            folded = tl.zeros([BLOCK_V, DK // WIDTH, WIDTH], dtype=tl.float32)
            since = tl.zeros([DK // WIDTH, WIDTH], dtype=tl.float32)
            for age in range(0, L - 1):
                j = L - 2 - age
                k = load_record(keys + j * key_step, channel < DK, KEY_RECORD)
                u = load_record(written + j * heads * dv, in_v, WRITTEN_RECORD)
                if HAS_DT:
                    u = u * tl.load(strengths + j)
                k = k * tl.exp(since)
                folded = tl.fma(u[:, None, None], k[None, :, :], folded)
                since = since + tl.load(logs + j * log_step)
            S = S * tl.exp(since)[None, :, :] + folded

        q = tl.load(q_ptr + row * stride_q_row + key_head * stride_q_head + channel)
        k = tl.load(k_ptr + row * stride_k_row + key_head * stride_k_head + channel)
        q = q.to(tl.float32)
        k = k.to(tl.float32)
        v_ptrs = v_ptr + row * stride_v_row + head * stride_v_head + value
        u = tl.load(v_ptrs, mask=in_v, other=0.0).to(tl.float32)
        if DELTA or HAS_DT:
            strength = tl.load(
                strength_ptr + row * stride_strength_row + head * stride_strength_head
            ).to(tl.float32)
        S = S * tl.exp(tl.load(log_ptrs + channel).to(tl.float32))[None, :, :]
        if DELTA:
            u = strength * (u - row_product(S, k))
        elif HAS_DT:
            u = strength * u
        S = tl.fma(u[:, None, None], k[None, :, :], S)
        out_ptrs = out_ptr + row * stride_out_row + head * stride_out_head + value
        tl.store(out_ptrs, row_product(S, q), mask=in_v)
        stream = tl.load(streams_ptr + slot)
        number = tl.load(lines_ptr + STORE_NUMBER * n_rows + line)
        first_element = (head * dv + first) * DK
        if SEPARATE:
            read_state = slot * read_slot_states + head
            largest = store_tile(
                S,
                read_codes_ptr,
                read_scales_ptr,
                read_state_scale_ptr,
                read_state * dv + first,
                read_state,
                dv - first,
                seed,
                layer + COPY_STRIDE,
                stream,
                number,
                first_element,
                READ_FORMAT,
                READ_SR,
                BLOCK_V,
                DK,
                WIDTH,
            )
            mark_diverged(diverged_ptr, slot, number, largest)
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
            stream,
            number,
            first_element,
            FORMAT,
            SR,
            BLOCK_V,
            DK,
            WIDTH,
        )
        mark_diverged(diverged_ptr, slot, number, largest)
        item += tl.num_programs(0)
