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

Precision: products are exact but for the order of FP32 additions (parts.py), from what was stored
where that has few bits (folded.py). A segment begins with values instead: cutting it elsewhere
moves last bits, which may flip a code at a boundary, and no draw.
Bytes: per token and head q, v, o once, k twice, and the coefficients of coefficients.py; the state
moves once a segment. The floor is arithmetic: at 128 x 128 and 1.76 GHz a multiprocessor has 18,000
clocks a window for three times flash-linear-attention's chunk forward, and issues four instructions
of 32 lanes a clock: 140 an element of the state, of which a stochastic store takes some 50.
Not covered: L = 1 (conventional.py), exact FP64 records, formats whose block spans state rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantlab.recurrence import OpInputs
from quantlab.replay.policy import Policy
from quantlab.replay.records import RecordTypes
from quantlab_kernels.coefficients import window_coefficients
from quantlab_kernels.draws import COPY_STRIDE, lane_channels, lane_order
from quantlab_kernels.folded import rows_overflow, sizes_of, store_part, whole_scale
from quantlab_kernels.parts import dot_parts, split_parts
from quantlab_kernels.rounding import round_record
from quantlab_kernels.scan_window import (
    copy_product,
    flush_keys,
    load_decays,
    load_parts,
    load_square,
    load_steps,
    load_total,
    loaded_products,
    operands_of_window,
    part_rows,
)
from quantlab_kernels.stores import signed_seed, store_kind, tile_shape
from quantlab_kernels.substitution import substitute

MAX_WINDOW = 64
RECORD_NAMES = {None: "fp32", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
"""Type of a record to KEY_RECORD and CORRECTION_RECORD."""
KEY_PARTS = {torch.bfloat16: 1, torch.float16: 2}
"""BF16 parts of a key or query, by type; three of FP32."""
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
    FLUSH_PARTS: tl.constexpr = 3 if (PER_CHANNEL or KEY_RECORD != "fp32") else KEY_PARTS

    step = tl.arange(0, BLOCK_L)
    channel = tl.arange(0, BLOCK_K)
    lane_channel = lane_channels(BLOCK_K)
    is_last = step == L - 1

    unit0 = (group_row.to(tl.int64) * heads + head) * n_windows
    q_ptrs = q_ptr + row * stride_q_row + (head // heads_per_key) * stride_q_head
    k_ptrs = k_ptr + row * stride_k_row + (head // heads_per_key) * stride_k_head
    v_ptrs = v_ptr + row * stride_v_row + head * stride_v_head
    dt_ptrs = dt_ptr + row * stride_dt_row + head * stride_dt_head
    beta_ptrs = beta_ptr + row * stride_beta_row + head * stride_beta_head
    out_ptrs = out_ptr + row * stride_out_row + head * stride_out_head
    state_offset = (group_row.to(tl.int64) * heads + head) * dv * dk
    recur_ptrs = recur_ptr + state_offset + lane_channel[None, :]
    read_ptrs = read_ptr + state_offset + lane_channel[None, :]
    bad_flush_ptrs = bad_flush_ptr + group_row * heads + head
    bad_flush = tl.load(bad_flush_ptrs)

    # the stored copies, and their products with the first window
    decay, query_parts, key_parts, flush_parts = operands_of_window(
        q_ptrs,
        k_ptrs,
        from_start_ptr,
        unit0,
        0,
        T,
        channel,
        dk,
        stride_q_t,
        stride_k_t,
        L,
        BLOCK_L,
        DELTA,
        PER_CHANNEL,
        KEY_RECORD,
        KEY_PARTS,
        FLUSH_PARTS,
    )
    S = load_parts(recur_ptrs, dv, dk, lane_channel, PARTS, BLOCK_V, TAIL_V)
    kept = S
    if SEPARATE:
        kept = load_parts(read_ptrs, dv, dk, lane_channel, PARTS, BLOCK_V, TAIL_V)
    read_q = loaded_products(kept, query_parts, decay, PER_CHANNEL)
    read_k = read_q
    recur_k = read_q
    if DELTA:
        read_k = loaded_products(kept, key_parts, decay, PER_CHANNEL)
    if SECOND:
        recur_k = loaded_products(S, flush_parts, decay, PER_CHANNEL)
    first_bad = ()
    for p in tl.static_range(PARTS):
        bad_rows = tl.full([S[p].shape[0]], -1, tl.int32)
        first_bad = first_bad + (bad_rows,)  # noqa: RUF005 (kernels know no unpacking)

    for window in range(0, n_windows):
        t = window * L + step
        live = (step < L) & (t < T)
        unit = unit0 + window
        flush = first_flush + window

        # outputs and the folded state
        keys = lane_order(load_steps(k_ptrs, t, live, channel, dk, stride_k_t))
        flushed = flush_keys(keys, L, KEY_RECORD)
        to_end = load_decays(to_end_ptr, unit, dk, channel, BLOCK_L, PER_CHANNEL)
        if PER_CHANNEL:
            fold_parts = split_parts(flushed * to_end, 3)
        else:
            fold_parts = split_parts(flushed, FLUSH_PARTS)
        total = load_total(from_start_ptr, unit, dk, channel, L, BLOCK_L, PER_CHANNEL)
        weight_parts = split_parts(load_square(weights_ptr, unit, BLOCK_L), 3)
        own = tl.load(own_ptr + unit * BLOCK_L + step)
        if DELTA:
            beta = tl.load(beta_ptrs + t * stride_beta_t, mask=live, other=0.0).to(tl.float32)
            solve_parts = split_parts(load_square(solve_ptr, unit, BLOCK_L), 3)
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
        for p in tl.static_range(PARTS):
            value = part_rows(p, BLOCK_V, TAIL_V)
            v = tl.trans(load_steps(v_ptrs, t, live, value, dv, stride_v_t))
            v_record = round_record(v, KEY_RECORD)
            if HAS_DT:
                dt = tl.load(dt_ptrs + t * stride_dt_t, mask=live, other=0.0).to(tl.float32)
                v = v * dt[None, :]
                v_record = v_record * dt[None, :]

            # corrections of the steps, from the read copy
            none = tl.zeros([value.shape[0], BLOCK_L], dtype=tl.float32)
            if DELTA:
                if ROUNDED:
                    target = (v - read_k[p]) * beta[None, :]
                    couple_ptrs = couple_ptr + unit * BLOCK_L * BLOCK_L
                    u, u_record = substitute(target, couple_ptrs, L, BLOCK_L, CORRECTION_RECORD)
                else:
                    u = dot_parts(split_parts(v - read_k[p], 3), solve_parts, none)
                    u_record = u
            else:
                u = v
                u_record = v_record
            o = dot_parts(split_parts(u_record, 3), weight_parts, none) + u * own[None, :]

            # what is folded: records of tokens 1..L-1, token L as it is
            if REDERIVED:
                v_flush = tl.where(is_last[None, :], v, v_record)
                u_flush = dot_parts(split_parts(v_flush - recur_k[p], 3), solve_parts, none)
            elif SECOND:
                a_last = tl.load(couple_ptr + (unit * BLOCK_L + step) * BLOCK_L + L - 1)
                target = (v - recur_k[p]) * beta[None, :]
                mixed = tl.where(is_last[None, :], target, u_record * -a_last[None, :])
                u_flush = tl.where(is_last[None, :], tl.sum(mixed, axis=1)[:, None], u_record)
            else:
                u_flush = tl.where(is_last[None, :], u, u_record)
            if PER_CHANNEL:
                u_parts = split_parts(u_flush, 3)
            else:
                u_parts = split_parts(u_flush * to_end[None, :], 3)
            new = dot_parts(u_parts, fold_parts, S[p] * total)
            folded = folded + (new,)  # noqa: RUF005

            if SEPARATE:
                o_last = tl.sum(new * q_last, axis=1)
                o = tl.where(is_last[None, :], o_last[:, None], read_q[p] + o)
            elif REDERIVED:
                o_last = tl.sum(u_flush * w_last[None, :], axis=1)
                o = read_q[p] + tl.where(is_last[None, :], o_last[:, None], o)
            else:
                o = read_q[p] + o
            out_mask = live[None, :] & (value < dv)[:, None]
            tl.store(out_ptrs + t[None, :] * stride_out_t + value[:, None], o, mask=out_mask)

        # the next window's queries and keys; past the last one, the last ones again
        following = tl.minimum(window + 1, n_windows - 1)
        decay, query_parts, key_parts, flush_parts = operands_of_window(
            q_ptrs,
            k_ptrs,
            from_start_ptr,
            unit0 + following,
            following,
            T,
            channel,
            dk,
            stride_q_t,
            stride_k_t,
            L,
            BLOCK_L,
            DELTA,
            PER_CHANNEL,
            KEY_RECORD,
            KEY_PARTS,
            FLUSH_PARTS,
        )

        # stores, and the products of what was stored with the next window
        sizes = ()
        read_sizes = ()
        for p in tl.static_range(PARTS):
            sizes = sizes + (sizes_of(folded[p], RECUR_FORMAT),)  # noqa: RUF005
            if SEPARATE:
                read_sizes = read_sizes + (sizes_of(folded[p], READ_FORMAT),)  # noqa: RUF005
        scale = whole_scale(sizes, RECUR_FORMAT)
        if SEPARATE:
            read_scale = whole_scale(read_sizes, READ_FORMAT)
        S = ()
        read_q = ()
        read_k = ()
        recur_k = ()
        bad_before = first_bad
        first_bad = ()
        for p in tl.static_range(PARTS):
            value = part_rows(p, BLOCK_V, TAIL_V)
            mask = (value < dv)[:, None] & (lane_channel < dk)[None, :]
            first = first_element + p * BLOCK_V * dk
            bad = rows_overflow(sizes[p], RECUR_FORMAT, value.shape[0], applies, PARTIAL)
            if SEPARATE:
                bad = bad | rows_overflow(
                    read_sizes[p], READ_FORMAT, value.shape[0], applies, PARTIAL
                )
                stored, operand, factor = store_part(
                    folded[p],
                    read_sizes[p],
                    read_scale,
                    first,
                    (seed, layer + COPY_STRIDE, stream, flush, dk),
                    applies,
                    READ_FORMAT,
                    READ_SR,
                    QUADS,
                    PARTIAL,
                )
                if window == T // L - 1:
                    tl.store(read_ptrs + value[:, None] * dk, stored, mask=mask)
                read_product = copy_product(operand, factor, query_parts, decay, PER_CHANNEL)
                product = read_product
                if DELTA:
                    product = copy_product(operand, factor, key_parts, decay, PER_CHANNEL)
                read_q = read_q + (read_product,)  # noqa: RUF005
                read_k = read_k + (product,)  # noqa: RUF005
            stored, operand, factor = store_part(
                folded[p],
                sizes[p],
                scale,
                first,
                (seed, layer, stream, flush, dk),
                applies,
                RECUR_FORMAT,
                RECUR_SR,
                QUADS,
                PARTIAL,
            )
            S = S + (stored,)  # noqa: RUF005
            if not SEPARATE:
                product = copy_product(operand, factor, query_parts, decay, PER_CHANNEL)
                read_q = read_q + (product,)  # noqa: RUF005
                if DELTA:
                    product = copy_product(operand, factor, key_parts, decay, PER_CHANNEL)
                read_k = read_k + (product,)  # noqa: RUF005
            if SECOND:
                product = copy_product(operand, factor, flush_parts, decay, PER_CHANNEL)
            recur_k = recur_k + (product,)  # noqa: RUF005
            newly = bad & (bad_before[p] < 0) & (window < T // L)
            first_bad = first_bad + (tl.where(newly, flush, bad_before[p]),)  # noqa: RUF005

    if T % L == 0:
        for p in tl.static_range(PARTS):
            value = part_rows(p, BLOCK_V, TAIL_V)
            mask = (value < dv)[:, None] & (lane_channel < dk)[None, :]
            tl.store(recur_ptrs + value[:, None] * dk, S[p], mask=mask)

    # the first of all rows; none is -1, which as unsigned comes last
    for p in tl.static_range(PARTS):
        first = tl.min(first_bad[p].to(tl.uint32, bitcast=True), axis=0)
        bad_flush = tl.minimum(bad_flush.to(tl.uint32, bitcast=True), first)
        bad_flush = bad_flush.to(tl.int32, bitcast=True)
    tl.store(bad_flush_ptrs, bad_flush)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanLaunch:
    """How a program is launched.

    Attributes:
        warps: of a program.
        registers: most registers of a lane; None for what the compiler takes.
    """

    warps: int
    registers: int | None = None


def scan_launch(block_v: int, block_k: int) -> ScanLaunch:
    """Choose a launch: 64 registers of a lane hold the state."""
    return ScanLaunch(warps=min(16, max(4, block_v * block_k // 2048)))


def row_parts(dv: int) -> tuple[int, int]:
    """Cut a state's rows into a power of two and a rest, padded to one: 160 into 128 and 64.

    A rest of fewer than 64 rows is none: the warps of a product would share too few.
    """
    whole = 1 << max(4, dv.bit_length() - 1)
    rest = max(0, dv - whole)
    tail = 0 if rest == 0 else max(64, triton.next_power_of_2(rest))
    return (whole, tail) if tail < whole else (2 * whole, 0)


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
    launch: ScanLaunch | None = None,
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
        launch: how programs are cut; changes no bit that matters (the order of some additions).

    Mutates:
        recur, read, out, bad_flush.

    Raises:
        ValueError: a window or a format that the kernel does not have.
    """
    if not 2 <= policy.window <= MAX_WINDOW:
        raise ValueError(f"the kernel has windows of 2 to {MAX_WINDOW}, got {policy.window}")
    rest = inputs.steps % policy.window
    if 0 < rest < inputs.steps:
        # an open window leaves the state as it is, so it is a launch of its own
        cut = inputs.steps - rest
        keys = {"seed": seed, "layer": layer, "launch": launch}
        copies = (rows, streams, recur, read)
        full, last = inputs.slice(0, cut), inputs.slice(cut, inputs.steps)
        marks = (bad_flush, policy, applies)
        windowed_scan(full, *copies, out[:, :cut], *marks, first_flush=first_flush, **keys)
        after = first_flush + cut // policy.window
        windowed_scan(last, *copies, out[:, cut:], *marks, first_flush=after, **keys)
        return
    recur_kind, read_kind = store_kind(policy.recur), store_kind(policy.read)
    types = RecordTypes.of(policy.records, inputs)
    key_record = RECORD_NAMES[types.k or types.v]
    coefficients = window_coefficients(inputs, rows, window=policy.window, key_record=key_record)
    block_v, tail_v = row_parts(inputs.dv)
    _, block_k = tile_shape(inputs.dv, inputs.dk)
    launch = launch or scan_launch(block_v, block_k)
    limit = {} if launch.registers is None else {"maxnreg": launch.registers}
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
        TAIL_V=tail_v,
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
        KEY_PARTS=max(KEY_PARTS.get(x.dtype, 3) for x in (inputs.q, inputs.k)),
        num_warps=launch.warps,
        num_stages=1,
        enable_fp_fusion=False,
        **limit,
    )
