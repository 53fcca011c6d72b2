"""Attention of one query a row over keys and values at fixed addresses, each row to its own length.

    o = softmax(scale q K^T) V  over the row's first `length + 1` positions

The length is read on the device, so one captured graph serves rows at any positions, and only what
a row has is read. A program takes one part of one key head's positions for all query heads of its
group; parts are equal shares of the row's own blocks, so that a result depends on nothing but the
row and the number of parts, which the decoder fixes. A second kernel joins the parts.

Rounding points: scores and sums in FP32; with 16-bit values the weights meet them in their type, as
fused attention everywhere does.
Bytes: keys and values of a row once, per part an FP32 head. Floor: those over the read bandwidth.
Not covered: several queries a row, masks, windows, soft caps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantlab_kernels.compiling import launch

TILE_BYTES = 16 << 10
"""Of keys, and of values, met at once: two of each are in shared memory."""
PROGRAMS_PER_SM = 4
MIN_QUERIES = 16
"""Rows of the smallest product of matrix units; smaller groups are padded."""


@triton.jit
def attend_part_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    lengths_ptr,
    parts_ptr,
    stats_ptr,
    scale,
    stride_q_row,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    stride_v_row,
    stride_v_head,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One program per (part, key head, row). parts [rows, heads, PARTS, DV], stats [.., 2]."""
    part = tl.program_id(0)
    key_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + row).to(tl.int32) + 1
    share = ((length + BLOCK_N - 1) // BLOCK_N + PARTS - 1) // PARTS * BLOCK_N
    first = part * share
    last = tl.minimum(length, first + share)
    query = tl.arange(0, QUERIES)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    n = tl.arange(0, BLOCK_N)
    head = key_head * GROUP + query
    in_group = query < GROUP
    q = tl.load(
        q_ptr + row * stride_q_row + head[:, None] * stride_q_head + d[None, :],
        mask=in_group[:, None] & (d < D)[None, :],
        other=0.0,
    )
    k_base = k_ptr + row * stride_k_row + key_head * stride_k_head
    v_base = v_ptr + row * stride_v_row + key_head * stride_v_head
    top = tl.full([QUERIES], -float("inf"), dtype=tl.float32)
    total = tl.zeros([QUERIES], dtype=tl.float32)
    acc = tl.zeros([QUERIES, BLOCK_DV], dtype=tl.float32)
    for at in range(first, last, BLOCK_N):
        position = at + n
        inside = position < last
        k = tl.load(
            k_base + position[None, :] * D + d[:, None],
            mask=inside[None, :] & (d < D)[:, None],
            other=0.0,
        )
        score = tl.dot(q, k, input_precision="ieee") * scale
        score = tl.where(inside[None, :], score, -float("inf"))
        now = tl.maximum(top, tl.max(score, axis=1))
        fade = tl.exp(top - now)
        weight = tl.exp(score - now[:, None])
        total = total * fade + tl.sum(weight, axis=1)
        v = tl.load(
            v_base + position[:, None] * DV + dv[None, :],
            mask=inside[:, None] & (dv < DV)[None, :],
            other=0.0,
        )
        acc = acc * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        top = now
    heads = tl.num_programs(1) * GROUP
    place = (row * heads + head) * PARTS + part
    tl.store(
        parts_ptr + place[:, None] * DV + dv[None, :],
        acc,
        mask=in_group[:, None] & (dv < DV)[None, :],
    )
    tl.store(stats_ptr + place * 2, top, mask=in_group)
    tl.store(stats_ptr + place * 2 + 1, total, mask=in_group)


@triton.jit
def join_parts_kernel(
    parts_ptr,
    stats_ptr,
    out_ptr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One program per (head, row)."""
    place = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    part = tl.arange(0, BLOCK_P)
    dv = tl.arange(0, BLOCK_DV)
    known = part < PARTS
    at = place * PARTS + part
    top = tl.load(stats_ptr + at * 2, mask=known, other=-float("inf"))
    total = tl.load(stats_ptr + at * 2 + 1, mask=known, other=0.0)
    # the first part always has a position, so the largest is finite
    share = tl.exp(top - tl.max(top, axis=0))
    values = tl.load(
        parts_ptr + at[:, None] * DV + dv[None, :],
        mask=known[:, None] & (dv < DV)[None, :],
        other=0.0,
    )
    out = tl.sum(values * share[:, None], axis=0) / tl.sum(total * share, axis=0)
    tl.store(out_ptr + place * DV + dv, out.to(out_ptr.dtype.element_ty), mask=dv < DV)


class DecodeAttention:
    """Attention for a fixed number of rows.

    Args:
        rows: of every call.
        capacity: most positions of a row.
        device: where.
    """

    def __init__(self, rows: int, capacity: int, device: torch.device) -> None:
        self.rows = rows
        self.capacity = capacity
        self._sms = 2
        if device.type == "cuda":
            self._sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._room: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float
    ) -> Tensor:
        """Attend.

        Args:
            query: [rows, heads, d].
            keys: [rows, key heads, capacity, d], positions and d contiguous.
            values: [rows, key heads, capacity, dv], likewise.
            lengths: [rows] int64; the newest position's index.
            scale: factor on the scores.

        Returns:
            [rows, heads, dv] in the query's dtype.

        Raises:
            ValueError: memory laid out otherwise.
        """
        rows, heads, d = query.shape
        key_heads, dv = keys.shape[1], values.shape[3]
        if keys.stride()[2:] != (d, 1) or values.stride()[2:] != (dv, 1):
            raise ValueError("keys and values need unit strides, positions side by side")
        if query.stride(2) != 1:
            query = query.contiguous()  # a concatenation may choose another order on CUDA
        width = triton.next_power_of_2(max(d, dv)) * keys.element_size()
        block_n = max(16, min(64, TILE_BYTES // width))
        parts = self._parts(rows * key_heads, block_n)
        key = (heads, parts, dv)
        if key not in self._room:
            room = torch.empty((rows, heads, parts, dv), device=query.device)
            self._room[key] = (room, torch.empty((rows, heads, parts, 2), device=query.device))
        partial, stats = self._room[key]
        out = torch.empty((rows, heads, dv), dtype=query.dtype, device=query.device)
        group = heads // key_heads
        block_dv = triton.next_power_of_2(dv)
        launch(
            attend_part_kernel,
            (parts, key_heads, rows),
            query,
            keys,
            values,
            lengths,
            partial,
            stats,
            scale,
            query.stride(0),
            query.stride(1),
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            GROUP=group,
            QUERIES=max(MIN_QUERIES, triton.next_power_of_2(group)),
            D=d,
            DV=dv,
            BLOCK_D=max(16, triton.next_power_of_2(d)),
            BLOCK_DV=max(16, block_dv),
            BLOCK_N=block_n,
            PARTS=parts,
            num_warps=4,
            num_stages=2,
        )
        launch(
            join_parts_kernel,
            (heads, rows),
            partial,
            stats,
            out,
            DV=dv,
            BLOCK_DV=block_dv,
            PARTS=parts,
            BLOCK_P=triton.next_power_of_2(parts),
            num_warps=4,
        )
        return out

    def _parts(self, heads: int, block_n: int) -> int:
        """Choose how many programs share a row's positions: enough to fill the device."""
        wanted = -(-self._sms * PROGRAMS_PER_SM // heads)
        return max(1, min(wanted, -(-self.capacity // block_n), 64))
