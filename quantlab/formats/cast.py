"""Casts: a state to codes and scales, back, and both at once.

`encode` gives the codes and scales that a kernel would store, `decode` the FP32 values they stand
for, and `quantize` the same values without forming codes, in few passes over the data and without
a host synchronisation: `quantize(x, fmt, words)` is `decode(encode(x, fmt, words))` bit for bit.

Scaled formats: y = x / divisor (`block_scale`), clamped to +-qmax before rounding, rounded onto the
element's grid (`rounding`), times the stored scale. Inputs are FP32; FP64 is rounded to FP32 first
and FP16 and BF16 are widened. `float64` stores exactly and `float32` stores what FP32 holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from quantlab.formats.block_scale import Blocks, BlockScales, block_scales
from quantlab.formats.codes import code_values, element_codes, scale_codes, scale_values
from quantlab.formats.element import FloatElement
from quantlab.formats.rounding import round_clamped, round_unscaled
from quantlab.formats.spec import Format

CLIP_MARGIN = 1.0 + 2.0**-22
"""A value counts as clipped beyond qmax times this: amax / fl(amax / qmax) itself can exceed qmax
by two FP32 roundings (about one block in twelve), which changes nothing."""


class CastCounts(NamedTuple):
    """What a cast could not represent, as 0-d int64 tensors: counting needs no synchronisation.

    Attributes:
        nonfinite: NaN and infinite inputs.
        clipped: finite inputs beyond what the block scale reaches, stored as +-qmax; for unscaled
            formats, finite inputs beyond the largest finite value, whatever they became.
        zeroed: blocks with a non-zero maximum whose scale underflowed, stored as zeros.
        flushed: non-zero finite inputs that were stored as zero.
    """

    nonfinite: Tensor
    clipped: Tensor
    zeroed: Tensor
    flushed: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A stored state.

    Attributes:
        fmt: its format.
        codes: [..., dv, dk] one code per element: uint8 (float types up to 8 bits, the code in the
            low bits), int8 (int4, int6, int8), int16, or uint16, uint32 (uint64 as int64) bit
            patterns. `codes.pack_nibbles` packs 4-bit codes two to a byte.
        scales: [..., row tiles, key tiles] in the scale's type: float32, bfloat16, float16, or
            uint8 codes of E4M3 and E8M0; None if the format has none.
        state_scale: FP32 [..., 1, 1], a decode scale (multiplier), of two-level formats, else None.
        counts: what was lost.
    """

    fmt: Format
    codes: Tensor
    scales: Tensor | None
    state_scale: Tensor | None
    counts: CastCounts


def encode(x: Tensor, fmt: Format, words: Tensor | None = None) -> Encoded:
    """Store a state.

    Args:
        x: [..., dv, dk] FP32 (FP64, FP16, BF16 are converted to FP32 first, except for float64).
        fmt: the format.
        words: random words for stochastic rounding (`philox.sr_words`): int64 values in [0, 2^32)
            or int32 bit patterns, broadcastable to x. Ignored for nearest rounding.

    Returns:
        Codes, scales and counts. A block that holds a NaN or an infinity has a NaN scale and the
        element's NaN code, or 0, in all its places.

    Raises:
        ValueError: x has no state axes, or words are missing.
    """
    x = _input(x, fmt, words)
    element = fmt.element
    if fmt.is_exact:
        return Encoded(
            fmt=fmt,
            codes=element_codes(x, element),
            scales=None,
            state_scale=None,
            counts=_no_counts(x),
        )
    words = words if fmt.needs_words else None
    if fmt.scale is None:
        assert isinstance(element, FloatElement)
        values = round_unscaled(x, element, words, fmt.overflow)
        counts = _unscaled_counts(x, values, element)
        codes = element_codes(values, element)
        return Encoded(fmt=fmt, codes=codes, scales=None, state_scale=None, counts=counts)
    y, blocks, scales = _scaled(x, fmt)
    clipped = _clipped(y, fmt)
    poisoned = y.isnan()
    values = round_clamped(_clamp(y, fmt), element, words)
    values = torch.where(poisoned, float("nan"), values)
    out = _rescale(values.clone(), blocks, scales.multiplier)
    return Encoded(
        fmt=fmt,
        codes=element_codes(values, element),
        scales=scale_codes(scales.stored, fmt.scale.type),
        state_scale=scales.state,
        counts=_counts(x, out, clipped, scales.zeroed),
    )


def decode(encoded: Encoded) -> Tensor:
    """Load a stored state.

    Args:
        encoded: what `encode` returned.

    Returns:
        FP32 [..., dv, dk] (FP64 for float64): code value times stored scale.
    """
    fmt = encoded.fmt
    values = code_values(encoded.codes, fmt.element)
    if fmt.scale is None or encoded.scales is None:
        return values
    scales = scale_values(encoded.scales, fmt.scale.type)
    if encoded.state_scale is not None:
        scales = scales * encoded.state_scale
    return _rescale(values, Blocks.of(fmt.scale, *values.shape[-2:]), scales)


@overload
def quantize(
    x: Tensor, fmt: Format, words: Tensor | None = None, *, counts: Literal[True] = True
) -> tuple[Tensor, CastCounts]: ...
@overload
def quantize(
    x: Tensor, fmt: Format, words: Tensor | None = None, *, counts: Literal[False]
) -> tuple[Tensor, None]: ...
def quantize(
    x: Tensor, fmt: Format, words: Tensor | None = None, *, counts: bool = True
) -> tuple[Tensor, CastCounts | None]:
    """Store a state and load it again: `decode(encode(x, fmt, words))`, bit for bit, but fast.

    Args:
        x: [..., dv, dk] FP32 or FP64 (FP16 and BF16 are widened); not changed.
        fmt: the format.
        words: as for `encode`.
        counts: whether to count what was lost; costs a few passes more.

    Returns:
        A new tensor of the format's values, FP32, or FP64 if x is FP64; and the counts, or None.

    Raises:
        ValueError: x has no state axes, or words are missing.
    """
    given = x
    x = _input(x, fmt, words)
    words = words if fmt.needs_words else None
    if fmt.is_exact:
        tally = _no_counts(x) if counts else None
        exact = x if fmt.element.name == "float32" else given
        exact = exact.to(torch.promote_types(given.dtype, torch.float32))
        return exact.clone() if exact is given else exact, tally
    tally = None
    if fmt.scale is None:
        assert isinstance(fmt.element, FloatElement)
        out = round_unscaled(x, fmt.element, words, fmt.overflow)
        if counts:
            tally = _unscaled_counts(x, out, fmt.element)
    else:
        y, blocks, scales = _scaled(x, fmt)
        clipped = _clipped(y, fmt) if counts else None
        out = _rescale(round_clamped(_clamp(y, fmt), fmt.element, words), blocks, scales.multiplier)
        if clipped is not None:
            tally = _counts(x, out, clipped, scales.zeroed)
    return (out.to(torch.float64) if given.dtype == torch.float64 else out), tally


def _input(x: Tensor, fmt: Format, words: Tensor | None) -> Tensor:
    if x.ndim < 2:
        raise ValueError(f"a state has axes [..., dv, dk], got shape {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"a state is a floating-point tensor, got {x.dtype}")
    if fmt.needs_words and words is None:
        raise ValueError(f"{fmt} rounds stochastically and needs random words")
    if fmt.needs_words and words is not None and not _broadcasts(words, x):
        raise ValueError(
            f"random words of shape {tuple(words.shape)} do not broadcast to {tuple(x.shape)}"
        )
    wanted = torch.float64 if fmt.element.name == "float64" else torch.float32
    return x.to(wanted).contiguous()


def _broadcasts(words: Tensor, x: Tensor) -> bool:
    sizes = zip(reversed(words.shape), reversed(x.shape), strict=False)
    return words.ndim <= x.ndim and all(w in (1, n) for w, n in sizes)


def _scaled(x: Tensor, fmt: Format) -> tuple[Tensor, Blocks, BlockScales]:
    """Divide by the block scales: a new tensor of x's shape."""
    assert fmt.scale is not None
    blocks = Blocks.of(fmt.scale, x.shape[-2], x.shape[-1])
    scales = block_scales(blocks.amax(x), fmt)
    return (blocks.view(x) / blocks.spread(scales.divisor)).view(x.shape), blocks, scales


def _clamp(y: Tensor, fmt: Format) -> Tensor:
    assert fmt.scale is not None
    qmax = float(fmt.scale.qmax)
    return y.clamp_(-qmax, qmax)


def _rescale(values: Tensor, blocks: Blocks, multiplier: Tensor) -> Tensor:
    blocks.view(values).mul_(blocks.spread(multiplier))
    return values


def _clipped(y: Tensor, fmt: Format) -> Tensor:
    assert fmt.scale is not None
    return (y.abs() > float(fmt.scale.qmax) * CLIP_MARGIN).count_nonzero()


def _counts(x: Tensor, out: Tensor, clipped: Tensor, zeroed: Tensor) -> CastCounts:
    return CastCounts(
        nonfinite=_nonfinite(x),
        clipped=clipped,
        zeroed=zeroed.count_nonzero(),
        flushed=((out == 0) & (x != 0)).count_nonzero(),
    )


def _unscaled_counts(x: Tensor, out: Tensor, element: FloatElement) -> CastCounts:
    beyond = x.abs() > float(element.max_finite)
    clipped = beyond.count_nonzero() - x.isinf().count_nonzero()
    return _counts(x, out, clipped, torch.zeros((), dtype=torch.int64, device=x.device))


def _no_counts(x: Tensor) -> CastCounts:
    zero = torch.zeros((), dtype=torch.int64, device=x.device)
    return CastCounts(nonfinite=_nonfinite(x), clipped=zero, zeroed=zero, flushed=zero)


def _nonfinite(x: Tensor) -> Tensor:
    # x - x is NaN, which counts as non-zero, for infinities and NaN, and zero for all else.
    return (x - x).count_nonzero()
