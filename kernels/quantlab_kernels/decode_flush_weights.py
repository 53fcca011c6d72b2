"""Replay decode, what a flush knows without the state: decays, corrections' solve, once per head.

    A_ij = beta_i d_ij (k_i.k_j), j < i,   (I + A)^-1 diag(beta) d_i,   k_i.q,   k_i.k

with d_ij the decay from step j to i and d_i that to the last. A flush whose programs formed these
themselves had them before its first product, on all warps, with too few warps to hide the wait;
here a warp forms those of a head, and many are in flight.

How it runs: a program walks items (planned row, head). Corrections are solved forward, a column of
the solve to a lane, with A passed through memory (`couples_ptr`).

Rounding points: none beyond FP32; decays are cumulated in FP64: after one strong gate FP32 sums
would have lost later decays' digits.
Bytes, per row and head: L - 1 records of k, of decays and strengths; it leaves 1 KB and 256 (L up
to 16), which the flush finds in the second-level cache.
"""

import triton
import triton.language as tl

from quantlab_kernels.decode_plan import ROW, SLOT
from quantlab_kernels.decode_products import bf16_parts
from quantlab_kernels.decode_records import load_record

VECTORS = tl.constexpr(
    4
)  # kept per head, BLOCK_L each; the first is the decay since the checkpoint
MET_Q = tl.constexpr(1)  # k_i.q; the token's own last
MET_K = tl.constexpr(2)  # k_i.k of records
WEIGHT = tl.constexpr(3)  # what records of written values enter by: decays to the end, times dt


@triton.constexpr_function
def part_count(name):
    """Count the BF16 parts that hold a state's or a record's values."""
    return {"bf16": 1, "fp16": 2}.get(name, 3)


@triton.jit
def transposed(parts):
    """Transpose each of a tuple."""
    turned = ()
    for p in tl.static_range(len(parts)):
        turned = turned + (tl.trans(parts[p]),)  # noqa: RUF005 (kernels know no unpacking)
    return turned


@triton.jit
def add_products(start, a, b):
    """Form start + A B from parts, smallest products first, those below 2**-24 left out."""
    total = start
    for order in tl.static_range(3):
        for i in tl.static_range(len(a)):
            for j in tl.static_range(len(b)):
                if i + j == 2 - order:
                    total = tl.dot(a[i], b[j], total)
    return total


@triton.constexpr_function
def levels(n):
    """Return log2 of a power of two."""
    return n.bit_length() - 1


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


@triton.jit(do_not_specialize=["n_rows"])
def flush_weights_kernel(
    q_ptr,
    k_ptr,
    log_ptr,
    strength_ptr,
    key_records_ptr,
    log_records_ptr,
    strength_records_ptr,
    lines_ptr,
    counts_ptr,
    couples_ptr,
    vectors_ptr,
    solves_ptr,
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
    DK: tl.constexpr,
    DELTA: tl.constexpr,
    HAS_DT: tl.constexpr,
    REDERIVE: tl.constexpr,
    KEY_RECORD: tl.constexpr,
):
    """Programs walk items (planned row, head).

    couples_ptr: [programs, BLOCK_L, BLOCK_L] FP32, room for -A. vectors_ptr: [flushing rows, heads,
    VECTORS, BLOCK_L] FP32. solves_ptr: [flushing rows, heads, BLOCK_L, BLOCK_L] FP32, from what is
    left of values after the state's share to weighted corrections.
    """
    n_steps = tl.load(counts_ptr)
    n_items = tl.load(counts_ptr + 1) * heads
    item = tl.program_id(0)
    couple_ptr = couples_ptr + item * (BLOCK_L * BLOCK_L)
    step = tl.arange(0, BLOCK_L)
    recorded = step < L - 1
    last = step == L - 1
    channel = tl.arange(0, DK)
    square = step[:, None] * BLOCK_L + step[None, :]
    while item < n_items:
        line = n_steps + item // heads
        head = item % heads
        slot = tl.load(lines_ptr + SLOT * n_rows + line).to(tl.int64)
        row = tl.load(lines_ptr + ROW * n_rows + line).to(tl.int64)
        key_head = head // (heads // key_heads)
        key_place = (slot * ((L - 1) * key_heads) + key_head) * DK
        keys = load_record(
            key_records_ptr + key_place + (step * (key_heads * DK))[:, None] + channel[None, :],
            recorded[:, None],
            KEY_RECORD,
        )
        q_ptrs = q_ptr + row * stride_q_row + key_head * stride_q_head
        k_ptrs = k_ptr + row * stride_k_row + key_head * stride_k_head
        q = tl.load(q_ptrs + channel).to(tl.float32)
        k = tl.load(k_ptrs + channel).to(tl.float32)
        scalars = (slot * heads + head) * (L - 1)
        logs = tl.load(log_records_ptr + scalars + step, mask=recorded, other=0.0)
        log_now = tl.load(log_ptr + row * stride_log_row + head * stride_log_head).to(tl.float32)
        strengths = 1.0
        if REDERIVE or HAS_DT:
            strength_ptrs = strength_ptr + row * stride_strength_row + head * stride_strength_head
            strengths = tl.load(strength_records_ptr + scalars + step, mask=recorded, other=0.0)
            strengths = tl.where(last, tl.load(strength_ptrs).to(tl.float32), strengths)

        since = tl.cumsum(tl.where(last, log_now, logs).to(tl.float64), axis=0)
        all_since = tl.sum(tl.where(last, since, 0.0), axis=0)
        to_end = tl.exp((all_since - since).to(tl.float32))
        vector_ptrs = vectors_ptr + item.to(tl.int64) * (VECTORS * BLOCK_L) + step
        tl.store(vector_ptrs, tl.exp(since.to(tl.float32)))
        met_q = tl.where(last, tl.sum(q * k, axis=0), tl.sum(keys * q[None, :], axis=1))
        tl.store(vector_ptrs + MET_Q * BLOCK_L, met_q)
        if DELTA:
            met_k = tl.sum(keys * k[None, :], axis=1)
            tl.store(vector_ptrs + MET_K * BLOCK_L, met_k)
        if REDERIVE:
            key_parts = bf16_parts(keys, part_count(KEY_RECORD))
            zero = tl.zeros([BLOCK_L, BLOCK_L], dtype=tl.float32)
            couple = add_products(zero, key_parts, transposed(key_parts))
            couple = tl.where(last[:, None], met_k[None, :], couple)
            gap = tl.minimum(since[:, None] - since[None, :], 0.0).to(tl.float32)
            couple = couple * tl.exp(gap) * -strengths[:, None]
            tl.debug_barrier()  # the item before has been solved
            tl.store(couple_ptr + square, couple)
            tl.debug_barrier()
            target = tl.where(step[:, None] == step[None, :], strengths[:, None], 0.0)
            solve = _solve(target, couple_ptr, L) * to_end[None, :]
            tl.store(solves_ptr + item.to(tl.int64) * (BLOCK_L * BLOCK_L) + square, solve)
        else:
            tl.store(vector_ptrs + WEIGHT * BLOCK_L, to_end * strengths)
        item += tl.num_programs(0)
