"""A folded state stored and read back as the next window's products take it.

The state of one head lies in parts of its rows (PARTS tiles [V, BLOCK_K], columns in the order of
`draws.lane_channels`). Beside the values of the format, kept in FP32, come operands: numbers with
few significant bits, exact as BF16 parts, that are the values but for a factor per row. NVFP4:
element times block scale, the factor is the state scale; FP8 and integers: the element, the factor
is its block's scale; FP16: the value, in two parts; FP32: in three.

Rounding points: those of stores.py. The values are bit for bit what `store_and_load` gives; an
NVFP4 operand times its factor may differ from its value by the rounding of that product.
"""

import triton
import triton.language as tl

from quantlab_kernels.draws import lane_words
from quantlab_kernels.parts import split_parts
from quantlab_kernels.rounding import (
    BF16_TO_INF_BITS,
    FP16_TO_INF_BITS,
    INF_BITS,
    abs_bits,
    round_bf16,
    round_fp16,
    with_sign_of,
)
from quantlab_kernels.stores import (
    block_scales,
    largest_sound,
    scaled_elements,
    state_blocks,
    state_scale,
)


@triton.jit
def sizes_of(x, FORMAT: tl.constexpr):
    """Find the bits of the largest magnitudes: of scale blocks, of rows where there are none."""
    if FORMAT == "fp32" or FORMAT == "fp16" or FORMAT == "bf16":
        return tl.max(abs_bits(x), axis=1)
    else:
        return tl.max(abs_bits(state_blocks(x, FORMAT)), axis=1)


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
    first_element,
    draw,
    FORMAT: tl.constexpr,
    SR: tl.constexpr,
    QUADS: tl.constexpr,
    BY_ROW: tl.constexpr,
):
    """Round some columns of a part: values, and what operands are made of."""
    words = x
    if SR:
        words = lane_words(after, first_element, draw, QUADS)
    if FORMAT == "fp32":
        return x, x
    elif FORMAT == "fp16":
        y = round_fp16(x, words, SR)
        return y, y
    elif FORMAT == "bf16":
        y = round_bf16(x, words, SR)
        return y, y
    else:
        blocks = state_blocks(x, FORMAT)
        if SR:
            words = tl.reshape(words, blocks.shape)
        stored, used = block_scales(tl.reshape(sizes, [blocks.shape[0]]), scale, FORMAT)
        e = with_sign_of(scaled_elements(blocks, used, words, FORMAT, SR), blocks)
        if not (FORMAT == "fp8" or FORMAT == "nvfp4"):
            e += 0.0  # no minus zero
        y = tl.reshape(e * used[:, None], x.shape)
        if FORMAT == "nvfp4":
            return y, tl.reshape(e * stored[:, None], x.shape)
        elif BY_ROW:
            return y, tl.reshape(e, x.shape)
        else:
            return y, y


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
    first_element,
    draw,
    applies,
    FORMAT: tl.constexpr,
    SR: tl.constexpr,
    QUADS: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Round a part of a state to FORMAT.

    It goes a few columns at a time, so that only their draws and steps on the way take registers.

    Args:
        x: [V, BLOCK_K] FP32, zero outside the state.
        sizes: of this part, see `sizes_of`.
        scale: of the state, see `whole_scale`.
        first_element: of this part.
        draw: seed, layer + 2**24 * copy, stream, flush, dk: see `draws.tile_words`.
        applies: whether the head is stored in FORMAT, else in FP32; looked at if PARTIAL.
        FORMAT: "fp32", "fp16", "bf16", "fp8", "nvfp4", "int8", "int6" or "int4".
        SR: stochastic rounding.
        QUADS: dk is a multiple of four.
        PARTIAL: some heads are not.

    Returns:
        values [V, BLOCK_K] FP32, their operands (a tuple of BF16 parts), and the operands' factor,
        a scalar or [V, 1].
    """
    V: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    PIECES: tl.constexpr = 1 if (K <= 32 or FORMAT == "fp32") else (K // 32 if K < 256 else 8)
    sizes = tl.reshape(sizes, [V, sizes.shape[0] // V])
    SCALED: tl.constexpr = not (FORMAT == "fp32" or FORMAT == "fp16" or FORMAT == "bf16")
    BY_ROW: tl.constexpr = SCALED and FORMAT != "nvfp4" and sizes.shape[1] == 1
    tiles = _apart(x, PIECES)
    tile_sizes = _apart(sizes, PIECES)
    values = ()
    operands = ()
    after = tiles[0]
    for p in tl.static_range(PIECES):
        first = first_element + p * (K // PIECES)
        y, operand = _store_columns(
            tiles[p], after, tile_sizes[p], scale, first, draw, FORMAT, SR, QUADS, BY_ROW
        )
        after = y
        if PARTIAL:
            y = tl.where(applies, y, tiles[p])
            operand = tl.where(applies, operand, tiles[p])
        values = values + (y,)  # noqa: RUF005
        operands = operands + (operand,)  # noqa: RUF005
    y = _together(values)
    operand = _together(operands)
    factor = 1.0
    if BY_ROW:
        _, used = block_scales(tl.reshape(sizes, [V]), scale, FORMAT)
        factor = used[:, None]
    elif FORMAT == "nvfp4":
        factor = scale
    if PARTIAL:
        # further parts of what has fewer are 0, and so are their products
        return y, split_parts(operand, 3), tl.where(applies, factor, 1.0)
    elif FORMAT == "fp32" or (SCALED and not (BY_ROW or FORMAT == "nvfp4")):
        return y, split_parts(operand, 3), factor
    elif FORMAT == "fp16":
        return y, split_parts(operand, 2), factor
    else:
        return y, split_parts(operand, 1), factor
