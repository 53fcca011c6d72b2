"""States in device memory as codes: loading tiles of them, products without decoding to a tile.

Layout of one slot, heads and rows contiguous, slots at any stride:

    fp32, fp16   [H, dv, dk]        values
    bf16         [H, dv, dk]        bit patterns, int16 (the interpreter's BF16 casts are wrong)
    fp8          [H, dv, dk]        E4M3 codes, uint8;  scales [H, dv] FP32, one per row (dk <= 128)
    nvfp4        [H, dv, dk / 2]    E2M1 codes, two to a byte, the first in the low nibble;
                                    scales [H, dv, dk / 16] E4M3 codes;  state_scale [H] FP32

A narrow float becomes FP32 by moving its bits: sign to bit 31, exponent and significand to the
lowest exponent bit and the top of the significand. That is the value times 2**-120 (E4M3) or
2**-126 (E2M1), subnormals included, since FP32's own subnormals line up; a power of two on the
vector it meets puts it right. Three integer operations an element on packed words, no table.
The inverse, for a value already on the grid, is a product with that power and a shift.

Rounding points: `store_tile` alone, as `quantlab.formats.encode` (scales FP32, divisions correctly
rounded). Launch it with `enable_fp_fusion=False`.
Not covered: dk that is not 16 * 2**n <= 128, other scales.
"""

import triton
import triton.language as tl

from quantlab_kernels.decode_products import fetched_rows
from quantlab_kernels.division import divide, reciprocal
from quantlab_kernels.draws import quad_words
from quantlab_kernels.rounding import (
    E2M1_MAX,
    E4M3_MAX,
    INF_BITS,
    abs_bits,
    largest_size,
    round_bf16,
    round_fp16,
    round_magnitude,
    with_sign_of,
)
from quantlab_kernels.stores import FP8_CAP, NVFP4_STATE_CAP

NVFP4_BLOCK = tl.constexpr(16)
E4M3_NAN = tl.constexpr(0x7F)
E4M3_UP = tl.constexpr(2.0**120)  # undoes the move of E4M3 bits into FP32
E4M3_DOWN = tl.constexpr(2.0**-120)
E2M1_DOWN = tl.constexpr(2.0**-126)
# The same in two halves, either side of a sum, so that neither overflows nor loses digits.
E4M3_HALF_UP = tl.constexpr(2.0**60)
E2M1_HALF_UP = tl.constexpr(2.0**63)
E4M3_FIELD = tl.constexpr(-0x78100000)  # 0x87F00000: sign, exponent and significand as moved
E2M1_FIELD = tl.constexpr(-0x7E400000)  # 0x81C00000


@triton.jit
def e4m3_scale(code):
    """Decode block scales, uint8 E4M3 codes, to FP32; code 7F is NaN."""
    value = (code.to(tl.int32) << 20).to(tl.float32, bitcast=True) * E4M3_UP
    return tl.where(code == E4M3_NAN, float("nan"), value)


@triton.jit
def fetch_tile(
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
):
    """Load BLOCK_V state rows as they are stored, in the shape that `tile_products` takes.

    Nothing is computed with the values here, so the loads stay in flight until they are needed.

    Args:
        codes_ptr: fp8 and nvfp4: as int32 words of 4 or 8 codes.
        scales_ptr: scales, if the format has any.
        state_scale_ptr: state scales, likewise.
        row0: int64 index of the first row, counted over slots and heads in rows of the pool.
        state: int64 index of the state, counted likewise.
        rows_left: rows of this head from row0 on; what lies beyond is not read.
        FORMAT: "fp32", "fp16", "bf16", "fp8" or "nvfp4".
        BLOCK_V: rows.
        DK: elements of a row.
        WIDTH: fp32, fp16, bf16: elements of a row that lie side by side in a warp.

    Returns:
        codes ([BLOCK_V, DK / WIDTH, WIDTH]; fp8 [BLOCK_V, DK / 4]; nvfp4 [DK / 16, BLOCK_V, 2]),
        scales ([BLOCK_V]; nvfp4 [DK / 16, BLOCK_V]; else 1), state scale (else 1).

    Triton gives lanes to the contiguous axis first and then to the first one. These axes are in the
    order that leaves a lane 16 or so columns of few rows: sums along a row are then mostly its own.
    """
    row = tl.arange(0, BLOCK_V)
    inside = row < rows_left
    if FORMAT == "fp8":
        word = tl.arange(0, DK // 4)
        codes = tl.load(
            codes_ptr + row0 * (DK // 4) + row[:, None] * (DK // 4) + word[None, :],
            mask=inside[:, None],
            other=0,
        )
        scales = tl.load(scales_ptr + row0 + row, mask=inside, other=0.0)
        return codes, scales, 1.0
    elif FORMAT == "nvfp4":
        BLOCKS: tl.constexpr = DK // NVFP4_BLOCK
        block = tl.arange(0, BLOCKS)
        word = tl.arange(0, 2)
        place = row[None, :, None] * (DK // 8) + block[:, None, None] * 2 + word[None, None, :]
        codes = tl.load(codes_ptr + row0 * (DK // 8) + place, mask=inside[None, :, None], other=0)
        scales = tl.load(
            scales_ptr + row0 * BLOCKS + row[None, :] * BLOCKS + block[:, None],
            mask=inside[None, :],
            other=0,
        )
        return codes, scales, tl.load(state_scale_ptr + state, mask=rows_left > 0, other=0.0)
    else:
        part = tl.arange(0, DK // WIDTH)
        column = tl.arange(0, WIDTH)
        place = row[:, None, None] * DK + part[None, :, None] * WIDTH + column[None, None, :]
        codes = tl.load(codes_ptr + row0 * DK + place, mask=inside[:, None, None], other=0)
        return codes, 1.0, 1.0


@triton.jit
def _quarters(x):
    """Split [.., 2, 2] into its four last-axes elements, in row-major order."""
    even, odd = tl.split(x)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def as_multiplier(x, FORMAT: tl.constexpr, DK: tl.constexpr, WIDTH: tl.constexpr):
    """Bring a query or key [DK] FP32 into the shapes that meet a fetched tile: a tuple, by code."""
    if FORMAT == "fp8":
        return _quarters(tl.reshape(x * E4M3_HALF_UP, [DK // 4, 2, 2]))
    elif FORMAT == "nvfp4":
        halves = tl.reshape(x * E2M1_HALF_UP, [DK // NVFP4_BLOCK, 2, 2, 2, 2])
        even, odd = tl.split(halves)
        x0, x2, x4, x6 = _quarters(even)
        x1, x3, x5, x7 = _quarters(odd)
        return x0, x1, x2, x3, x4, x5, x6, x7
    else:
        return (tl.reshape(x, [DK // WIDTH, WIDTH]),)


@triton.jit
def plain_values(codes, FORMAT: tl.constexpr):
    """Widen elements that are stored one by one."""
    if FORMAT == "bf16":
        return (codes.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return codes.to(tl.float32)


@triton.jit
def tile_product(codes, scales, state_scale, x, FORMAT: tl.constexpr):
    """Form S x for one vector.

    Args:
        codes: of `fetch_tile`, as both scales.
        scales: likewise.
        state_scale: likewise.
        x: of `as_multiplier`.
        FORMAT: as there.

    Returns:
        [BLOCK_V] FP32.
    """
    if FORMAT == "fp8":
        products = tl.zeros(codes.shape, dtype=tl.float32)
        for i in tl.static_range(4):
            bits = ((codes << (24 - 8 * i)) >> 4) & E4M3_FIELD
            products += bits.to(tl.float32, bitcast=True) * x[i][None, :]
        return tl.sum(products, axis=1) * scales * E4M3_HALF_UP
    elif FORMAT == "nvfp4":
        products = tl.zeros(codes.shape, dtype=tl.float32)
        for i in tl.static_range(8):
            bits = ((codes << (28 - 4 * i)) >> 6) & E2M1_FIELD
            products += bits.to(tl.float32, bitcast=True) * x[i][:, None, :]
        blocks = tl.sum(products, axis=2) * e4m3_scale(scales)
        return tl.sum(blocks, axis=0) * (state_scale * E2M1_HALF_UP)
    else:
        products = plain_values(codes, FORMAT) * x[0][None, :, :]
        return tl.sum(tl.sum(products, axis=1), axis=1)


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
    """Load and decode state rows, zero beyond `rows_left`; see `fetch_tile`.

    Args:
        codes_ptr: in the format's own type, bytes for fp8 and nvfp4.
        scales_ptr: as there, like all others.
        state_scale_ptr: likewise.
        row0: likewise.
        state: likewise.
        rows_left: likewise.
        FORMAT: likewise.
        BLOCK_V: likewise.
        DK: likewise.
        WIDTH: DK where elements are less than two bytes wide, but for WARPS.
        WARPS: of the program, to have rows in the order of `fetched_rows`; 0 for their own.

    Returns:
        [BLOCK_V, DK / WIDTH, WIDTH] FP32.
    """
    row = fetched_rows(BLOCK_V, WARPS, WARPS > 0)
    inside = row < rows_left
    PARTS: tl.constexpr = DK // WIDTH
    if FORMAT == "nvfp4":
        byte = tl.arange(0, DK // 2)
        packed = tl.load(
            codes_ptr + row0 * (DK // 2) + row[:, None] * (DK // 2) + byte[None, :],
            mask=inside[:, None],
            other=0,
        ).to(tl.int32)
        codes = tl.reshape(tl.join(packed & 15, packed >> 4), [BLOCK_V, DK])
        bits = ((codes << 28) >> 6) & E2M1_FIELD
        BLOCKS: tl.constexpr = DK // NVFP4_BLOCK
        block = tl.arange(0, BLOCKS)
        scale = tl.load(
            scales_ptr + row0 * BLOCKS + row[:, None] * BLOCKS + block[None, :],
            mask=inside[:, None],
            other=0,
        )
        # the two scales are multiplied first, as the format says; 2**126 in two exact steps
        scale = e4m3_scale(scale) * tl.load(state_scale_ptr + state)
        values = bits.to(tl.float32, bitcast=True) * E2M1_HALF_UP * E2M1_HALF_UP
        values = tl.reshape(values, [BLOCK_V, BLOCKS, NVFP4_BLOCK]) * scale[:, :, None]
        return tl.reshape(values, [BLOCK_V, PARTS, WIDTH])
    else:
        part = tl.arange(0, PARTS)
        column = tl.arange(0, WIDTH)
        place = row[:, None, None] * DK + part[None, :, None] * WIDTH + column[None, None, :]
        codes = tl.load(codes_ptr + row0 * DK + place, mask=inside[:, None, None], other=0)
        if FORMAT == "fp8":
            bits = ((codes.to(tl.int32) << 24) >> 4) & E4M3_FIELD
            scale = tl.load(scales_ptr + row0 + row, mask=inside, other=0.0)
            return bits.to(tl.float32, bitcast=True) * E4M3_UP * scale[:, None, None]
        else:
            return plain_values(codes, FORMAT)


@triton.jit
def row_product(S, x):
    """Form S x: [BLOCK_V, PARTS, WIDTH] and [PARTS, WIDTH] to [BLOCK_V]."""
    return tl.sum(tl.sum(S * x[None, :, :], axis=1), axis=1)


@triton.jit
def _rounded(y, words, QMAX: tl.constexpr, MAN: tl.constexpr, EMIN: tl.constexpr, SR: tl.constexpr):
    y = tl.minimum(tl.maximum(y, -QMAX), QMAX)
    return with_sign_of(round_magnitude(y, words, MAN, EMIN, SR), y)


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
        FORMAT: "fp32", "fp16", "bf16", "fp8" or "nvfp4".
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
        stored = round_fp16(x, words, SR)
        tl.store(codes_ptr + place, stored.to(tl.float16), mask=mask)
        return _largest(stored)
    elif FORMAT == "bf16":
        stored = round_bf16(x, words, SR)
        bits = stored.to(tl.int32, bitcast=True) >> 16
        tl.store(codes_ptr + place, bits.to(tl.int16), mask=mask)
        return _largest(stored)
    elif FORMAT == "fp8":
        bits = tl.max(tl.max(abs_bits(x), axis=1), axis=1)
        scale = tl.minimum(tl.div_rn(bits.to(tl.float32, bitcast=True), E4M3_MAX), FP8_CAP)
        scale = tl.where(scale == 0.0, 1.0, scale)
        scale = tl.where(bits >= INF_BITS, float("nan"), scale)
        y = divide(x, reciprocal(scale)[:, None, None])
        y = _rounded(y, words, E4M3_MAX, 3, -6, SR) * E4M3_DOWN
        code = y.to(tl.int32, bitcast=True) >> 20
        code = (code & 0x7F) | ((code >> 4) & 0x80)  # the sign from bit 11 to bit 7
        tl.store(codes_ptr + place, code.to(tl.uint8), mask=mask)
        tl.store(scales_ptr + row0 + row, scale, mask=inside)
        return bits
    else:
        BLOCKS: tl.constexpr = DK // NVFP4_BLOCK
        blocks = tl.reshape(x, [BLOCK_V, BLOCKS, NVFP4_BLOCK])
        bits = tl.max(abs_bits(blocks), axis=2)
        bad = bits >= INF_BITS
        amax = bits.to(tl.float32, bitcast=True)
        largest = tl.max(tl.max(tl.where(bad, 0.0, amax), axis=1), axis=0)
        whole = tl.div_rn(largest, E4M3_MAX * E2M1_MAX)
        whole = tl.minimum(tl.where(whole == 0.0, 1.0, whole), NVFP4_STATE_CAP)
        scale = tl.minimum(tl.div_rn(tl.div_rn(amax, E2M1_MAX), whole), E4M3_MAX)
        scale = round_magnitude(tl.where(bad, 0.0, scale), scale, 3, -6, False)
        divisor = scale * whole
        divisor = tl.where(divisor == 0.0, float("inf"), divisor)  # it underflowed: a zero block
        divisor = tl.where(bad, float("nan"), divisor)
        words = tl.reshape(words, [BLOCK_V, BLOCKS, NVFP4_BLOCK]) if SR else blocks
        y = _rounded(tl.div_rn(blocks, divisor[:, :, None]), words, E2M1_MAX, 1, 0, SR)
        code = (y * E2M1_DOWN).to(tl.int32, bitcast=True) >> 22
        code = (code & 7) | ((code >> 6) & 8)  # the sign from bit 9 to bit 3
        low, high = tl.split(tl.reshape(code, [BLOCK_V, DK // 2, 2]))
        byte = tl.arange(0, DK // 2)
        tl.store(
            codes_ptr + row0 * (DK // 2) + row[:, None] * (DK // 2) + byte[None, :],
            (low | (high << 4)).to(tl.uint8),
            mask=inside[:, None],
        )
        block = tl.arange(0, BLOCKS)
        code = (scale * E4M3_DOWN).to(tl.int32, bitcast=True) >> 20
        tl.store(
            scales_ptr + row0 * BLOCKS + row[:, None] * BLOCKS + block[None, :],
            tl.where(bad, E4M3_NAN, code).to(tl.uint8),
            mask=inside[:, None],
        )
        tl.store(state_scale_ptr + state, whole, mask=rows_left > 0)
        return tl.max(bits, axis=1)


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
