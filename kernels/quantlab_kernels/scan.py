"""The windowed scan: a gated linear recurrence, its state stored in a narrow format every L tokens.

    S_t = S_{t-1} decay_t + u_t k_t^T,  o_t = S_t q_t,
    u_t = v_t, or beta_t (v_t - decay_t S_{t-1} k_t) with a delta rule

One program walks a whole segment for one (row, head) with its state on chip, held as held.py says;
decay is one number per head or one per key channel (PER_CHANNEL), corrections exist or not (DELTA).

Rounding points, in the order they happen in a window, the same as in `quantlab.replay.scan`:
1. Steps 1..L-1 read the read copy. A step uses its own k, v, u unrounded; later steps its record
   (KEY_RECORD for k and v, CORRECTION_RECORD for u, row by row inside the substitution).
2. Step L reads the recurrence copy: corrections of all L tokens re-derived in FP32 from the records
   of tokens 1..L-1 and the unrounded token L (FLUSH "rederive"), or the recorded ones (FLUSH
   "fold"); o_L = S_L q_L from the state about to be stored.
3. Both copies are then stored from that FP32 S_L: rounded to their formats and read back.
An open last window (T not a multiple of L) gives outputs and leaves the state as it was.

Precision: products are exact but for the order of FP32 additions (parts.py), from what was stored
where that has few bits (held.py). However a sequence is cut into segments, the bits are the same.
Bytes: per token and head q, k, v, o once and the coefficients of coefficients.py; the state
moves once a segment. The floor is arithmetic: at 128 x 128 and 1.76 GHz a multiprocessor has 18,000
clocks a window for three times flash-linear-attention's chunk forward, and issues four instructions
of 32 lanes a clock: 140 an element of the state, of which a stochastic store takes some 50. What it
takes in fact is latency: four warps a scheduler hide what two do not, so the columns of a row are
shared by two warps (cuts.py) and a lane has 32 elements of the state.
Not covered: L = 1 (conventional.py), exact FP64 records, formats whose block spans state rows.
"""

import triton
import triton.language as tl

from quantlab_kernels.copies import part_lane_rows, part_rows
from quantlab_kernels.cuts import (
    columns_to_lane_rows,
    cut_columns,
    parts_to_lane_rows,
    sum_of_rows,
)
from quantlab_kernels.draws import COPY_STRIDE, lane_order
from quantlab_kernels.folded import rows_overflow, sizes_of, store_part, whole_scale
from quantlab_kernels.held import held_parts, load_copy, of_rows, store_factor
from quantlab_kernels.parts import dot_parts, split_parts, spread_parts
from quantlab_kernels.rounding import round_record
from quantlab_kernels.scan_window import (
    copy_product,
    decayed_parts,
    flush_keys,
    key_parts,
    key_products,
    load_decays,
    load_square,
    load_steps,
    load_total,
    product_scale,
)
from quantlab_kernels.substitution import substitute

UNSPECIALIZED = [
    *("T", "n_windows", "seed", "layer", "first_flush"),
    *("stride_dt_row", "stride_beta_row"),
]
"""Arguments that differ from call to call: their values must not ask for another compilation."""


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
    recur_factor_ptr,
    read_ptr,
    read_factor_ptr,
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
    TAIL_V: tl.constexpr,
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
    KEY_PARTS: tl.constexpr,
    READ_HELD: tl.constexpr,
    READ_FACTORED: tl.constexpr,
    RECUR_HELD: tl.constexpr,
    RECUR_FACTORED: tl.constexpr,
    CUTS: tl.constexpr,
):
    """One program per (head, row of the group)."""
    head = tl.program_id(0)
    group_row = tl.program_id(1)
    row = tl.load(rows_ptr + group_row)
    stream = tl.load(streams_ptr + group_row)
    applies = True
    if PARTIAL:
        applies = tl.load(applies_ptr + group_row * heads + head) != 0
    first_element = head * dv * dk

    ROUNDED: tl.constexpr = (KEY_RECORD != "fp32") or (CORRECTION_RECORD != "fp32")
    # a second set of corrections, on the recurrence copy, is formed only where it can differ
    SECOND: tl.constexpr = DELTA and (SEPARATE or (ROUNDED and FLUSH == "rederive"))
    REDERIVED: tl.constexpr = SECOND and FLUSH == "rederive"
    PARTS: tl.constexpr = 1 if TAIL_V == 0 else 2
    U_PARTS: tl.constexpr = (
        3 if not DELTA or CORRECTION_RECORD == "fp32" else (2 if CORRECTION_RECORD == "fp16" else 1)
    )
    FLUSH_PARTS: tl.constexpr = 3 if (PER_CHANNEL or KEY_RECORD != "fp32") else KEY_PARTS

    step = tl.arange(0, BLOCK_L)
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
    row_offset = (group_row.to(tl.int64) * heads + head) * dv
    bad_flush_ptrs = bad_flush_ptr + group_row * heads + head
    bad_flush = tl.load(bad_flush_ptrs)

    # the copies as stored, held as `folded.py` has them
    recur = ()
    recur_factor = ()
    read = ()
    read_factor = ()
    first_bad = ()
    for p in tl.static_range(PARTS):
        rows = part_lane_rows(p, BLOCK_V, TAIL_V, BLOCK_K, CUTS)
        held, factor = load_copy(
            recur_ptr + state_offset,
            recur_factor_ptr + row_offset,
            rows,
            dv,
            dk,
            applies,
            RECUR_FORMAT,
            BLOCK_K // CUTS,
            RECUR_FACTORED,
            RECUR_HELD,
            PARTIAL,
        )
        recur = recur + (held,)  # noqa: RUF005 (kernels know no unpacking)
        recur_factor = recur_factor + (factor,)  # noqa: RUF005
        if SEPARATE:
            held, factor = load_copy(
                read_ptr + state_offset,
                read_factor_ptr + row_offset,
                rows,
                dv,
                dk,
                applies,
                READ_FORMAT,
                BLOCK_K // CUTS,
                READ_FACTORED,
                READ_HELD,
                PARTIAL,
            )
            read = read + (held,)  # noqa: RUF005
            read_factor = read_factor + (factor,)  # noqa: RUF005
        bad_rows = tl.full([rows[0].shape[0]], -1, tl.int32)
        first_bad = first_bad + (bad_rows,)  # noqa: RUF005

    window = 0
    while window < n_windows:
        t = window * L + step
        live = (step < L) & (t < T)
        unit = unit0 + window
        flush = first_flush + window
        last = window == T // L - 1

        # what the copies are multiplied by
        decay = load_decays(from_start_ptr, unit, dk, channel, BLOCK_L, PER_CHANNEL)
        queries = lane_order(load_steps(q_ptrs, t, live, channel, dk, stride_q_t))
        query_parts = decayed_parts(queries, decay, KEY_PARTS, PER_CHANNEL)
        keys = lane_order(load_steps(k_ptrs, t, live, channel, dk, stride_k_t))
        if DELTA:
            record_parts, rest_parts = key_parts(keys, decay, KEY_RECORD, KEY_PARTS, PER_CHANNEL)
            beta = tl.load(beta_ptrs + t * stride_beta_t, mask=live, other=0.0).to(tl.float32)
            # nothing is taken off the first step; its coefficients, 0, bring the others near
            beta += tl.load(couple_ptr + (unit * BLOCK_L + step) * BLOCK_L)
            solve_parts = spread_parts(load_square(solve_ptr, unit, BLOCK_L), 3)
        to_end = load_decays(to_end_ptr, unit, dk, channel, BLOCK_L, PER_CHANNEL)
        flushed = flush_keys(keys, L, KEY_RECORD)
        if PER_CHANNEL:
            fold_parts = spread_parts(flushed * to_end, 3)
        else:
            fold_parts = spread_parts(flushed, FLUSH_PARTS)
        total = load_total(from_start_ptr, unit, dk, channel, L, BLOCK_L, PER_CHANNEL)
        weight_parts = spread_parts(load_square(weights_ptr, unit, BLOCK_L), 3)
        own = tl.load(own_ptr + unit * BLOCK_L + step)
        if SEPARATE:
            # step L reads the state being stored; an open window has none
            t_last = tl.minimum(window * L + L - 1, T - 1)
            q_last = tl.load(q_ptrs + t_last * stride_q_t + channel, mask=channel < dk, other=0.0)
            q_last = lane_order(q_last.to(tl.float32)[None, :])
        elif REDERIVED:
            # the same from the products of the one copy
            w_last = tl.load(weights_ptr + (unit * BLOCK_L + step) * BLOCK_L + L - 1)
            w_last = tl.where(is_last, own, w_last)

        folded = ()
        sizes = ()
        read_sizes = ()
        for p in tl.static_range(PARTS):
            value = part_rows(p, BLOCK_V, TAIL_V)
            v = tl.trans(load_steps(v_ptrs, t, live, value, dv, stride_v_t))
            v_record = round_record(v, KEY_RECORD)
            if HAS_DT:
                dt = tl.load(dt_ptrs + t * stride_dt_t, mask=live, other=0.0).to(tl.float32)
                v = v * dt[None, :]
                v_record = v_record * dt[None, :]

            # products of the copies with queries and keys
            recur_parts = held_parts(recur[p], RECUR_HELD)
            read_parts = recur_parts
            factor = of_rows(recur_factor[p], RECUR_FORMAT, RECUR_FACTORED, CUTS)
            recur_scale = product_scale(factor, decay, PER_CHANNEL)
            read_scale = recur_scale
            if SEPARATE:
                read_parts = held_parts(read[p], READ_HELD)
                factor = of_rows(read_factor[p], READ_FORMAT, READ_FACTORED, CUTS)
                read_scale = product_scale(factor, decay, PER_CHANNEL)
            read_q = copy_product(read_parts, read_scale, query_parts, CUTS)
            if DELTA:
                read_k, recur_k = key_products(
                    read_parts, read_scale, record_parts, rest_parts, CUTS
                )
                last_k = read_k
                if SEPARATE:
                    last_k, recur_k = key_products(
                        recur_parts, recur_scale, record_parts, rest_parts, CUTS
                    )
                recur_k = tl.where(is_last[None, :], last_k, recur_k)

            # corrections of the steps, from the read copy
            none = tl.zeros([value.shape[0], BLOCK_L], dtype=tl.float32)
            if DELTA:
                if ROUNDED:
                    target = (v - read_k) * beta[None, :]
                    couple_ptrs = couple_ptr + unit * BLOCK_L * BLOCK_L
                    u, u_record = substitute(target, couple_ptrs, L, BLOCK_L, CORRECTION_RECORD)
                else:
                    u = dot_parts(split_parts(v - read_k, 3), solve_parts, none)
                    u_record = u
            else:
                u = v
                u_record = v_record
            o = dot_parts(split_parts(u_record, U_PARTS), weight_parts, none) + u * own[None, :]

            # what is folded: records of tokens 1..L-1, token L as it is
            if REDERIVED:
                v_flush = tl.where(is_last[None, :], v, v_record)
                u_flush = dot_parts(split_parts(v_flush - recur_k, 3), solve_parts, none)
            elif SECOND:
                a_last = tl.load(couple_ptr + (unit * BLOCK_L + step) * BLOCK_L + L - 1)
                target = (v - recur_k) * beta[None, :]
                mixed = tl.where(is_last[None, :], target, u_record * -a_last[None, :])
                u_flush = tl.where(is_last[None, :], tl.sum(mixed, axis=1)[:, None], u_record)
            else:
                u_flush = tl.where(is_last[None, :], u, u_record)
            if PER_CHANNEL:
                u_parts = split_parts(u_flush, 3)
            else:
                u_parts = split_parts(u_flush * to_end[None, :], 3)
            kept = columns_to_lane_rows(total, value.shape[0], CUTS) if PER_CHANNEL else total
            before = recur[p].to(tl.float32) * (recur_factor[p] * kept)
            left = parts_to_lane_rows(u_parts, CUTS)
            new = dot_parts(left, cut_columns(fold_parts, CUTS), before)
            folded = folded + (new,)  # noqa: RUF005
            sizes = sizes + (sizes_of(new, RECUR_FORMAT, CUTS),)  # noqa: RUF005
            if SEPARATE:
                read_sizes = read_sizes + (sizes_of(new, READ_FORMAT, CUTS),)  # noqa: RUF005

            if SEPARATE:
                q_lanes = columns_to_lane_rows(q_last, value.shape[0], CUTS)
                o_last = sum_of_rows(tl.sum(new * q_lanes, axis=1), CUTS)
                o = tl.where(is_last[None, :], o_last[:, None], read_q + o)
            elif REDERIVED:
                o_last = tl.sum(u_flush * w_last[None, :], axis=1)
                o = read_q + tl.where(is_last[None, :], o_last[:, None], o)
            else:
                o = read_q + o
            out_mask = live[None, :] & (value < dv)[:, None]
            tl.store(out_ptrs + t[None, :] * stride_out_t + value[:, None], o, mask=out_mask)

        # stores
        whole = whole_scale(sizes, RECUR_FORMAT)
        if SEPARATE:
            read_whole = whole_scale(read_sizes, READ_FORMAT)
        recur = ()
        recur_factor = ()
        read = ()
        read_factor = ()
        bad_before = first_bad
        first_bad = ()
        for p in tl.static_range(PARTS):
            rows = part_lane_rows(p, BLOCK_V, TAIL_V, BLOCK_K, CUTS)
            bad = rows_overflow(sizes[p], RECUR_FORMAT, rows[0].shape[0], applies, PARTIAL)
            held, factor = store_part(
                folded[p],
                sizes[p],
                whole,
                rows,
                first_element,
                (seed, layer, stream, flush),
                applies,
                last,
                recur_ptr + state_offset,
                dv,
                dk,
                RECUR_FORMAT,
                RECUR_SR,
                QUADS,
                PARTIAL,
                RECUR_HELD,
            )
            recur = recur + (held,)  # noqa: RUF005
            recur_factor = recur_factor + (factor,)  # noqa: RUF005
            if last:
                store_factor(recur_factor_ptr + row_offset, rows[0], dv, factor, RECUR_FACTORED)
            if SEPARATE:
                bad = bad | rows_overflow(
                    read_sizes[p], READ_FORMAT, rows[0].shape[0], applies, PARTIAL
                )
                held, factor = store_part(
                    folded[p],
                    read_sizes[p],
                    read_whole,
                    rows,
                    first_element,
                    (seed, layer + COPY_STRIDE, stream, flush),
                    applies,
                    last,
                    read_ptr + state_offset,
                    dv,
                    dk,
                    READ_FORMAT,
                    READ_SR,
                    QUADS,
                    PARTIAL,
                    READ_HELD,
                )
                if last:
                    store_factor(read_factor_ptr + row_offset, rows[0], dv, factor, READ_FACTORED)
                read = read + (held,)  # noqa: RUF005
                read_factor = read_factor + (factor,)  # noqa: RUF005
            newly = bad & (bad_before[p] < 0) & (window < T // L)
            first_bad = first_bad + (tl.where(newly, flush, bad_before[p]),)  # noqa: RUF005
        window += 1

    # the first of all rows; none is -1, which as unsigned comes last
    for p in tl.static_range(PARTS):
        first = tl.min(first_bad[p].to(tl.uint32, bitcast=True), axis=0)
        bad_flush = tl.minimum(bad_flush.to(tl.uint32, bitcast=True), first)
        bad_flush = bad_flush.to(tl.int32, bitcast=True)
    tl.store(bad_flush_ptrs, bad_flush)
