"""Codes: grid values to stored bits and back, exactly; two 4-bit codes to a byte.

All functions take values that are already on the grid; nothing is rounded here.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from quantlab.formats.element import ELEMENTS, Element, FloatElement, IntElement
from quantlab.formats.scale import ScaleType

_WIDE = {
    "float64": (torch.float64, torch.int64),
    "float32": (torch.float32, torch.uint32),
    "float16": (torch.float16, torch.uint16),
    "bfloat16": (torch.bfloat16, torch.uint16),
}
"""Value type and code type of elements that torch stores itself."""


def element_codes(values: Tensor, element: Element) -> Tensor:
    """Turn values of an element type into codes.

    Args:
        values: FP32 (FP64 for float64) values of the type; NaN becomes the type's NaN code, or 0
            if it has none.
        element: the type.

    Returns:
        Codes of values' shape: uint8 for float types of up to 8 bits, int8 for int4, int6 and int8,
        int16 for int16, bit patterns uint16 (float16, bfloat16), uint32 and int64 (float64).
    """
    if element.name in _WIDE:
        stored, pattern = _WIDE[element.name]
        signed = {2: torch.int16, 4: torch.int32, 8: torch.int64}[stored.itemsize]
        # One pattern for all NaN: what a cast makes of them differs between CPU and GPU.
        bits = values.to(stored).view(signed)
        return torch.where(values.isnan(), element.nan_code or 0, bits).view(pattern)
    if isinstance(element, IntElement):
        return torch.nan_to_num(values, nan=0.0).to(
            torch.int8 if element.bits <= 8 else torch.int16
        )
    assert isinstance(element, FloatElement)
    bits = values.view(torch.int32)
    size = bits & 0x7FFFFFFF
    normal = (size >> (23 - element.man_bits)) - ((127 - element.bias) << element.man_bits)
    small = values.abs() * float(1 / element.smallest_subnormal)
    code = torch.where(
        values.abs() < float(element.smallest_normal),
        torch.nan_to_num(small, nan=0.0, posinf=0.0).to(torch.int32),
        normal,
    )
    if element.has_inf:
        code = torch.where(values.isinf(), ((1 << element.exp_bits) - 1) << element.man_bits, code)
    negative = values.signbit() if element.signed_zero else values < 0
    code = code | (negative.to(torch.int32) << (element.bits - 1))
    return torch.where(values.isnan(), element.nan_code or 0, code).to(torch.uint8)


def code_values(codes: Tensor, element: Element) -> Tensor:
    """Decode codes of an element type.

    Args:
        codes: as `element_codes` returns them.
        element: the type.

    Returns:
        FP32 values (FP64 for float64) of codes' shape.
    """
    if element.name in _WIDE:
        values = codes.view(_WIDE[element.name][0])
        return values.clone() if element.name == "float64" else values.to(torch.float32)
    if isinstance(element, IntElement):
        return codes.to(torch.float32)
    table = torch.tensor(value_table(element.name), dtype=torch.float32, device=codes.device)
    return table[codes.to(torch.int64)]


@cache
def value_table(name: str) -> tuple[float, ...]:
    """All values of a float element type of up to 8 bits, by code."""
    element = ELEMENTS[name]
    if not isinstance(element, FloatElement) or element.bits > 8:
        raise ValueError(f"{name} has no table of values: float types of up to 8 bits have")
    return tuple(element.value(code) for code in range(1 << element.bits))


def scale_codes(scales: Tensor, kind: ScaleType) -> Tensor:
    """Turn FP32 values of a scale type into stored scales: a float tensor, or uint8 codes."""
    if kind.name == "float32":
        return scales
    if kind.name == "float8_e8m0fnu":
        # 2^-127 is subnormal in FP32 with exponent field 0, which is its E8M0 code as well.
        return (scales.view(torch.int32) >> 23).bitwise_and_(0xFF).to(torch.uint8)
    if kind.name == "float8_e4m3fn":
        return element_codes(scales, ELEMENTS[kind.name])
    return scales.to(_WIDE[kind.name][0])


def scale_values(stored: Tensor, kind: ScaleType) -> Tensor:
    """Decode stored scales to FP32."""
    if kind.name == "float8_e8m0fnu":
        return exponent_value(stored.to(torch.int32) - 127)
    if kind.name == "float8_e4m3fn":
        return code_values(stored, ELEMENTS[kind.name])
    return stored.to(torch.float32)


def exponent_value(exponent: Tensor) -> Tensor:
    """Exact powers of two as FP32, for int32 exponents -127 .. 127; 128 gives NaN, as E8M0's FF."""
    bits = torch.where(exponent == -127, 0x00400000, (exponent + 127) << 23)
    return torch.where(exponent == 128, 0x7FC00000, bits).view(torch.float32)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack 4-bit codes two to a byte along the last axis, the first in the low nibble.

    Args:
        codes: uint8 or int8 [..., n], codes in the low four bits.

    Returns:
        uint8 [..., ceil(n / 2)]; the last high nibble is 0 if n is odd.
    """
    nibbles = codes.view(torch.uint8) & 0xF
    if nibbles.shape[-1] % 2:
        nibbles = torch.nn.functional.pad(nibbles, (0, 1))
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor, n: int, *, signed: bool = False) -> Tensor:
    """Unpack what `pack_nibbles` packed.

    Args:
        packed: uint8 [..., ceil(n / 2)].
        n: number of codes along the last axis.
        signed: sign-extend, for int4.

    Returns:
        uint8 [..., n], or int8 if signed.
    """
    if packed.shape[-1] != (n + 1) // 2:
        raise ValueError(f"{n} codes take {(n + 1) // 2} bytes, got {packed.shape[-1]}")
    both = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)[..., :n]
    if not signed:
        return both
    return both.to(torch.int8).bitwise_left_shift_(4).bitwise_right_shift_(4)
