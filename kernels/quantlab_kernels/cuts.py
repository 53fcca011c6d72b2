"""Tiles of a state whose columns are shared among CUTS warps, each with 16 of its rows.

A state tile [V, K] is kept as [CUTS V, K / CUTS], its lane rows: all rows' first columns, then the
next. A product on tensor cores takes 16 rows to a warp (parts.py), so with CUTS = 2 twice as
many warps share a state, each with half as many of its elements in registers; and a warp's rows of
what all columns have summed up are those of its lane rows.
"""

import triton
import triton.language as tl


@triton.jit
def lane_rows(V: tl.constexpr, K: tl.constexpr, CUTS: tl.constexpr):
    """Find the row and the first column of each lane row: two int32 [V CUTS]."""
    LANES: tl.constexpr = V * CUTS
    lane = tl.arange(0, LANES)
    return lane % V, lane // V * (K // CUTS)


@triton.jit
def to_lane_rows(x, CUTS: tl.constexpr):
    """Spread [V] or [V, N] of rows to lane rows [CUTS V] or [CUTS V, N]."""
    if CUTS == 1:
        return x
    elif len(x.shape) == 1:
        return tl.reshape(tl.broadcast_to(x[None, :], [CUTS, x.shape[0]]), [CUTS * x.shape[0]])
    else:
        V: tl.constexpr = x.shape[0]
        N: tl.constexpr = x.shape[1]
        return tl.reshape(tl.broadcast_to(x[None, :, :], [CUTS, V, N]), [CUTS * V, N])


@triton.jit
def columns_to_lane_rows(x, V: tl.constexpr, CUTS: tl.constexpr):
    """Spread [1, K] of columns to lane rows [CUTS V, K / CUTS]."""
    if CUTS == 1:
        return x
    else:
        K: tl.constexpr = x.shape[1]
        x = tl.broadcast_to(tl.reshape(x, [CUTS, 1, K // CUTS]), [CUTS, V, K // CUTS])
        return tl.reshape(x, [CUTS * V, K // CUTS])


@triton.jit
def most_of_rows(x, CUTS: tl.constexpr):
    """Find the largest of each row's lane rows: [CUTS V] to [V]."""
    if CUTS == 1:
        return x
    else:
        return tl.max(tl.reshape(x, [CUTS, x.shape[0] // CUTS]), axis=0)


@triton.jit
def sum_of_rows(x, CUTS: tl.constexpr):
    """Add up each row's lane rows: [CUTS V] or [CUTS V, N] to [V] or [V, N]."""
    if CUTS == 1:
        return x
    elif len(x.shape) == 1:
        return tl.sum(tl.reshape(x, [CUTS, x.shape[0] // CUTS]), axis=0)
    else:
        return tl.sum(tl.reshape(x, [CUTS, x.shape[0] // CUTS, x.shape[1]]), axis=0)


@triton.jit
def cut_rows(parts, CUTS: tl.constexpr):
    """Cut parts [K, N] of a right side that lane rows are multiplied by: [CUTS, K / CUTS, N]."""
    if CUTS == 1:
        return parts
    else:
        K: tl.constexpr = parts[0].shape[0]
        N: tl.constexpr = parts[0].shape[1]
        cut = ()
        for p in tl.static_range(len(parts)):
            cut = cut + (tl.reshape(parts[p], [CUTS, K // CUTS, N]),)  # noqa: RUF005
        return cut


@triton.jit
def cut_columns(parts, CUTS: tl.constexpr):
    """Cut parts [L, K] of a right side that gives lane rows: [CUTS, L, K / CUTS]."""
    if CUTS == 1:
        return parts
    else:
        L: tl.constexpr = parts[0].shape[0]
        K: tl.constexpr = parts[0].shape[1]
        cut = ()
        for p in tl.static_range(len(parts)):
            part = tl.reshape(parts[p], [L, CUTS, K // CUTS])
            cut = cut + (tl.trans(part, 1, 0, 2),)  # noqa: RUF005
        return cut


@triton.jit
def parts_to_lane_rows(parts, CUTS: tl.constexpr):
    """Spread parts [V, N] to lane rows."""
    spread = ()
    for p in tl.static_range(len(parts)):
        spread = spread + (to_lane_rows(parts[p], CUTS),)  # noqa: RUF005
    return spread
