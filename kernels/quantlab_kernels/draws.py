"""Random words of a state tile: Philox-4x32-10 with the counters of `quantlab.formats.philox`.

key = the 64-bit seed; counter = (element // 4, flush, stream, layer + 2**24 * copy); an element
takes word ``element % 4``, element being the row-major index in (head, dv, dk). When dk is a
multiple of four, neighbours along dk share one call: a tile costs a quarter of its elements.

The generator is written out, since `tl.philox` forms the halves of a product by two instructions
where one 32 x 32 -> 64 bit product does; its draws are the same (tests/kernels/test_draws.py).

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3; constants of
Random123's philox.h.
"""

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

COPY_STRIDE = tl.constexpr(1 << 24)  # counter word 3 = layer + COPY_STRIDE * copy
ROUNDS = tl.constexpr(10)
MULTIPLIER_0 = tl.constexpr(0xD2511F53)
MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
WEYL_0 = tl.constexpr(0x9E3779B9)
WEYL_1 = tl.constexpr(0xBB67AE85)


@triton.jit
def philox(seed, c0, c1, c2, c3):
    """Map counters to words by Philox-4x32-10.

    Args:
        seed: int64 scalar, the bit pattern of the 64-bit key.
        c0: uint32 tensor, as all counter words.
        c1: second word.
        c2: third word.
        c3: fourth word.

    Returns:
        Four uint32 tensors.
    """
    key = seed.to(tl.int64).to(tl.uint64, bitcast=True)
    k0 = key.to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        a = c0.to(tl.uint64) * MULTIPLIER_0
        b = c2.to(tl.uint64) * MULTIPLIER_1
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = b.to(tl.uint32)
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = a.to(tl.uint32)
        k0 = (k0 + WEYL_0).to(tl.uint32)
        k1 = (k1 + WEYL_1).to(tl.uint32)
    return c0, c1, c2, c3


INTERPRETED = tl.constexpr(not isinstance(philox, JITFunction))


@triton.jit
def quad_words(seed, layer_copy, stream, flush, quad):
    """Draw the words of four elements at a time.

    Args:
        seed: see `tile_words`, as all scalars.
        layer_copy: layer + 2**24 * copy.
        stream: global stream id.
        flush: flush index.
        quad: integer tensor, element // 4.

    Returns:
        uint32 with two more axes of 2, in the order of the elements.
    """
    c0 = quad.to(tl.uint32)
    c1 = tl.full(c0.shape, flush, tl.uint32)
    c2 = tl.full(c0.shape, stream, tl.uint32)
    c3 = tl.full(c0.shape, layer_copy, tl.uint32)
    w0, w1, w2, w3 = philox(seed, c0, c1, c2, c3)
    # join appends the fastest axis: [.., i, j], (i, j) = 00, 01, 10, 11 for words 0, 1, 2, 3
    return tl.join(tl.join(w0, w2), tl.join(w1, w3))


@triton.jit
def single_words(seed, layer_copy, stream, flush, element):
    """Draw the word of each element by itself: four times the work. Arguments as `quad_words`."""
    c0 = (element // 4).to(tl.uint32)
    c1 = tl.full(c0.shape, flush, tl.uint32)
    c2 = tl.full(c0.shape, stream, tl.uint32)
    c3 = tl.full(c0.shape, layer_copy, tl.uint32)
    w0, w1, w2, w3 = philox(seed, c0, c1, c2, c3)
    word = element % 4
    return tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))


@triton.jit
def tile_words(
    seed,
    layer_copy,
    stream,
    flush,
    first_element,
    dk,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    QUADS: tl.constexpr,
):
    """Draw the words of one head's state.

    Args:
        seed: int64 scalar, the bit pattern of the 64-bit seed.
        layer_copy: layer + 2**24 * copy.
        stream: global stream id.
        flush: flush index, 0 = the store after the prompt.
        first_element: head * dv * dk.
        dk: elements of one state row.
        BLOCK_V: padded rows of the tile.
        BLOCK_K: padded columns of the tile.
        QUADS: dk is a multiple of four.

    Returns:
        [BLOCK_V, BLOCK_K] uint32; words beyond dv or dk are of no meaning.
    """
    row = tl.arange(0, BLOCK_V)[:, None]
    if QUADS:
        quad = first_element // 4 + row * (dk // 4) + tl.arange(0, BLOCK_K // 4)[None, :]
        return tl.reshape(quad_words(seed, layer_copy, stream, flush, quad), [BLOCK_V, BLOCK_K])
    else:
        element = first_element + row * dk + tl.arange(0, BLOCK_K)[None, :]
        return single_words(seed, layer_copy, stream, flush, element)


@triton.jit
def lane_channels(BLOCK_K: tl.constexpr):
    """Order channels so that a lane of a tensor core's result holds four neighbours.

    Such a lane holds columns 2 c and 2 c + 1 of every eight (c its place among four lanes). With
    column 16 m + 8 h + 2 c + b standing for channel 16 m + 4 c + 2 h + b, its four columns of 16
    are four channels in a row, which share a Philox call; groups of 16 stay together.

    Returns:
        int32 [BLOCK_K], the channel of each column.
    """
    column = tl.arange(0, BLOCK_K)
    within = column % 16
    return column - within + (within // 2 % 4) * 4 + (within // 8) * 2 + within % 2


@triton.jit
def lane_order(x):
    """Put columns of [R, K] FP32 from the order of channels into that of `lane_channels`."""
    R: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    x = tl.reshape(x, [R, K // 16, 4, 2, 2])  # [.., c, h, b]
    return tl.reshape(tl.trans(x, 0, 1, 3, 2, 4), [R, K])


@triton.jit
def lane_words(after, firsts, draw, QUADS: tl.constexpr):
    """Draw what `tile_words` does, columns in the order of `lane_channels`.

    Args:
        after: [V, K] FP32 in the layout of what is to be rounded: a lane draws the words of its own
            elements, and not before this is there.
        firsts: int32 [V], the first element of each row.
        draw: seed, layer_copy, stream and flush as for `tile_words`.
        QUADS: dk, and so all of firsts, are multiples of four.

    Returns:
        [V, K] uint32.
    """
    seed, layer_copy, stream, flush = draw
    V: tl.constexpr = after.shape[0]
    K: tl.constexpr = after.shape[1]
    if QUADS:
        quad = (firsts // 4)[:, None] + tl.arange(0, K // 4)[None, :]
        if not INTERPRETED:
            # the sign of a square: 0, which a compiler cannot know, in the layout of a lane's quads
            # (of NaN it may be another; what is not finite needs no draws)
            places = tl.trans(tl.reshape(after, [V, K // 16, 2, 4, 2]), 0, 1, 3, 4, 2)
            corner, _ = tl.split(places)
            corner, _ = tl.split(corner)
            corner = tl.reshape(corner, [V, K // 4])
            quad += (corner * corner).to(tl.int32, bitcast=True) >> 31
        c0 = quad.to(tl.uint32)
        c1 = tl.full(c0.shape, flush, tl.uint32)
        c2 = tl.full(c0.shape, stream, tl.uint32)
        c3 = tl.full(c0.shape, layer_copy, tl.uint32)
        w0, w1, w2, w3 = philox(seed, c0, c1, c2, c3)
        # [.., b, h], words 2 h + b
        words = tl.join(tl.join(w0, w1), tl.join(w2, w3))
        words = tl.reshape(words, [V, K // 16, 4, 2, 2])
        return tl.reshape(tl.trans(words, 0, 1, 4, 2, 3), [V, K])
    else:
        element = firsts[:, None] + lane_channels(K)[None, :]
        return single_words(seed, layer_copy, stream, flush, element)
