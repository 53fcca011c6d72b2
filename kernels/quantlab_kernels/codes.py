"""Element values to stored codes and back, in registers; nothing is rounded here.

A narrow float's code is the upper part of the FP32 bits of its value times 2**(bias - 127): normal
numbers keep their fraction and shift their exponent field, and the type's subnormals become FP32's
subnormals. So encoding is one exact product and one shift, decoding the reverse.

Reference: quantlab.formats.codes.
"""

import triton
import triton.language as tl

from quantlab_kernels.rounding import INF_BITS, abs_bits, round_bf16, round_fp16, with_sign_of

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
    """Encode elements of scaled formats.

    Args:
        magnitude: FP32, non-negative values of the element type; in poisoned blocks what
            `scaled_elements` gives.
        x: FP32 with the sign of the elements.
        bad: whether the block is poisoned; its elements are NaN, or 0 in types without NaN.
        FORMAT: "fp8", "nvfp4", "int8" or "int4".

    Returns:
        int32 codes; of "int8" only the low eight bits count.
    """
    if FORMAT == "fp8":
        sign_bit = tl.where(bad, 0, 0x80)
        codes = (magnitude * FP32_TO_E4M3).to(tl.int32, bitcast=True) >> 20
        return ((x.to(tl.int32, bitcast=True) >> 24) & sign_bit) | codes
    elif FORMAT == "nvfp4":
        sign_bit = tl.where(bad, 0, 0x8)
        codes = (magnitude * FP32_TO_E2M1).to(tl.int32, bitcast=True) >> 22
        return ((x.to(tl.int32, bitcast=True) >> 28) & sign_bit) | codes
    else:
        codes = (with_sign_of(magnitude, x) + WHOLE).to(tl.int32, bitcast=True)
        return (codes & 0xF) if FORMAT == "int4" else codes


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
        rounded = round_fp16(x, words, SR).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        return tl.where(x == x, rounded, FP16_NAN)
    else:
        rounded = round_bf16(x, words, SR).to(tl.int32, bitcast=True) >> 16
        return tl.where(x == x, rounded, BF16_NAN)


@triton.jit
def packed_codes(codes, BITS: tl.constexpr):
    """Pack four codes of a last axis [groups, 4] into numbers, the first lowest.

    Of 16-bit and eight-bit codes the bits above are dropped, of four-bit codes they must be 0.

    Returns:
        a tuple of int32 [groups]: two of 16-bit codes, else one, of 16 bits for four-bit codes.
    """
    G: tl.constexpr = codes.shape[0]
    even, odd = tl.split(tl.reshape(codes, [G, 2, 2]))
    if BITS == 16:
        a, b = tl.split((even & 0xFFFF) | odd << 16)
        return (a, b)
    elif BITS == 8:
        a, b = tl.split((even & 0xFF) | (odd & 0xFF) << 8)
        return (a | b << 16,)
    else:
        a, b = tl.split(even | odd << 4)
        return (a | b << 8,)


@triton.jit
def packed_pairs(codes):
    """Pack four-bit codes [groups, 4] two to a byte: [groups, 2] int32."""
    G: tl.constexpr = codes.shape[0]
    even, odd = tl.split(tl.reshape(codes, [G, 2, 2]))
    return even | odd << 4


@triton.jit
def unpacked_pairs(packed):
    """Unpack bytes [R, B] of four-bit codes, the first in the low nibble: [R, 2 B]."""
    R: tl.constexpr = packed.shape[0]
    B: tl.constexpr = packed.shape[1]
    return tl.reshape(tl.join(packed & 0xF, packed >> 4), [R, 2 * B])
