"""States in device memory as codes: loading tiles of them as FP32, rounding and storing tiles.

Layout of one slot, heads and rows contiguous, slots at any stride:

    fp32, fp16   [H, dv, dk]        values
    bf16         [H, dv, dk]        bit patterns, int16 (the interpreter's BF16 casts are wrong)
    fp8          [H, dv, dk]        E4M3 codes, uint8;  scales [H, dv] FP32, one per row (dk <= 128)
    int8         [H, dv, dk]        two's complement, uint8;  scales as fp8
    nvfp4        [H, dv, dk / 2]    E2M1 codes, two to a byte, the first in the low nibble;
                                    scales [H, dv, dk / 16] E4M3 codes;  state_scale [H] FP32
    int4         [H, dv, dk / 2]    two's complement, packed likewise;  scales as fp8

Steps take the same codes as int32 words (decode_products.py).

Rounding points: `store_tile` alone, as `quantlab.formats.encode` (scales FP32, divisions correctly
rounded). Launch it with `enable_fp_fusion=False`.
Not covered: dk that is not 16 * 2**n <= 128, other scales.
"""

import triton
import triton.language as tl

from quantlab_kernels.codes import (
    block_codes,
    e4m3_size_codes,
    e4m3_size_values,
    scaled_values,
    unpacked_pairs,
)
from quantlab_kernels.decode_products import fetched_rows
from quantlab_kernels.draws import quad_words
from quantlab_kernels.rounding import (
    FP16_TO_INF_BITS,
    INF_BITS,
    abs_bits,
    largest_size,
    round_bf16,
)
from quantlab_kernels.stores import block_scales, largest_sound, state_scale, stored_fp16

NVFP4_BLOCK = tl.constexpr(16)


@triton.jit
def load_state(
    codes_ptr,
    scales_ptr,
    state_scale_ptr,
    row0,
    state,
    rows_left,
    FORMAT: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DK: tl.constexpr,
    WIDTH: tl.constexpr,
    WARPS: tl.constexpr = 0,
):
    """Load and decode state rows, zero beyond `rows_left`.

    Args:
        codes_ptr: in the format's own type, bytes for formats narrower than two.
        scales_ptr: scales, if the format has any.
        state_scale_ptr: state scales, likewise.
        row0: int64 index of the first row, counted over slots and heads in rows of the pool.
        state: int64 index of the state, counted likewise.
        rows_left: rows of this head from row0 on; what lies beyond is not read.
        FORMAT: of the module's docstring.
        BLOCK_V: rows.
        DK: elements of a row.
        WIDTH: elements of a row that lie side by side in a warp; packed formats: DK.
        WARPS: of the program, to have rows in the order of `fetched_rows`; 0 for their own.

    Returns:
        [BLOCK_V, DK / WIDTH, WIDTH] FP32.
    """
    row = fetched_rows(BLOCK_V, WARPS, WARPS > 0)
    inside = row < rows_left
    PARTS: tl.constexpr = DK // WIDTH
    if FORMAT == "nvfp4" or FORMAT == "int4":
        byte = tl.arange(0, DK // 2)
        packed = tl.load(
            codes_ptr + row0 * (DK // 2) + row[:, None] * (DK // 2) + byte[None, :],
            mask=inside[:, None],
            other=0,
        )
        codes = tl.reshape(unpacked_pairs(packed.to(tl.int32)), [BLOCK_V, PARTS, WIDTH])
    else:
        part = tl.arange(0, PARTS)
        column = tl.arange(0, WIDTH)
        place = row[:, None, None] * DK + part[None, :, None] * WIDTH + column[None, None, :]
        codes = tl.load(codes_ptr + row0 * DK + place, mask=inside[:, None, None], other=0)
    if FORMAT == "fp32" or FORMAT == "fp16":
        return codes.to(tl.float32)
    elif FORMAT == "bf16":
        return (codes.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif FORMAT == "nvfp4":
        BLOCKS: tl.constexpr = DK // NVFP4_BLOCK
        block = tl.arange(0, BLOCKS)
        scale = tl.load(
            scales_ptr + row0 * BLOCKS + row[:, None] * BLOCKS + block[None, :],
            mask=inside[:, None],
            other=0,
        )
        # the two scales are multiplied first, as the format says
        scale = e4m3_size_values(scale) * tl.load(state_scale_ptr + state)
        values = tl.reshape(scaled_values(codes, FORMAT), [BLOCK_V, BLOCKS, NVFP4_BLOCK])
        return tl.reshape(values * scale[:, :, None], [BLOCK_V, PARTS, WIDTH])
    else:
        scale = tl.load(scales_ptr + row0 + row, mask=inside, other=0.0)
        return scaled_values(codes.to(tl.int32), FORMAT) * scale[:, None, None]


@triton.jit
def row_product(S, x):
    """Form S x: [BLOCK_V, PARTS, WIDTH] and [PARTS, WIDTH] to [BLOCK_V]."""
    return tl.sum(tl.sum(S * x[None, :, :], axis=1), axis=1)


@triton.jit
def _largest(x):
    """Take the bits of each row's largest magnitude, above those of inf with a NaN."""
    rows = tl.reduce(tl.reduce(x, 2, largest_size), 1, largest_size)
    return abs_bits(rows)


@triton.jit
def store_tile(
    x,
    codes_ptr,
    scales_ptr,
    state_scale_ptr,
    row0,
    state,
    rows_left,
    seed,
    layer_copy,
    stream,
    flush,
    first_element,
    FORMAT: tl.constexpr,
    SR: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DK: tl.constexpr,
    WIDTH: tl.constexpr,
    WARPS: tl.constexpr = 0,
):
    """Round state rows and store their codes and scales.

    Args:
        x: [BLOCK_V, DK / WIDTH, WIDTH] FP32; nvfp4: the whole state, zero beyond its rows.
        codes_ptr: as `load_state`'s, like all up to rows_left.
        scales_ptr: likewise.
        state_scale_ptr: likewise.
        row0: likewise.
        state: likewise.
        rows_left: likewise.
        seed: see `quantlab_kernels.draws.tile_words`, as all scalars from here on.
        layer_copy: layer + 2**24 * copy.
        stream: global stream id.
        flush: number of the store.
        first_element: index in the state [H, dv, dk] of x's first element.
        FORMAT: of the module's docstring.
        SR: stochastic rounding.
        BLOCK_V: rows.
        DK: columns.
        WIDTH: of x.
        WARPS: as `load_state`'s.

    Returns:
        [BLOCK_V] bits of each row's largest magnitude: INF_BITS or more where what is stored is
        not finite.
    """
    row = fetched_rows(BLOCK_V, WARPS, WARPS > 0)
    inside = row < rows_left
    PARTS: tl.constexpr = DK // WIDTH
    part = tl.arange(0, PARTS)
    column = tl.arange(0, WIDTH)
    place = row[:, None, None] * DK + part[None, :, None] * WIDTH + column[None, None, :]
    place += row0 * DK
    mask = inside[:, None, None]
    if SR:
        quad = part[:, None] * (WIDTH // 4) + tl.arange(0, WIDTH // 4)[None, :]
        quad = first_element // 4 + row[:, None, None] * (DK // 4) + quad[None, :, :]
        words = quad_words(seed, layer_copy, stream, flush, quad)
        words = tl.reshape(words, [BLOCK_V, PARTS, WIDTH])
    else:
        words = x
    if FORMAT == "fp32":
        tl.store(codes_ptr + place, x, mask=mask)
        return _largest(x)
    elif FORMAT == "fp16":
        stored = stored_fp16(x, words, SR)
        tl.store(codes_ptr + place, stored, mask=mask)
        largest = _largest(x)
        return tl.where(largest < FP16_TO_INF_BITS, largest, INF_BITS)
    elif FORMAT == "bf16":
        stored = round_bf16(x, words, SR)
        bits = stored.to(tl.int32, bitcast=True) >> 16
        tl.store(codes_ptr + place, bits.to(tl.int16), mask=mask)
        return _largest(stored)
    BLOCK: tl.constexpr = NVFP4_BLOCK if FORMAT == "nvfp4" else DK
    BLOCKS: tl.constexpr = DK // BLOCK
    blocks = tl.reshape(x, [BLOCK_V * BLOCKS, BLOCK])
    words = tl.reshape(words, [BLOCK_V * BLOCKS, BLOCK])
    bits = abs_bits(tl.reduce(blocks, 1, largest_size))
    whole = state_scale(largest_sound(bits)) if FORMAT == "nvfp4" else 1.0
    scale, used = block_scales(bits, whole, FORMAT)
    codes = block_codes(blocks, used, words, FORMAT, SR)
    if FORMAT == "nvfp4" or FORMAT == "int4":
        low, high = tl.split(tl.reshape(codes, [BLOCK_V, DK // 2, 2]))
        byte = tl.arange(0, DK // 2)
        tl.store(
            codes_ptr + row0 * (DK // 2) + row[:, None] * (DK // 2) + byte[None, :],
            ((low >> 28) | (high >> 28 << 4)).to(tl.uint8),
            mask=inside[:, None],
        )
    else:
        codes = tl.reshape(codes >> 24, [BLOCK_V, PARTS, WIDTH])
        tl.store(codes_ptr + place, codes.to(tl.uint8), mask=mask)
    scale = tl.reshape(scale, [BLOCK_V, BLOCKS])
    place = row0 * BLOCKS + row[:, None] * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    if FORMAT == "nvfp4":
        code = e4m3_size_codes(scale).to(tl.uint8)
        tl.store(scales_ptr + place, code, mask=inside[:, None])
        tl.store(state_scale_ptr + state, whole, mask=rows_left > 0)
    else:
        tl.store(scales_ptr + place, scale, mask=inside[:, None])
    return tl.max(tl.reshape(bits, [BLOCK_V, BLOCKS]), axis=1)


@triton.jit
def mark_diverged(diverged_ptr, slot, flush, largest):
    """Note the first store of a slot that is not finite; `largest` is of `store_tile`.

    Programs and layers of one step write the same number, so their order does not matter.
    """
    place = diverged_ptr + slot + tl.zeros(largest.shape, tl.int32)
    bad = largest >= INF_BITS
    unknown = tl.load(place, mask=bad, other=0) < 0
    tl.store(place, flush, mask=unknown)


@triton.jit(do_not_specialize=["seed", "layer_copy"])
def put_states_kernel(
    x_ptr,
    slots_ptr,
    streams_ptr,
    diverged_ptr,
    codes_ptr,
    scales_ptr,
    state_scale_ptr,
    seed,
    layer_copy,
    flush,
    heads,
    dv,
    slot_states,
    FORMAT: tl.constexpr,
    SR: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DK: tl.constexpr,
):
    """One program per (head, row): its whole state."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        value = tl.arange(0, BLOCK_V)
        column = tl.arange(0, DK)
        start = (row.to(tl.int64) * heads + head) * dv * DK
        place = start + value[:, None, None] * DK + column[None, None, :]
        x = tl.load(x_ptr + place, mask=(value < dv)[:, None, None], other=0.0)
        state = slot * slot_states + head
        largest = store_tile(
            x,
            codes_ptr,
            scales_ptr,
            state_scale_ptr,
            state * dv,
            state,
            dv,
            seed,
            layer_copy,
            tl.load(streams_ptr + slot),
            flush,
            head * dv * DK,
            FORMAT,
            SR,
            BLOCK_V,
            DK,
            DK,
        )
        mark_diverged(diverged_ptr, slot, flush, largest)
