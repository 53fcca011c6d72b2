"""Replay decode, the step that fills a window: replay L - 1 records and the token, store, read out.

    S_L = g S_0 + sum_i d_i u_i k_i^T,   o_L = S_L q_L,
    u = (I + A)^-1 (beta (v - g_i S_0 k_i)),   A_ij = beta_i d_ij (k_i.k_j), j < i

with g_i the decay from the checkpoint to step i, d_ij that from step j to i, d_i to the last: all L
corrections from one product of the recurrence copy, then one product of rank L. Tokens 1..L-1
enter by their records, the L-th as it is. Without a delta rule, or where corrections are folded
instead of derived again, u_i are the records of what was written.

How it runs: decode_flush_weights.py has left decays, (I + A)^-1 and what the token's query and key
meet in the records. A program walks items (planned row, head, TILES tiles of BLOCK_V state rows; a
state scale takes the whole state in one). Products run on matrix units in BF16 parts, which add
up to FP32 operands; the state is fetched so that its elements lie where the first product takes
them, the second adds to them and the store expects them.

Rounding points: both copies are stored from the FP32 S_L. o_L is formed from the same numbers,
g (S_0 q) + sum_i d_i u_i (k_i.q), not read from S_L: they differ by FP32 rounding.
Bytes, per row and head: the recurrence copy once in, each copy once out, L - 1 records. Floor:
those over the bandwidth of a copy.
Not covered: L = 1 (decode_conventional.py), several tokens at once, decays per key channel
(decode_flush_channels.py).
"""

import triton
import triton.language as tl

from quantlab_kernels.decode_ahead import ask_rows, record_bytes
from quantlab_kernels.decode_flush_weights import (
    MET_K,
    MET_Q,
    VECTORS,
    WEIGHT,
    add_products,
    part_count,
    transposed,
)
from quantlab_kernels.decode_formats import load_state, mark_diverged, store_tile
from quantlab_kernels.decode_plan import FLUSH as STORE_NUMBER
from quantlab_kernels.decode_plan import ROW, SLOT
from quantlab_kernels.decode_products import (
    bf16_parts,
    codes_per_word,
    columns_of,
    lane_rows,
    pair_sums,
)
from quantlab_kernels.decode_records import load_record
from quantlab_kernels.draws import COPY_STRIDE


@triton.jit
def _to_products(x, WARPS: tl.constexpr):
    """Bring a fetched state [V, C / WIDTH, WIDTH] into the order of products: [V, C]."""
    V: tl.constexpr = x.shape[0]
    P: tl.constexpr = x.shape[1]
    WIDTH: tl.constexpr = x.shape[2]
    W: tl.constexpr = lane_rows(V, WARPS)
    x = tl.reshape(x, [V // (16 * W), 2, W, 8, P, 4, WIDTH // 8, 2])
    return tl.reshape(tl.permute(x, (0, 2, 1, 3, 4, 6, 5, 7)), [V, P * WIDTH])


@triton.jit
def _products_state(
    codes_ptr,
    scales_ptr,
    state_scale_ptr,
    row0,
    state,
    rows_left,
    FORMAT: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DK: tl.constexpr,
    WIDTH: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Load state rows in the order of products: [BLOCK_V, DK]; arguments as `load_state`."""
    S = load_state(
        codes_ptr,
        scales_ptr,
        state_scale_ptr,
        row0,
        state,
        rows_left,
        FORMAT,
        BLOCK_V,
        DK,
        WIDTH,
        WARPS,
    )
    return _to_products(S, WARPS)


@triton.jit
def _from_products(x, WIDTH: tl.constexpr, WARPS: tl.constexpr):
    """Undo `_to_products`."""
    V: tl.constexpr = x.shape[0]
    P: tl.constexpr = x.shape[1] // WIDTH
    W: tl.constexpr = lane_rows(V, WARPS)
    x = tl.reshape(x, [V // (16 * W), W, 2, 8, P, WIDTH // 8, 4, 2])
    return tl.reshape(tl.permute(x, (0, 2, 1, 3, 4, 6, 5, 7)), [V, P, WIDTH])


@triton.jit
def _ordered_channels(C: tl.constexpr, WIDTH: tl.constexpr):
    """Find the channel of each column in product order: [C] int32."""
    i = tl.arange(0, C)
    pair = i // 8
    return (
        pair // (WIDTH // 8) * WIDTH + i // 2 % 4 * (WIDTH // 4) + pair % (WIDTH // 8) * 2 + i % 2
    )


@triton.jit(do_not_specialize=["n_rows", "seed", "layer"])
def replay_flush_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
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
    lines_ptr,
    counts_ptr,
    streams_ptr,
    diverged_ptr,
    vectors_ptr,
    solves_ptr,
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
    stride_strength_row,
    stride_strength_head,
    stride_out_row,
    stride_out_head,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILES: tl.constexpr,
    DK: tl.constexpr,
    WIDTH: tl.constexpr,
    WARPS: tl.constexpr,
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
    AHEAD: tl.constexpr,
):
    """Programs walk items (planned row, head, TILES tiles of BLOCK_V rows of dv).

    vectors, solves: of `flush_weights_kernel`. WIDTH: four times the elements of a row that a lane
    fetches at once. WARPS: of the program. AHEAD: whether it asks for its next tile while one is
    computed.
    """
    heads_per_key: tl.constexpr = heads // key_heads
    slot_records: tl.constexpr = L - 1
    n_steps = tl.load(counts_ptr)
    n_flush = tl.load(counts_ptr + 1)
    parts = (dv + TILES * BLOCK_V - 1) // (TILES * BLOCK_V)
    per_row = heads * parts
    n_items = n_flush * per_row
    item = tl.program_id(0)
    step = tl.arange(0, BLOCK_L)
    recorded = step < L - 1
    last = step == L - 1
    inner = tl.arange(0, BLOCK_V)
    ordered = _ordered_channels(DK, WIDTH)
    STATE_PARTS: tl.constexpr = part_count(FORMAT)
    ROW_BYTES: tl.constexpr = 4 * DK // codes_per_word(FORMAT)
    past_ptr = value_records_ptr if REDERIVE else written_ptr
    PAST_RECORD: tl.constexpr = KEY_RECORD if REDERIVE else WRITTEN_RECORD
    while item < n_items:
        line = n_steps + item // per_row
        head = item % per_row // parts
        first0 = (item % parts) * (TILES * BLOCK_V)
        slot = tl.load(lines_ptr + SLOT * n_rows + line).to(tl.int64)
        state = slot * slot_states + head
        if TILES == 1:
            # the state first: no load passes the barriers of what is computed
            fetched = _products_state(
                codes_ptr,
                scales_ptr,
                state_scale_ptr,
                state * dv + first0,
                state,
                dv - first0,
                FORMAT,
                BLOCK_V,
                DK,
                WIDTH,
                WARPS,
            )
        row = tl.load(lines_ptr + ROW * n_rows + line).to(tl.int64)
        number = tl.load(lines_ptr + STORE_NUMBER * n_rows + line)
        stream = tl.load(streams_ptr + slot)
        key_head = head // heads_per_key
        # records from here on are counted from the slot's first
        record = slot * slot_records
        key_place = (record * key_heads + key_head) * DK
        keys = load_record(
            key_records_ptr + key_place + (step * (key_heads * DK))[:, None] + ordered[None, :],
            recorded[:, None],
            KEY_RECORD,
        )
        q_ptrs = q_ptr + row * stride_q_row + key_head * stride_q_head
        k_ptrs = k_ptr + row * stride_k_row + key_head * stride_k_head
        q = tl.load(q_ptrs + ordered).to(tl.float32)
        k = tl.load(k_ptrs + ordered).to(tl.float32)
        place = (item // per_row * heads + head).to(tl.int64)
        vector_ptrs = vectors_ptr + place * (VECTORS * BLOCK_L)
        whole = tl.load(vector_ptrs + L - 1)
        met_q = tl.load(vector_ptrs + MET_Q * BLOCK_L + step)
        if REDERIVE:
            from_start = tl.load(vector_ptrs + step)
            solve_ptrs = solves_ptr + place * (BLOCK_L * BLOCK_L)
            solve = tl.load(solve_ptrs + step[:, None] * BLOCK_L + step[None, :])
            solve = bf16_parts(solve, 3)
        else:
            weight = tl.load(vector_ptrs + WEIGHT * BLOCK_L + step)
            if DELTA:
                met_k = tl.load(vector_ptrs + MET_K * BLOCK_L + step)
            if DELTA or HAS_DT:
                strength_ptrs = strength_ptr + row * stride_strength_row
                strength = tl.load(strength_ptrs + head * stride_strength_head).to(tl.float32)
        if AHEAD:
            PAST: tl.constexpr = record_bytes(PAST_RECORD)
            PAST_APART: tl.constexpr = heads * dv * PAST
            PAST_BYTES: tl.constexpr = TILES * BLOCK_V * PAST
            if TILES == 1:
                # the next item's
                later = item + tl.num_programs(0)
                later_ptr = lines_ptr + SLOT * n_rows + n_steps + later // per_row
                later_slot = tl.load(later_ptr, mask=later < n_items, other=0).to(tl.int64)
                later_head = later % per_row // parts
                later_first = later % parts * BLOCK_V
                is_later = recorded & (later < n_items)
                later_record = later_slot * slot_records
                KEY_BYTES: tl.constexpr = DK * record_bytes(KEY_RECORD)
                KEYS_APART: tl.constexpr = key_heads * KEY_BYTES
                later_key_ptr = key_records_ptr + later_head // heads_per_key * DK
                ask_rows(later_key_ptr, later_record, is_later, KEY_BYTES, KEYS_APART)
                later_past_ptr = past_ptr + later_head * dv + later_first
                ask_rows(later_past_ptr, later_record, is_later, PAST_BYTES, PAST_APART)
                later_row0 = (later_slot * slot_states + later_head) * dv + later_first
                is_later = (inner < dv - later_first) & (later < n_items)
                ask_rows(codes_ptr, later_row0, is_later, ROW_BYTES, ROW_BYTES)
            else:
                this_past_ptr = past_ptr + head * dv + first0
                ask_rows(this_past_ptr, record, recorded, PAST_BYTES, PAST_APART)
        key_parts = bf16_parts(keys, part_count(KEY_RECORD))
        keys_across = transposed(key_parts)
        token, _ = columns_of(q, k, "bf16", DELTA)

        for tile in tl.range(0, TILES, num_stages=1):
            first = first0 + tile * BLOCK_V
            row0 = state * dv + first
            if TILES == 1:
                S = fetched
            else:
                S = _products_state(
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
                    WARPS,
                )
            value = first + inner
            in_v = value < dv
            # neighbours along dv to neighbouring lanes, steps within one
            of_values = tl.max_contiguous(inner[:, None] + (step * (heads * dv))[None, :], [1, 1])
            of_values += (record * heads + head) * dv + first
            mask = in_v[:, None] & recorded[None, :]
            past = load_record(past_ptr + of_values, mask, PAST_RECORD)
            v_ptrs = v_ptr + row * stride_v_row + head * stride_v_head + value
            v = tl.load(v_ptrs, mask=in_v, other=0.0).to(tl.float32)

            if AHEAD and TILES > 1:
                is_next = (inner < dv - first - BLOCK_V) & (tile + 1 < TILES)
                ask_rows(codes_ptr, row0 + BLOCK_V, is_next, ROW_BYTES, ROW_BYTES)

            met = tl.zeros([BLOCK_V, 8], dtype=tl.float32)
            foreseen = tl.zeros([BLOCK_V, BLOCK_L], dtype=tl.float32)
            state_parts = bf16_parts(S, STATE_PARTS)
            for p in tl.static_range(STATE_PARTS):
                part = state_parts[STATE_PARTS - 1 - p]
                met = tl.dot(part, token, met)
                if REDERIVE:
                    for r in tl.static_range(len(key_parts)):
                        # parts of the state times parts of keys, but for those below 2**-24
                        if STATE_PARTS - 1 - p + r < 3:
                            foreseen = tl.dot(part, keys_across[r], foreseen)
            of_q, of_k = pair_sums(met)
            if REDERIVE:
                foreseen = tl.where(last[None, :], of_k[:, None], foreseen) * from_start[None, :]
                past = tl.where(last[None, :], v[:, None], past)
                nothing = tl.zeros([BLOCK_V, BLOCK_L], dtype=tl.float32)
                u = add_products(nothing, bf16_parts(past - foreseen, 3), solve)
                u_now = tl.sum(tl.where(last[None, :], u, 0.0), axis=1)
            else:
                u = past * weight[None, :]
                u_now = v
                if DELTA:
                    met_now = whole * of_k + tl.sum(u * met_k[None, :], axis=1)
                    u_now = strength * (v - met_now)
                elif HAS_DT:
                    u_now = strength * v
                u = tl.where(last[None, :], u_now[:, None], u)
            o = whole * of_q + tl.sum(u * met_q[None, :], axis=1)
            out_ptrs = out_ptr + row * stride_out_row + head * stride_out_head + value
            tl.store(out_ptrs, o, mask=in_v)
            # met again rather than kept in registers: it was read a moment ago
            S = _products_state(
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
                WARPS,
            )
            S = add_products(S * whole, bf16_parts(u, 3), key_parts)
            S = tl.fma(u_now[:, None], k[None, :], S)
            S = _from_products(S, WIDTH, WARPS)

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
                    WARPS,
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
                WARPS,
            )
            mark_diverged(diverged_ptr, slot, number, largest)
        item += tl.num_programs(0)
