"""A folded state stored, and held as the next window's products take it.

The state of one head lies in parts of its rows, tiles of lane rows (cuts.py), columns in the order
of `draws.lane_channels`. What stays on chip are the operands of held.py; values are written where
a segment ends.

Rounding points: those of stores.py. The values are bit for bit what `store_and_load` gives.
"""

import triton
import triton.language as tl

from quantlab_kernels.cuts import most_of_rows, to_lane_rows
from quantlab_kernels.draws import lane_channels, lane_words
from quantlab_kernels.held import held_as_type
from quantlab_kernels.parts import settled
from quantlab_kernels.rounding import (
    BF16_TO_INF_BITS,
    FP16_TO_INF_BITS,
    INF_BITS,
    abs_bits,
    round_bf16,
)
from quantlab_kernels.stores import (
    block_scales,
    largest_sound,
    signed_elements,
    state_blocks,
    state_scale,
    stored_fp16,
)


@triton.jit
def sizes_of(x, FORMAT: tl.constexpr, CUTS: tl.constexpr):
    """Find the bits of the largest magnitudes: of scale blocks, of rows where there are none."""
    if FORMAT == "fp32" or FORMAT == "fp16" or FORMAT == "bf16":
        return tl.max(abs_bits(x), axis=1)
    elif FORMAT == "nvfp4":
        return tl.max(abs_bits(state_blocks(x, FORMAT)), axis=1)
    else:
        # a block is a row, or with one cut a part of it
        sizes = tl.max(abs_bits(state_blocks(x, FORMAT)), axis=1)
        return to_lane_rows(most_of_rows(sizes, CUTS), CUTS)


@triton.jit
def whole_scale(sizes, FORMAT: tl.constexpr):
    """Find the state scale from the sizes of all parts: 1 where the format has none."""
    if FORMAT == "nvfp4":
        largest = largest_sound(sizes[0])
        for p in tl.static_range(1, len(sizes)):
            largest = tl.maximum(largest, largest_sound(sizes[p]))
        return state_scale(largest)
    else:
        return tl.full((), 1.0, tl.float32)


@triton.jit
def rows_overflow(sizes, FORMAT: tl.constexpr, V: tl.constexpr, applies, PARTIAL: tl.constexpr):
    """Find which of V rows are stored as something that is not finite, from `sizes_of`."""
    rows = tl.max(tl.reshape(sizes, [V, sizes.shape[0] // V]), axis=1)
    limit = INF_BITS
    if FORMAT == "fp16":
        limit = FP16_TO_INF_BITS
    elif FORMAT == "bf16":
        limit = BF16_TO_INF_BITS
    if PARTIAL:
        limit = tl.where(applies, limit, INF_BITS)
    return rows >= limit


@triton.jit
def _halves(x):
    """Take [V, K] apart: its left and its right columns."""
    V: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    return tl.split(tl.trans(tl.reshape(x, [V, 2, K // 2]), 0, 2, 1))


@triton.jit
def _whole(left, right):
    """Put columns together that `_halves` took apart."""
    V: tl.constexpr = left.shape[0]
    K: tl.constexpr = left.shape[1]
    return tl.reshape(tl.trans(tl.join(left, right), 0, 2, 1), [V, 2 * K])


@triton.jit
def _store_columns(
    x,
    after,
    sizes,
    scale,
    firsts,
    draw,
    FORMAT: tl.constexpr,
    SR: tl.constexpr,
    QUADS: tl.constexpr,
    BY_ROW: tl.constexpr,
):
    """Round some columns of a part: values, and what operands are made of."""
    words = x
    if SR:
        words = lane_words(after, firsts, draw, QUADS)
    if FORMAT == "fp32":
        return x, 1.0, x
    elif FORMAT == "fp16":
        y = stored_fp16(x, words, SR).to(tl.float32)
        return y, 1.0, y
    elif FORMAT == "bf16":
        y = round_bf16(x, words, SR)
        return y, 1.0, y
    else:
        blocks = state_blocks(x, FORMAT)
        if SR:
            words = tl.reshape(words, blocks.shape)
        stored, used = block_scales(tl.reshape(sizes, [blocks.shape[0]]), scale, FORMAT)
        e = tl.reshape(signed_elements(blocks, used, words, FORMAT, SR), x.shape)
        BLOCKS: tl.constexpr = blocks.shape[0] // x.shape[0]
        used = _of_columns(used, x.shape[0], BLOCKS, x.shape[1])
        if FORMAT == "nvfp4":
            return e, used, e * _of_columns(stored, x.shape[0], BLOCKS, x.shape[1])
        elif BY_ROW:
            return e, used, e
        else:
            return e, used, e * used


@triton.jit
def _of_columns(x, V: tl.constexpr, BLOCKS: tl.constexpr, K: tl.constexpr):
    """Spread numbers of the blocks of a tile over its columns."""
    return tl.reshape(tl.broadcast_to(x[:, None], [V * BLOCKS, K // BLOCKS]), [V, K])


@triton.jit
def _apart(x, PIECES: tl.constexpr):
    """Take [V, K] apart into PIECES (1, 2, 4 or 8) tiles of neighbouring columns, in order.

    What has fewer columns than that is handed out as it is, once a piece.
    """
    pieces = (x,)
    for level in tl.static_range(3):
        if (2 << level) <= PIECES:
            finer = ()
            for p in tl.static_range(len(pieces)):
                if pieces[p].shape[1] > 1:
                    finer = finer + _halves(pieces[p])
                else:
                    finer = finer + (pieces[p], pieces[p])  # noqa: RUF005
            pieces = finer
    return pieces


@triton.jit
def _together(pieces):
    """Put tiles of neighbouring columns together."""
    tiles = pieces
    for _ in tl.static_range(3):
        if len(tiles) > 1:
            wider = ()
            for p in tl.static_range(len(tiles) // 2):
                wider = wider + (_whole(tiles[2 * p], tiles[2 * p + 1]),)  # noqa: RUF005
            tiles = wider
    return tiles[0]


@triton.jit
def store_part(
    x,
    sizes,
    scale,
    rows,
    first_element,
    draw,
    applies,
    last,
    ptr,
    dv,
    dk,
    FORMAT: tl.constexpr,
    SR: tl.constexpr,
    QUADS: tl.constexpr,
    PARTIAL: tl.constexpr,
    HELD: tl.constexpr,
):
    """Round a part of a state to FORMAT.

    It goes a few columns at a time, so that only their draws and steps on the way take registers.

    Args:
        x: [V, K] FP32, zero outside the state.
        sizes: of this part, see `sizes_of`.
        scale: of the state, see `whole_scale`.
        rows: the row of the state and the first column of each lane row, see `cuts.lane_rows`.
        first_element: of the state.
        draw: seed, layer + 2**24 * copy, stream, flush: see `draws.tile_words`.
        applies: whether the head is stored in FORMAT, else in FP32; looked at if PARTIAL.
        last: whether values are wanted: they are written only then.
        ptr: of the state's values.
        dv: rows of the state.
        dk: its columns.
        FORMAT: "fp32", "fp16", "bf16", "fp8", "nvfp4", "int8", "int6" or "int4".
        SR: stochastic rounding.
        QUADS: dk is a multiple of four.
        PARTIAL: some heads are not.
        HELD: see `held.held_as`.

    Returns:
        operands [V, K] and their factor, a number or [V, 1].
    """
    V: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    PIECES: tl.constexpr = 1 if (K <= 32 or FORMAT == "fp32") else (K // 16 if K < 128 else 8)
    sizes = tl.reshape(sizes, [V, sizes.shape[0] // V])
    SCALED: tl.constexpr = not (FORMAT == "fp32" or FORMAT == "fp16" or FORMAT == "bf16")
    BY_ROW: tl.constexpr = SCALED and FORMAT != "nvfp4" and sizes.shape[1] == 1
    tiles = _apart(x, PIECES)
    tile_sizes = _apart(sizes, PIECES)
    operands = ()
    after = tiles[0]
    row, start = rows
    firsts = first_element + row * dk + start
    for p in tl.static_range(PIECES):
        column = p * (K // PIECES)
        e, used, operand = _store_columns(
            tiles[p],
            after,
            tile_sizes[p],
            scale,
            firsts + column,
            draw,
            FORMAT,
            SR,
            QUADS,
            BY_ROW,
        )
        if PARTIAL:
            operand = tl.where(applies, operand, tiles[p])
        after = operand
        operands = operands + (settled(held_as_type(operand, HELD)),)  # noqa: RUF005
        if last:
            y = e * used
            if PARTIAL:
                y = tl.where(applies, y, tiles[p])
            # addresses of a store that happens once are not kept for the whole walk
            width = settled(tl.full((), dk, tl.int32))
            height = settled(tl.full((), dv, tl.int32))
            channel = column + start[:, None] + lane_channels(K // PIECES)[None, :]
            mask = (row < height)[:, None] & (channel < width)
            tl.store(ptr + row[:, None] * width + channel, y, mask=mask)
    held = _together(operands)
    factor = 1.0
    if BY_ROW:
        _, used = block_scales(tl.reshape(sizes, [V]), scale, FORMAT)
        factor = used[:, None]
    elif FORMAT == "nvfp4":
        factor = scale
    if PARTIAL:
        factor = tl.where(applies, factor, 1.0)
    return held, factor
