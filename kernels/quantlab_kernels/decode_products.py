"""Stored states times queries and keys, without decoding the states to memory or to FP32.

A state of two bytes an element or less is met by matrix units. Codes are fetched as int32 words;
each word becomes pairs of 16-bit floats by shifts and masks, exactly, which are the operand as they
stand: a lane holds 16 consecutive bytes of a row, and rows and columns are numbered so that those
are the elements that the matrix instruction expects of it. Columns of q and k are fetched in that
order. q and k themselves are split into three 16-bit parts that add up to them (BF16 exactly, FP16
to 2**-38 of the largest); parts times elements are exact, sums are FP32.

A 16-bit pattern with the fields of a narrower float at its lowest exponent bits is the value times
a power of two, subnormals included: 2**-8 for E4M3, 2**-14 for E2M1. NVFP4's block scales are
multiplied in FP16: of six significant bits between 2**-18 and 10.5, the products are exact.
FP32 states are met by FP32 multiply-adds.

Layout of the stores: decode_formats.py. Rounding points: none beyond FP32 sums.
Not covered: dk above 128.
"""

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from quantlab_kernels.rounding import INF_BITS, abs_bits

E4M3_NAN = tl.constexpr(0x7F)
TOP = tl.constexpr(141)  # biased exponent of 2**14: the parts of q and k start there
LEAST = tl.constexpr(16)  # least exponent that is brought there
UPPER_HALF = tl.constexpr(-0x10000)
SIGNS = tl.constexpr(-0x7FFF8000)  # 0x80008000


@triton.constexpr_function
def codes_per_word(name):
    """Count the codes of an int32 word; 1 for FP32."""
    return {"fp32": 1, "fp16": 2, "bf16": 2, "fp8": 4, "int8": 4, "nvfp4": 8, "int4": 8}[name]


@triton.constexpr_function
def matrix_format(name):
    """Tell whether matrix units meet a format."""
    return name != "fp32"


@triton.constexpr_function
def words_per_lane(name, columns):
    """Count a row's consecutive words in a lane: four lanes share `columns` padded elements."""
    return min(4, columns // codes_per_word(name) // 4)


@triton.constexpr_function
def operand_width(name):
    """Count the neighbouring columns that the compiler gives to one lane of an operand.

    Another number gives the same sums, but codes then change lanes on their way.
    """
    return {"nvfp4": 8}.get(name, 4)


@triton.constexpr_function
def lane_rows(block_v, warps):
    """Count the warps that have rows of their own, sixteen each."""
    return max(1, min(warps, block_v // 16))


@triton.jit
def fetched_rows(BLOCK_V: tl.constexpr, WARPS: tl.constexpr, MATRIX: tl.constexpr):
    """Give the rows of a tile in the order in which they are fetched: [BLOCK_V] int32."""
    i = tl.arange(0, BLOCK_V)
    if MATRIX:
        # eight rows over the lanes, then warps; but a warp has sixteen rows of each product
        W: tl.constexpr = lane_rows(BLOCK_V, WARPS)
        pair = i // (8 * W)
        return ((pair // 2 * W + i // 8 % W) * 2 + pair % 2) * 8 + i % 8
    else:
        return i


@triton.jit
def operand_columns(FORMAT: tl.constexpr, COLUMNS: tl.constexpr):
    """Give a row's elements in the order in which they are operands: [COLUMNS] int32."""
    i = tl.arange(0, COLUMNS)
    CODES: tl.constexpr = codes_per_word(FORMAT)
    if CODES == 1:
        return i
    else:
        HELD: tl.constexpr = words_per_lane(FORMAT, COLUMNS)
        PAIRS: tl.constexpr = CODES // 2
        K: tl.constexpr = operand_width(FORMAT)
        lane = i // K % 4
        own = i // (4 * K) * K + i % K  # counted among a lane's
        held = own // CODES
        word = (held // HELD * 4 + lane) * HELD + held % HELD
        return word * CODES + own // 2 % PAIRS + own % 2 * PAIRS


@triton.jit
def fetch_codes(
    codes_ptr,
    scales_ptr,
    row0,
    row,
    inside,
    DK: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    WIDTH: tl.constexpr,
    APART: tl.constexpr,
):
    """Issue the loads of a tile of state rows, or of keys stored like them.

    Args:
        codes_ptr: as int32 words; fp32 as floats.
        scales_ptr: nvfp4's block scales.
        row0: int64 index of the row that rows are counted from, in rows of the pool.
        row: `fetched_rows`.
        inside: which of them exist; others are not read.
        DK: elements of a row.
        COLUMNS: the same, padded.
        FORMAT: "fp32", "fp16", "bf16", "fp8", "nvfp4", "int8" or "int4".
        WIDTH: fp32: elements of a row that lie side by side in a warp.
        APART: rows of the pool from one row to the next.

    Returns:
        codes [BLOCK_V, parts, words], block scales [BLOCK_V, 4, COLUMNS / 64] (or 0).
    """
    CODES: tl.constexpr = codes_per_word(FORMAT)
    WORDS: tl.constexpr = WIDTH if CODES == 1 else 4 * words_per_lane(FORMAT, COLUMNS)
    PARTS: tl.constexpr = COLUMNS // CODES // WORDS
    part = tl.arange(0, PARTS)
    word = part[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    mask = inside[:, None, None]
    if COLUMNS != DK:
        mask = mask & (word < DK // CODES)[None, :, :]
    place = row[:, None, None] * (DK // CODES * APART) + word[None, :, :]
    codes = tl.load(codes_ptr + row0 * (DK // CODES) + place, mask=mask, other=0)
    scales = 0
    if FORMAT == "nvfp4":
        # a lane's words are blocks of their own, or halves of one (dk = 32)
        HELD: tl.constexpr = words_per_lane(FORMAT, COLUMNS)
        lane = tl.arange(0, 4)
        EACH: tl.constexpr = max(1, HELD // 2)
        block = (lane[:, None] * HELD) // 2 + tl.arange(0, EACH)[None, :]
        places = row[:, None, None] * (DK // 16 * APART) + block[None, :, :]
        scale_mask = inside[:, None, None]
        if COLUMNS != DK:
            scale_mask = scale_mask & (block < DK // 16)[None, :, :]
        scales = tl.load(scales_ptr + row0 * (DK // 16) + places, mask=scale_mask, other=0)
    return codes, scales


@triton.jit
def _pair(words, J: tl.constexpr, FORMAT: tl.constexpr):
    """Bring codes J and J + half of each word into the 16-bit patterns of an int32."""
    if FORMAT == "fp8":
        if J == 0:
            return ((words << 8) & SIGNS) | ((words << 7) & 0x3F803F80)
        else:
            return (words & SIGNS) | ((words >> 1) & 0x3F803F80)
    elif FORMAT == "nvfp4":
        if J == 3:
            return (words & SIGNS) | ((words >> 3) & 0x0E000E00)
        else:
            return ((words << (12 - 4 * J)) & SIGNS) | ((words << (9 - 4 * J)) & 0x0E000E00)
    elif FORMAT == "int8":
        return ((words >> (8 * J)) & 0x00FF00FF) ^ 0x64806480
    elif FORMAT == "int4":
        return ((words >> (4 * J)) & 0x000F000F) ^ 0x64086408
    else:
        return words


OPERAND = tl.constexpr(tl.bfloat16 if isinstance(fetched_rows, JITFunction) else tl.float32)
"""Type of BF16 operands: the interpreter has no BF16 arithmetic, and takes the same in FP32."""


@triton.jit
def _bf16(bits):
    """Take FP32 bits whose lower half is zero as BF16 (as FP32 under the interpreter)."""
    if OPERAND == tl.bfloat16:  # noqa: SIM300 (a constant on the right is a mere dtype)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def _halves(pair, FORMAT: tl.constexpr):
    """Take the two 16-bit floats of an int32 apart: one more axis of 2."""
    if FORMAT == "bf16":
        return tl.join(_bf16(pair << 16), _bf16(pair & UPPER_HALF))
    else:
        low = pair.to(tl.int16).to(tl.float16, bitcast=True)
        high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        both = tl.join(low, high)
        if FORMAT == "int8":
            return both - 1152.0
        elif FORMAT == "int4":
            return both - 1032.0
        else:
            return both


@triton.jit
def _scaled_pair(pair, by):
    """Multiply the two FP16 numbers of an int32 by those of another."""
    if OPERAND == tl.bfloat16:  # noqa: SIM300
        return tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [pair, by], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low = _halves(pair, "fp16") * _halves(by, "fp16")
        low, high = tl.split(low)
        low = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return low | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _decoded(words, by, J: tl.constexpr, FORMAT: tl.constexpr):
    pair = _pair(words, J, FORMAT)
    if FORMAT == "nvfp4":
        pair = _scaled_pair(pair, by)
    return _halves(pair, FORMAT)


@triton.jit
def operand(
    codes,
    scales,
    BLOCK_V: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Decode fetched words to a matrix operand [BLOCK_V, COLUMNS], rows in order.

    Args:
        codes: of `fetch_codes`, as the scales.
        scales: likewise.
        BLOCK_V: rows.
        COLUMNS: padded elements of a row.
        FORMAT: not "fp32".
        WARPS: of the program.

    Returns:
        FP16 or BF16: the value over `element_factor` and over the scale of its row or state.
    """
    CODES: tl.constexpr = codes_per_word(FORMAT)
    HELD: tl.constexpr = words_per_lane(FORMAT, COLUMNS)
    PAIRS: tl.constexpr = CODES // 2
    by = 0
    if FORMAT == "nvfp4":
        # scales as pairs of FP16, over the words that they belong to
        EACH: tl.constexpr = max(1, HELD // 2)
        s = (scales.to(tl.int16) << 7).to(tl.float16, bitcast=True) * 16384.0
        s = tl.where(scales == E4M3_NAN, float("nan"), s).to(tl.int16, bitcast=True)
        s = s.to(tl.int32) & 0xFFFF
        by = tl.broadcast_to((s | (s << 16))[:, :, :, None], [BLOCK_V, 4, EACH, HELD // EACH])
        by = tl.reshape(by, codes.shape)
    if PAIRS == 1:
        x = _halves(codes, FORMAT)
    elif PAIRS == 2:
        x = tl.join(_decoded(codes, by, 0, FORMAT), _decoded(codes, by, 1, FORMAT))
    else:
        even = tl.join(_decoded(codes, by, 0, FORMAT), _decoded(codes, by, 2, FORMAT))
        odd = tl.join(_decoded(codes, by, 1, FORMAT), _decoded(codes, by, 3, FORMAT))
        x = tl.join(even, odd)
    W: tl.constexpr = lane_rows(BLOCK_V, WARPS)
    R: tl.constexpr = BLOCK_V // (16 * W)
    P: tl.constexpr = COLUMNS // (CODES * HELD * 4)
    x = tl.reshape(x, [R, 2, W, 8, P, 4, HELD, 2, PAIRS])
    x = tl.permute(x, (0, 2, 1, 3, 4, 6, 8, 7, 5))
    K: tl.constexpr = operand_width(FORMAT)
    x = tl.reshape(x, [BLOCK_V, COLUMNS // (4 * K), K, 4])
    return tl.reshape(tl.permute(x, (0, 1, 3, 2)), [BLOCK_V, COLUMNS])


@triton.constexpr_function
def element_factor(name):
    """Return what an operand's elements are to be multiplied by: they carry a power of two."""
    return {"fp8": 256.0, "nvfp4": 256.0}.get(name, 1.0)


@triton.jit
def _unit(x):
    """Find powers of two that bring the largest |x| to [2**14, 2**15) and back."""
    size = tl.max(abs_bits(x), axis=0) & INF_BITS
    size = tl.maximum(size, LEAST << 23)
    up = ((127 << 23) - size + (TOP << 23)).to(tl.float32, bitcast=True)
    down = (size - ((TOP - 127) << 23)).to(tl.float32, bitcast=True)
    return up, down


@triton.jit
def _part(x, BF16: tl.constexpr):
    """Split off the first 16-bit float of FP32 x: it, and the rest."""
    if BF16:
        bits = x.to(tl.int32, bitcast=True) & UPPER_HALF
        return _bf16(bits), x - bits.to(tl.float32, bitcast=True)
    else:
        first = x.to(tl.float16)
        return first, x - first.to(tl.float32)


@triton.jit
def bf16_parts(x, PARTS: tl.constexpr):
    """Split FP32 x into a tuple of BF16 tensors, eight bits each, the largest first: 3 hold it."""
    parts = ()
    rest = x
    for _ in tl.static_range(PARTS):
        part, rest = _part(rest, True)
        parts = parts + (part,)  # noqa: RUF005 (kernels know no unpacking)
    return parts


@triton.jit
def _parts(x, BF16: tl.constexpr):
    """Split FP32 [N] into [N, 4] 16-bit floats that add up to it; one of the four is 0."""
    first, rest = _part(x, BF16)
    second, rest = _part(rest, BF16)
    third, rest = _part(rest, BF16)
    zero = tl.zeros_like(third)
    return tl.reshape(tl.join(tl.join(first, second), tl.join(third, zero)), [x.shape[0], 4])


@triton.jit
def columns_of(q, k, FORMAT: tl.constexpr, DELTA: tl.constexpr):
    """Split two FP32 vectors [N] into the operand that meets 16-bit floats.

    Args:
        q: in the order of the other operand's columns, like k.
        k: likewise.
        FORMAT: of the other operand: "bf16", or a format whose operands are FP16.
        DELTA: k is wanted.

    Returns:
        [N, 8]: parts of q and of k in turn; what products are to be multiplied by.
    """
    down = 1.0
    if FORMAT != "bf16":
        size = tl.abs(q)
        if DELTA:
            size = tl.maximum(size, tl.abs(k))
        up, down = _unit(size)
        q = q * up
        k = k * up
    of_q = _parts(q, FORMAT == "bf16")
    of_k = tl.zeros_like(of_q)
    if DELTA:
        of_k = _parts(k, FORMAT == "bf16")
    return tl.reshape(tl.join(of_q, of_k), [q.shape[0], 8]), down * element_factor(FORMAT)


@triton.jit
def pair_sums(sums):
    """Add up what parts of two vectors gave: [V, 8] to two of [V]."""
    return tl.split(tl.sum(tl.reshape(sums, [sums.shape[0], 4, 2]), axis=1))


@triton.jit
def as_operand(bits, RECORD: tl.constexpr):
    """Take 16-bit floats as a matrix operand: BF16 comes as int16 patterns, FP16 may."""
    if RECORD == "bf16":
        return _bf16(bits.to(tl.int32) << 16)
    elif bits.dtype == tl.int16:
        return bits.to(tl.float16, bitcast=True)
    else:
        return bits


@triton.jit
def as_bits(columns):
    """Take 16-bit floats as their int16 patterns (BF16 under the interpreter are FP32)."""
    if columns.dtype == tl.float32:
        return (columns.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    else:
        return columns.to(tl.int16, bitcast=True)
