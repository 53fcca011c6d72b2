"""Rounding of FP32 values onto an element's grid: to nearest even, and stochastically.

Everything here is made of correctly rounded FP32 operations, exact scalings by powers of two and
integer operations, one kernel each, so the CPU and the GPU give the same bits (FP32 subnormals must
not be flushed, which is torch's default). Nothing depends on a library's FP8 casts.

Nearest even: in units of the local step q, |y| < 2^(M+1) <= 2^22, so adding 1.5 * 2^23 * q rounds y
to a multiple of q, ties to even, and subtracting it again is exact.

Stochastic: y between neighbours lo < y < hi goes up when a 32-bit draw is below floor(f * 2^32),
f = (y - lo) / (hi - lo), as signed reals. In fixed point with 32 fractional bits,
F = floor(y / q * 2^32) holds both: its upper part is lo / q and its lower 32 bits are
floor(f * 2^32), negative values included. So the rounded multiple of q is ceil((F - draw) / 2^32),
in 64-bit integers, for the normal range, the subnormal range and the first gap alike.
|P(hi) - f| <= 2^-32. The step q is that of y's own binade; just below a power of two hi is that
power.

Stochastic rounding is biased only where the type saturates: beyond the largest finite value there
is no hi to go to. Unscaled float16 and bfloat16 with `ieee` overflow become infinite exactly where
rounding to nearest does (float16: from 65520) and stay at the largest finite value below that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantlab.formats.element import Element, FloatElement, IntElement
from quantlab.formats.spec import Overflow

_EXPONENT = 0x7F800000
_BIAS = 127


def round_unscaled(
    x: Tensor, element: FloatElement, words: Tensor | None, overflow: Overflow
) -> Tensor:
    """Round FP32 values of any size to an unscaled element type.

    Args:
        x: FP32, any shape; not changed.
        element: a type whose values FP32 holds.
        words: random words broadcastable to x (see `round_clamped`), None for nearest.
        overflow: rule beyond the largest finite value; NaN stays NaN under both.

    Returns:
        FP32 of x's shape, values of the type, zeros with the sign of x where it has one.
    """
    native = _native(element)
    if native is not None and words is None and overflow == "ieee":
        return x.to(native).to(torch.float32)
    largest = float(element.max_finite)
    clamped = x.clamp(-largest, largest)
    if overflow == "saturate":
        beyond = clamped * 0
    elif native is not None:
        beyond = x.to(native).to(torch.float32)
        beyond -= beyond.clamp(-largest, largest)
    else:
        beyond = _beyond(x, element) + clamped * 0
    # Zero where finite, so the sum changes only infinities and NaN; signs of zeros come after it.
    out = round_clamped(clamped, element, words).add_(beyond)
    return out.copysign_(x) if element.signed_zero else out.add_(0.0)


def round_clamped(y: Tensor, element: Element, words: Tensor | None) -> Tensor:
    """Round FP32 values within an element's range to its grid.

    Args:
        y: FP32 contiguous, |y| <= the largest finite value (NaN gives an unspecified value);
            overwritten.
        element: the grid.
        words: None for nearest even; for stochastic rounding int64 values in [0, 2^32), or int32
            bit patterns of them, broadcastable to y.

    Returns:
        FP32 of y's shape; zeros carry the sign of y where the type has signed zeros.
    """
    if words is not None:
        words = as_words(words)
    if isinstance(element, IntElement):
        if words is None:
            return y.round_().add_(0.0)
        fixed = _fixed_point(y.mul_(2.0**32))
        torch.sub(words, fixed, out=fixed).bitwise_right_shift_(32)
        # 0 - x rather than -x: integers have no minus zero.
        return torch.sub(0.0, y.copy_(fixed), out=y)
    if element.exp_bits == 8:
        return _round_upper_bits(y, element, words)
    step = y.view(torch.int32) & _EXPONENT
    step.clamp_(min=(element.emin + _BIAS) << 23)
    if words is None:
        magic = step.add_(((23 - element.man_bits) << 23) | 0x400000).view(torch.float32)
        out = (y + magic).sub_(magic)
    else:
        # q * 2^-32, so that one exact division brings y to fixed point
        unit = step.sub_((element.man_bits + 32) << 23).view(torch.float32)
        fixed = _fixed_point(y / unit)
        # -ceil((F - draw) / 2^32) * 2^32: the sign is restored below, from y
        torch.sub(words, fixed, out=fixed).bitwise_and_(-(1 << 32))
        out = unit.mul_(fixed)
    return out.copysign_(y) if element.signed_zero else _signed(out, y, words)


def round_up(y: Tensor, element: FloatElement) -> Tensor:
    """Round non-negative FP32 values within the range up to the grid.

    Args:
        y: FP32, 0 <= y <= the largest finite value.
        element: the grid.

    Returns:
        FP32: the smallest value of the type that is not below y.
    """
    bits = y.view(torch.int32)
    if element.exp_bits == 8:
        low = (1 << (23 - element.man_bits)) - 1
        return (bits + low).bitwise_and_(~low).view(torch.float32)
    step = (bits & _EXPONENT).clamp_(min=(element.emin + _BIAS) << 23)
    step.sub_(element.man_bits << 23)
    quantum = step.view(torch.float32)
    return (y / quantum).ceil_().mul_(quantum)


def as_words(words: Tensor) -> Tensor:
    """Bring random words to int64 values in [0, 2^32).

    Args:
        words: int64 in that range (returned as it is), or int32 or uint32 bit patterns.

    Raises:
        TypeError: for another dtype.
    """
    if words.dtype == torch.int64:
        return words
    if words.dtype in (torch.int32, torch.uint32):
        return words.view(torch.int32).to(torch.int64).bitwise_and_(0xFFFFFFFF)
    raise TypeError(f"random words are int64 values or 32-bit patterns, got {words.dtype}")


def _fixed_point(y: Tensor) -> Tensor:
    return y.floor_().to(torch.int64)


def _round_upper_bits(y: Tensor, element: FloatElement, words: Tensor | None) -> Tensor:
    """Round a type that is the upper part of FP32 (bfloat16): the dropped bits are the fraction."""
    if words is None:
        native = _native(element)
        return y if native is None else y.to(native).to(torch.float32)
    dropped = 23 - element.man_bits
    low = (1 << dropped) - 1
    bits = y.view(torch.int32)
    # Up in magnitude when the upper draw bits are below the fraction; seen from a negative number
    # up is towards zero, hence the complement. Adding (low - bits) carries exactly then.
    draws = (words >> (32 - dropped)).to(torch.int32).bitwise_xor_(low)
    noise = (bits >> 31).bitwise_and_(low).bitwise_xor_(draws)
    return bits.add_(noise).bitwise_and_(~low).view(torch.float32)


def _signed(out: Tensor, y: Tensor, words: Tensor | None) -> Tensor:
    """Give rounded values their sign, without a minus zero."""
    if words is None:
        return out.add_(0.0)
    return out.copysign_(y).add_(0.0)


def _native(element: FloatElement) -> torch.dtype | None:
    """Name the torch type whose casts from FP32 are one correct rounding everywhere."""
    return {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(element.name)


def _beyond(x: Tensor, element: FloatElement) -> Tensor:
    """Infinity (NaN where the type has none) where nearest rounding overflows, else zero."""
    threshold = float(element.overflow_threshold)
    size = x.abs()
    over = size >= threshold if element.overflows_at_tie else size > threshold
    bad = torch.full_like(x, float("inf") if element.has_inf else float("nan")).copysign_(x)
    return torch.where(over, bad, torch.zeros_like(x))
