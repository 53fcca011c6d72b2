"""Replay decode, a step that does not flush: outputs behind h records, the state only read.

    o = g S q + sum_j w_j u_j + (k.q) u,   w_j = g_j (k_j.q),   g_j the decay since record j,
    u = v, or beta (v - g S k - sum_j a_j u_j) with a_j = g_j (k_j.k) for a delta rule

One pass over the read copy serves S q and S k. With decays per key channel, q and k take the decay
before they meet S, and g_j sits inside the products with the records' keys.

How it runs: decode_weights.py has left w, a, g and k.q of each head, and q and k as the products
take them. A unit is what shares q and k, the value heads of a key head (one head where decays are
per channel); its state rows are contiguous over heads. A program is a tile of BLOCK_V rows of one
unit, which may span heads: it asks for all it reads at once, forms two products on matrix units
(states and 16-bit records; FP32 ones are met by multiply-adds) and adds them up.

Rounding points: the token's v and u are rounded to their records as they are appended; the step
itself uses them unrounded. The state is not written.
Bytes, per row and value head: the read copy once, h records of u, one appended. Floor: those over
the bandwidth.
Not covered: L = 1 (decode_conventional.py), several tokens at once.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from quantlab_kernels.decode_plan import COUNT, ROW, SLOT
from quantlab_kernels.decode_products import (
    as_operand,
    fetch_codes,
    fetched_rows,
    matrix_format,
    operand,
    pair_sums,
)
from quantlab_kernels.decode_records import store_record


@triton.jit(do_not_specialize=["n_rows"])
def replay_step_kernel(
    v_ptr,
    strength_ptr,
    out_ptr,
    codes_ptr,
    scales_ptr,
    state_scale_ptr,
    value_records_ptr,
    written_ptr,
    lines_ptr,
    counts_ptr,
    columns_ptr,
    weights_ptr,
    factors_ptr,
    n_rows,
    heads: tl.constexpr,
    key_heads: tl.constexpr,
    dv: tl.constexpr,
    slot_states,
    stride_v_row,
    stride_v_head,
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
    SPAN: tl.constexpr,
    WARPS: tl.constexpr,
    DELTA: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    HAS_DT: tl.constexpr,
    KEEP_V: tl.constexpr,
    FORMAT: tl.constexpr,
    KEY_RECORD: tl.constexpr,
    WRITTEN_RECORD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per (tile of BLOCK_V state rows of a unit, unit, planned row).

    strength: beta of a delta rule, dt of Mamba-2. written: records of u, or of x without a delta
    rule, [slots, L - 1, heads, dv]. columns, weights, factors: of `step_weights_kernel`. SPAN: most
    heads that a tile's rows belong to. WARPS: of the program. OVERLAP: this may have been started
    before that kernel was done.
    """
    UNIT: tl.constexpr = 1 if PER_CHANNEL else heads // key_heads
    rows: tl.constexpr = UNIT * dv  # of a unit
    MATRIX: tl.constexpr = matrix_format(FORMAT)
    MATRIX_WRITTEN: tl.constexpr = WRITTEN_RECORD != "fp32"
    first = tl.program_id(0) * BLOCK_V
    unit = tl.program_id(1)
    head0 = unit * UNIT
    line = tl.program_id(2)
    n_steps = tl.load(counts_ptr)
    row = tl.load(lines_ptr + ROW * n_rows + line).to(tl.int64)
    slot = tl.load(lines_ptr + SLOT * n_rows + line).to(tl.int64)
    count = tl.load(lines_ptr + COUNT * n_rows + line)
    if line < n_steps:
        # All loads come first: none can pass the barriers of what is computed.
        record = slot * (L - 1) + count  # the token's
        state0 = (slot * slot_states + head0) * dv + first
        fetched = fetched_rows(BLOCK_V, WARPS, MATRIX)
        codes, scales = fetch_codes(
            codes_ptr,
            scales_ptr,
            state0,
            fetched,
            fetched < rows - first,
            DK,
            COLUMNS,
            FORMAT,
            WIDTH,
            1,
        )
        age = tl.arange(0, BLOCK_L)
        past = age < count
        tile_row = tl.arange(0, BLOCK_V)
        r = first + tile_row
        inside = r < rows
        head = head0 + (r if SPAN > 1 else first + tl.zeros_like(r)) // dv
        value = r - (head - head0) * dv
        written_ptrs = written_ptr + ((record - 1) * heads + head0) * dv + first
        if MATRIX_WRITTEN:
            written = tl.load(
                written_ptrs + tile_row[None, :] - (age * (heads * dv))[:, None],
                mask=past[:, None] & inside[None, :],
                other=0,
            )
        else:
            # neighbours along dv to neighbouring lanes, ages within one: no shuffles for sums
            place = tl.max_contiguous(tile_row[:, None] - (age * (heads * dv))[None, :], [1, 1])
            mask = inside[:, None] & past[None, :]
            written = tl.load(written_ptrs + place, mask=mask, other=0.0)
        v_ptrs = v_ptr + row * stride_v_row + head * stride_v_head + value
        x = tl.load(v_ptrs, mask=inside, other=0.0).to(tl.float32)
        strength = 1.0
        if DELTA or HAS_DT:
            strength = tl.load(
                strength_ptr + row * stride_strength_row + head * stride_strength_head,
                mask=inside,
                other=0.0,
            ).to(tl.float32)
        scale = 1.0
        if FORMAT == "fp8" or FORMAT == "int8" or FORMAT == "int4":
            scale = tl.load(scales_ptr + state0 + tile_row, mask=inside, other=0.0)
        elif FORMAT == "nvfp4":
            scale_ptrs = state_scale_ptr + slot * slot_states + head
            scale = tl.load(scale_ptrs, mask=inside, other=0.0)
        if OVERLAP:
            gdc_wait()
        factor_ptrs = factors_ptr + (line * heads + head) * 4
        decay = tl.load(factor_ptrs, mask=inside, other=0.0) * scale
        own = tl.load(factor_ptrs + 2, mask=inside, other=0.0)

        # the state's share
        at = line * (heads // UNIT) + unit
        sums = tl.zeros([BLOCK_V, 8], dtype=tl.float32)
        o = tl.zeros([BLOCK_V], dtype=tl.float32)
        met = o
        if MATRIX:
            column = tl.arange(0, COLUMNS)
            part = tl.arange(0, 8)
            places = (at * COLUMNS + column)[:, None] * 8 + part[None, :]
            columns = as_operand(tl.load(columns_ptr + places), FORMAT)
            tile = operand(codes, scales, BLOCK_V, COLUMNS, FORMAT, WARPS)
            sums = tl.dot(tile, columns, out_dtype=tl.float32) * decay[:, None]
        else:
            part = tl.arange(0, COLUMNS // WIDTH)
            column = part[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
            q = tl.load(columns_ptr + at * (2 * COLUMNS) + column)
            o = tl.sum(tl.sum(codes * q[None, :, :], axis=1), axis=1) * decay
            if DELTA:
                k = tl.load(columns_ptr + at * (2 * COLUMNS) + COLUMNS + column)
                met = tl.sum(tl.sum(codes * k[None, :, :], axis=1), axis=1) * decay

        # the records' share
        for s in tl.static_range(SPAN):
            # of the last heads of a unit fewer than SPAN are left: no row is then of a head beyond
            here = head == head0 + first // dv + s
            spanned = head0 + tl.minimum(first // dv + s, UNIT - 1)
            at = line * heads + spanned
            if MATRIX_WRITTEN:
                part = tl.arange(0, 8)
                places = (at * BLOCK_L + age)[:, None] * 8 + part[None, :]
                columns = as_operand(tl.load(weights_ptr + places), WRITTEN_RECORD)
                share = tl.dot(tl.trans(as_operand(written, WRITTEN_RECORD)), columns)
                share = share * tl.load(factors_ptr + at * 4 + 1)
                if SPAN > 1:
                    share = tl.where(here[:, None], share, 0.0)
                sums += share
            else:
                weights = tl.load(weights_ptr + at * (2 * BLOCK_L) + age)
                share = tl.sum(written * weights[None, :], axis=1)
                o += tl.where(here, share, 0.0) if SPAN > 1 else share
                if DELTA:
                    weights = tl.load(weights_ptr + at * (2 * BLOCK_L) + BLOCK_L + age)
                    share = tl.sum(written * weights[None, :], axis=1)
                    met += tl.where(here, share, 0.0) if SPAN > 1 else share
        if MATRIX or MATRIX_WRITTEN:
            of_q, of_k = pair_sums(sums)
            o += of_q
            met += of_k

        u = x
        if DELTA:
            u = strength * (x - met)
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
