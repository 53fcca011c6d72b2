"""Random words of a state tile: Philox-4x32-10 with the counters of `quantlab.formats.philox`.

key = the 64-bit seed; counter = (element // 4, flush, stream, layer + 2**24 * copy); an element
takes word ``element % 4``, element being the row-major index in (head, dv, dk). When dk is a
multiple of four, neighbours along dk share one call: a tile costs a quarter of its elements.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3.
Traps: an int64 counter silently turns `tl.philox` into Philox-4x64, and a scalar counter at or
above 2**31 does not compile; all four are uint32 tensors here.
"""

import triton
import triton.language as tl

COPY_STRIDE = tl.constexpr(1 << 24)  # counter word 3 = layer + COPY_STRIDE * copy


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
    if QUADS:
        row = tl.arange(0, BLOCK_V)[:, None]
        quad = tl.arange(0, BLOCK_K // 4)[None, :]
        c0 = (first_element // 4 + row * (dk // 4) + quad).to(tl.uint32)
        c1 = tl.full(c0.shape, flush, tl.uint32)
        c2 = tl.full(c0.shape, stream, tl.uint32)
        c3 = tl.full(c0.shape, layer_copy, tl.uint32)
        w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c3)
        # join appends the fastest axis: [.., i, j], (i, j) = 00, 01, 10, 11 for words 0, 1, 2, 3
        pairs = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        return tl.reshape(pairs, [BLOCK_V, BLOCK_K])
    else:
        row = tl.arange(0, BLOCK_V)[:, None]
        col = tl.arange(0, BLOCK_K)[None, :]
        element = first_element + row * dk + col
        c0 = (element // 4).to(tl.uint32)
        c1 = tl.full(c0.shape, flush, tl.uint32)
        c2 = tl.full(c0.shape, stream, tl.uint32)
        c3 = tl.full(c0.shape, layer_copy, tl.uint32)
        w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c3)
        word = element % 4
        return tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
