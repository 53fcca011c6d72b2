"""Replay decode, the step that fills a window: replay L - 1 records and the token, store, read out.

    S_L = g S_0 + sum_i d_i u_i k_i^T,   o_L = S_L q_L,
    u = (I + A)^-1 (beta (v - g_i S_0 k_i)),   A_ij = beta_i d_ij (k_i.k_j), j < i

with g_i the decay from the checkpoint to step i, d_ij that from step j to i, d_i to the last: all L
corrections from one product of the recurrence copy, then one product of rank L. Tokens 1..L-1
enter by their records, the L-th as it is. Without a delta rule, or where corrections are folded
instead of derived again, u_i are the records of what was written.

How it runs: a program walks items (planned row, head, TILES tiles of BLOCK_V state rows; a state
scale takes the whole state in one). Products run on matrix units in BF16 parts, which add
up to FP32 operands; the state is fetched so that its elements lie where the first product takes
them, the second adds to them and the store expects them. Corrections are solved forward, a state
row to a lane, with A passed through memory (`couples_ptr`).

Rounding points: both copies are stored from the FP32 S_L. o_L is formed from the same numbers,
g (S_0 q) + sum_i d_i u_i (k_i.q), not read from S_L: they differ by FP32 rounding.
Bytes, per row and head: the recurrence copy once in, each copy once out, L - 1 records. Floor:
those over the bandwidth of a copy.
Not covered: L = 1 (decode_conventional.py), several tokens at once, decays per key channel
(decode_flush_channels.py).
"""

import triton
import triton.language as tl

from quantlab_kernels.decode_formats import load_state, mark_diverged, store_tile
from quantlab_kernels.decode_plan import FLUSH as STORE_NUMBER
from quantlab_kernels.decode_plan import ROW, SLOT
from quantlab_kernels.decode_products import bf16_parts, lane_rows, token_rows
from quantlab_kernels.decode_records import load_record
from quantlab_kernels.draws import COPY_STRIDE


@triton.constexpr_function
def part_count(name):
    """Count the BF16 parts that hold a state's or a record's values."""
    return {"bf16": 1, "fp16": 2}.get(name, 3)


@triton.constexpr_function
def levels(n):
    """Return log2 of a power of two."""
    return n.bit_length() - 1


@triton.jit
def _transposed(parts):
    """Transpose each of a tuple."""
    turned = ()
    for p in tl.static_range(len(parts)):
        turned = turned + (tl.trans(parts[p]),)  # noqa: RUF005 (kernels know no unpacking)
    return turned


@triton.jit
def _add_products(start, a, b):
    """Form start + A B from parts, smallest products first, those below 2**-24 left out."""
    total = start
    for order in tl.static_range(3):
        for i in tl.static_range(len(a)):
            for j in tl.static_range(len(b)):
                if i + j == 2 - order:
                    total = tl.dot(a[i], b[j], total)
    return total


@triton.jit
def _product_order(x, WIDTH: tl.constexpr):
    """Bring columns [R, C] into the order of products: neighbours of four lanes in turn."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    x = tl.reshape(x, [R, C // WIDTH, 4, WIDTH // 8, 2])
    return tl.reshape(tl.permute(x, (0, 1, 3, 2, 4)), [R, C])


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


@triton.jit
def _columns(x):
    """Take [V, N] apart into a tuple of N columns [V]."""
    V: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    parts = (x,)
    for level in tl.static_range(levels(N)):
        left = ()
        right = ()
        for p in tl.static_range(len(parts)):
            even, odd = tl.split(tl.reshape(parts[p], [V, N >> (level + 1), 2]))
            left = left + (even,)  # noqa: RUF005 (kernels know no unpacking)
            right = right + (odd,)  # noqa: RUF005
        parts = left + right  # so that parts lie in the order of their first columns
    columns = ()
    for p in tl.static_range(N):
        columns = columns + (tl.reshape(parts[p], [V]),)  # noqa: RUF005
    return columns


@triton.jit
def _joined(columns):
    """Put columns [V] together: [V, N]."""
    N: tl.constexpr = len(columns)
    parts = columns
    for level in tl.static_range(levels(N)):
        wholes = ()
        for p in tl.static_range(N >> (level + 1)):
            # the last axis is the lowest bit of a column's number, and comes last
            wholes = wholes + (tl.join(parts[p], parts[p + (N >> (level + 1))]),)  # noqa: RUF005
        parts = wholes
    return tl.reshape(parts[0], [columns[0].shape[0], N])


@triton.jit
def _solve(target, couple_ptr, L: tl.constexpr):
    """Solve (I + A) u = target forward for rows u, -A in memory: [N, BLOCK_L] both."""
    BLOCK_L: tl.constexpr = target.shape[1]
    columns = _columns(target)
    solved = ()
    for i in tl.static_range(BLOCK_L):
        u = columns[i]
        if i < L:
            for j in tl.static_range(i):
                u = tl.fma(tl.load(couple_ptr + i * BLOCK_L + j), solved[j], u)
        solved = solved + (u,)  # noqa: RUF005
    return _joined(solved)


@triton.jit(do_not_specialize=["n_rows", "seed", "layer"])
def replay_flush_kernel(
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
    couples_ptr,
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
):
    """Programs walk items (planned row, head, TILES tiles of BLOCK_V rows of dv).

    couples_ptr: [programs, BLOCK_L, BLOCK_L] FP32, room for -A. WIDTH: four times the elements of a
    row that a lane fetches at once. WARPS: of the program.
    """
    heads_per_key: tl.constexpr = heads // key_heads
    slot_records: tl.constexpr = L - 1
    slot_logs: tl.constexpr = heads * (L - 1)
    n_steps = tl.load(counts_ptr)
    n_flush = tl.load(counts_ptr + 1)
    parts = (dv + TILES * BLOCK_V - 1) // (TILES * BLOCK_V)
    per_row = heads * parts
    n_items = n_flush * per_row
    item = tl.program_id(0)
    step = tl.arange(0, BLOCK_L)
    recorded = step < L - 1
    last = step == L - 1
    channel = tl.arange(0, DK)
    inner = tl.arange(0, BLOCK_V)
    ordered = _ordered_channels(DK, WIDTH)
    couple_ptr = couples_ptr + item * (BLOCK_L * BLOCK_L)
    STATE_PARTS: tl.constexpr = part_count(FORMAT)
    while item < n_items:
        line = n_steps + item // per_row
        head = item % per_row // parts
        first0 = (item % parts) * (TILES * BLOCK_V)
        slot = tl.load(lines_ptr + SLOT * n_rows + line).to(tl.int64)
        row = tl.load(lines_ptr + ROW * n_rows + line).to(tl.int64)
        number = tl.load(lines_ptr + STORE_NUMBER * n_rows + line)
        stream = tl.load(streams_ptr + slot)
        state = slot * slot_states + head
        key_head = head // heads_per_key
        # records from here on are counted from the slot's first
        record = slot * slot_records
        key_place = (record * key_heads + key_head) * DK
        keys = load_record(
            key_records_ptr + key_place + (step * (key_heads * DK))[:, None] + channel[None, :],
            recorded[:, None],
            KEY_RECORD,
        )
        q_ptrs = q_ptr + row * stride_q_row + key_head * stride_q_head
        k_ptrs = k_ptr + row * stride_k_row + key_head * stride_k_head
        q = tl.load(q_ptrs + channel).to(tl.float32)
        k = tl.load(k_ptrs + channel).to(tl.float32)
        q_ordered = tl.load(q_ptrs + ordered).to(tl.float32)
        k_ordered = tl.load(k_ptrs + ordered).to(tl.float32)

        # cumulated in FP64: after one strong gate FP32 sums would have lost later decays' digits
        scalars = slot * slot_logs + head * (L - 1)
        logs = tl.load(log_records_ptr + scalars + step, mask=recorded, other=0.0)
        log_now = tl.load(log_ptr + row * stride_log_row + head * stride_log_head).to(tl.float32)
        since = tl.cumsum(tl.where(last, log_now, logs).to(tl.float64), axis=0)
        all_since = tl.sum(tl.where(last, since, 0.0), axis=0)
        from_start = tl.exp(since.to(tl.float32))
        to_end = tl.exp((all_since - since).to(tl.float32))
        whole = tl.exp(all_since.to(tl.float32))
        strength = 1.0
        if DELTA or HAS_DT:
            strength_ptrs = strength_ptr + row * stride_strength_row + head * stride_strength_head
            strength = tl.load(strength_ptrs).to(tl.float32)
        if REDERIVE or HAS_DT:
            strengths = tl.load(strength_records_ptr + scalars + step, mask=recorded, other=0.0)
            strengths = tl.where(last, strength, strengths)

        own = tl.sum(q * k, axis=0)
        met_q = tl.where(last, own, tl.sum(keys * q[None, :], axis=1))
        key_parts = bf16_parts(_product_order(keys, WIDTH), part_count(KEY_RECORD))
        keys_across = _transposed(key_parts)
        token = tl.trans(token_rows(q_ordered, k_ordered, DELTA))
        if DELTA:
            met_k = tl.sum(keys * k[None, :], axis=1)
        if REDERIVE:
            zero = tl.zeros([BLOCK_L, BLOCK_L], dtype=tl.float32)
            couple = _add_products(zero, key_parts, keys_across)
            couple = tl.where(last[:, None], met_k[None, :], couple)
            gap = tl.minimum(since[:, None] - since[None, :], 0.0).to(tl.float32)
            couple = couple * tl.exp(gap) * -strengths[:, None]
            tl.debug_barrier()  # the item before has been solved
            tl.store(couple_ptr + step[:, None] * BLOCK_L + step[None, :], couple)
            tl.debug_barrier()
            # from what is left of values after the state's share to weighted corrections
            target = tl.where(step[:, None] == step[None, :], strengths[:, None], 0.0)
            solve = bf16_parts(_solve(target, couple_ptr, L) * to_end[None, :], 3)

        for tile in tl.range(0, TILES, num_stages=1):
            first = first0 + tile * BLOCK_V
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
                WARPS,
            )
            S = _to_products(S, WARPS)
            value = first + inner
            in_v = value < dv
            # neighbours along dv to neighbouring lanes, steps within one
            place = tl.max_contiguous(inner[:, None] + (step * (heads * dv))[None, :], [1, 1])
            place += (record * heads + head) * dv + first
            mask = in_v[:, None] & recorded[None, :]
            if REDERIVE:
                past = load_record(value_records_ptr + place, mask, KEY_RECORD)
            else:
                past = load_record(written_ptr + place, mask, WRITTEN_RECORD)
            v_ptrs = v_ptr + row * stride_v_row + head * stride_v_head + value
            v = tl.load(v_ptrs, mask=in_v, other=0.0).to(tl.float32)

            met = tl.zeros([BLOCK_V, 16], dtype=tl.float32)
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
            which = tl.arange(0, 16)[None, :] // 4
            of_q = tl.sum(tl.where(which == 0, met, 0.0), axis=1)
            of_k = of_q
            if DELTA:
                of_k = tl.sum(tl.where(which == 1, met, 0.0), axis=1)
            if REDERIVE:
                foreseen = tl.where(last[None, :], of_k[:, None], foreseen) * from_start[None, :]
                past = tl.where(last[None, :], v[:, None], past)
                nothing = tl.zeros([BLOCK_V, BLOCK_L], dtype=tl.float32)
                u = _add_products(nothing, bf16_parts(past - foreseen, 3), solve)
                u_now = tl.sum(tl.where(last[None, :], u, 0.0), axis=1)
            else:
                u = past * to_end[None, :]
                if HAS_DT:
                    u = u * strengths[None, :]
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
                WARPS,
            )
            S = _to_products(S, WARPS)
            S = _add_products(S * whole, bf16_parts(u, 3), key_parts)
            S = tl.fma(u_now[:, None], k_ordered[None, :], S)
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
