"""Element values to stored codes and back, in registers; nothing is rounded here.

A narrow float's code is the upper part of the FP32 bits of its value times 2**(bias - 127): normal
numbers keep their fraction and shift their exponent field, and the type's subnormals become FP32's
subnormals. So encoding is one exact product and one shift, decoding the reverse.

Reference: quantlab.formats.codes.
"""

import triton
import triton.language as tl

from quantlab_kernels.drawn import drawn_scaled_codes
from quantlab_kernels.rounding import (
    INF_BITS,
    SIGN_BIT,
    abs_bits,
    round_bf16,
    with_sign_of,
)
from quantlab_kernels.stores import scaled_elements, stored_fp16

FP16_NAN = tl.constexpr(0x7E00)
BF16_NAN = tl.constexpr(0x7FC0)
E4M3_NAN = tl.constexpr(0x7F)
E4M3_TO_FP32 = tl.constexpr(2.0**120)  # 127 less the bias of 7
E2M1_TO_FP32 = tl.constexpr(2.0**126)
FP32_TO_E4M3 = tl.constexpr(2.0**-120)
FP32_TO_E2M1 = tl.constexpr(2.0**-126)
WHOLE = tl.constexpr(1.5 * 2**23)  # plus a small whole number: two's complement in the low bits


@triton.jit
def e4m3_size_codes(magnitude):
    """Encode non-negative E4M3 values: int32, NaN for what is not finite."""
    codes = (magnitude * FP32_TO_E4M3).to(tl.int32, bitcast=True) >> 20
    return tl.where(abs_bits(magnitude) >= INF_BITS, E4M3_NAN, codes)


@triton.jit
def e4m3_size_values(codes):
    """Decode E4M3 codes below 128: FP32."""
    values = (codes.to(tl.int32) << 20).to(tl.float32, bitcast=True) * E4M3_TO_FP32
    return tl.where(codes == E4M3_NAN, float("nan"), values)


@triton.jit
def scaled_codes(magnitude, x, bad, FORMAT: tl.constexpr):
    """Encode elements of scaled formats, each code in the highest bits of a number.

    There it needs no mask: the sign bit of a float is at its place, and `packed_codes` shifts the
    highest bits of one number into the next by one instruction.

    Args:
        magnitude: FP32, non-negative values of the element type; in poisoned blocks what
            `scaled_elements` gives.
        x: FP32 with the sign of the elements.
        bad: whether the block is poisoned; its elements are NaN, or 0 in types without NaN.
        FORMAT: "fp8", "nvfp4", "int8" or "int4".

    Returns:
        uint32; the bits below the code are 0.
    """
    if FORMAT == "fp8" or FORMAT == "nvfp4":
        sign = x.to(tl.int32, bitcast=True) & tl.where(bad, 0, SIGN_BIT)
        if FORMAT == "fp8":
            size = (magnitude * FP32_TO_E4M3).to(tl.int32, bitcast=True) << 4
        else:
            size = (magnitude * FP32_TO_E2M1).to(tl.int32, bitcast=True) << 6
        codes = size | sign
    else:
        BITS: tl.constexpr = 4 if FORMAT == "int4" else 8
        codes = (with_sign_of(magnitude, x) + WHOLE).to(tl.int32, bitcast=True) << (32 - BITS)
    return codes.to(tl.uint32, bitcast=True)


@triton.jit
def block_codes(
    blocks, used, words, FORMAT: tl.constexpr, SR: tl.constexpr, FUSED: tl.constexpr = True
):
    """Divide blocks [blocks, B] by their scales [blocks], round and encode as `scaled_codes` does.

    Stochastic if SR, with uint32 words [blocks, B]; FUSED is how it divides (division.py). What is
    below the four bits of NVFP4 may be anything: see `drawn.drawn_scaled_codes`.
    """
    if SR:
        return drawn_scaled_codes(blocks, used, words, FORMAT, FUSED)
    else:
        magnitude = scaled_elements(blocks, used, FORMAT, FUSED)
        return scaled_codes(magnitude, blocks, (used != used)[:, None], FORMAT)


@triton.jit
def scaled_values(codes, FORMAT: tl.constexpr):
    """Decode elements of scaled formats: FP32.

    Args:
        codes: int32, 0 to 255, or 0 to 15 of the four-bit types.
        FORMAT: as for `scaled_codes`.
    """
    if FORMAT == "fp8":
        # the sign at its place, exponent and fraction below it
        bits = (codes & 0x7F) << 20 | (codes & 0x80) << 24
        values = bits.to(tl.float32, bitcast=True) * E4M3_TO_FP32
        return tl.where((codes & 0x7F) == E4M3_NAN, float("nan"), values)
    elif FORMAT == "nvfp4":
        bits = (codes & 0x7) << 22 | (codes & 0x8) << 28
        return bits.to(tl.float32, bitcast=True) * E2M1_TO_FP32
    else:
        HALF: tl.constexpr = 8 if FORMAT == "int4" else 128
        # the offset code c ^ HALF is the value plus HALF; 2**23 + c holds c in its low bits
        offset = ((codes ^ HALF) | 0x4B000000).to(tl.float32, bitcast=True)
        return offset - (8388608.0 + HALF)


@triton.jit
def unscaled_codes(x, words, FORMAT: tl.constexpr, SR: tl.constexpr):
    """Round FP32 values to FP16 or BF16 and encode them: int32, right in the low 16 bits."""
    if FORMAT == "fp16":
        rounded = stored_fp16(x, words, SR).to(tl.int16, bitcast=True).to(tl.int32)
        return tl.where(x == x, rounded, FP16_NAN)
    else:
        rounded = round_bf16(x, words, SR).to(tl.int32, bitcast=True) >> 16
        return tl.where(x == x, rounded, BF16_NAN)


@triton.jit
def packed_halves(codes):
    """Pack four 16-bit codes of a last axis [groups, 4], right in their low bits.

    Returns:
        two int32 [groups], the first code lowest.
    """
    G: tl.constexpr = codes.shape[0]
    even, odd = tl.split(tl.reshape(codes, [G, 2, 2]))
    a, b = tl.split((even & 0xFFFF) | odd << 16)
    return a, b


@triton.jit
def packed_codes(codes, BITS: tl.constexpr):
    """Pack four codes of a last axis [groups, 4], each in the highest BITS bits of a uint32.

    Returns:
        uint32 [groups], 4 BITS bits with the first code lowest; and the last of the four numbers.
    """
    G: tl.constexpr = codes.shape[0]
    even, odd = tl.split(tl.reshape(codes, [G, 2, 2]))
    c0, c2 = tl.split(even)
    c1, c3 = tl.split(odd)
    REST: tl.constexpr = 32 - BITS
    packed = ((c3 >> REST) << BITS) | (c2 >> REST)
    packed = (packed << BITS) | (c1 >> REST)
    packed = (packed << BITS) | (c0 >> REST)
    return packed, c3


@triton.jit
def packed_pairs(codes):
    """Pack four-bit codes [groups, 4], as `scaled_codes` gives them, two to a byte: [groups, 2]."""
    G: tl.constexpr = codes.shape[0]
    even, odd = tl.split(tl.reshape(codes, [G, 2, 2]))
    return (even >> 28) | (odd >> 28) << 4


@triton.jit
def unpacked_pairs(packed):
    """Unpack bytes [R, B] of four-bit codes, the first in the low nibble: [R, 2 B]."""
    R: tl.constexpr = packed.shape[0]
    B: tl.constexpr = packed.shape[1]
    return tl.reshape(tl.join(packed & 0xF, packed >> 4), [R, 2 * B])
