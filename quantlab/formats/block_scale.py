"""From block maxima to block scales, and scales spread over their blocks.

Rules, all in FP32 with one correctly rounded division each:

- plain scale: amax / qmax, rounded to the scale's type; 1 where amax is 0;
- E8M0: a power of two by the named rule, exponent clamped to -127 .. 127;
- two levels (NVFP4): state scale s = (largest finite block maximum of the state) / (448 * qmax),
  1 where that is 0; block scale = E4M3 of (block amax / qmax) / s. The product block scale * s,
  rounded to FP32 once, divides and multiplies.

The stored scale is used in both directions. Scales never overflow: they saturate at the largest
value of their type for which qmax times the scale is finite in FP32, so a finite state decodes to
a finite one (clipping is counted). A scale that underflows to zero makes a zero block: its elements
are divided by infinity, and the block is counted. A block that holds a NaN or an infinity gets a
NaN scale, so that all of it decodes to NaN; it does not enter the state scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from quantlab.formats.codes import exponent_value
from quantlab.formats.element import ELEMENTS, FloatElement
from quantlab.formats.rounding import round_clamped, round_up
from quantlab.formats.scale import SCALE_TYPES, Scale, ScaleType
from quantlab.formats.spec import Format

_INF = float("inf")
_NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The blocks of states [..., dv, dk]: rows x keys tiles.

    Attributes:
        dv: value rows of a state.
        dk: key channels of a state.
        rows: rows of a full tile.
        keys: key channels of a full tile.
    """

    dv: int
    dk: int
    rows: int
    keys: int

    @classmethod
    def of(cls, scale: Scale, dv: int, dk: int) -> Blocks:
        """Cut a state [dv, dk] into the blocks of a scale."""
        rows, keys = scale.tile.shape(dv, dk)
        return cls(dv=dv, dk=dk, rows=rows, keys=keys)

    @property
    def even(self) -> bool:
        """Whether all tiles are full."""
        return self.dv % self.rows == 0 and self.dk % self.keys == 0

    def view(self, x: Tensor) -> Tensor:
        """View contiguous [..., dv, dk] so that it broadcasts with `spread`."""
        if not self.even:
            return x
        return x.view(
            *x.shape[:-2], self.dv // self.rows, self.rows, self.dk // self.keys, self.keys
        )

    def spread(self, scale: Tensor) -> Tensor:
        """Shape scales [..., row tiles, key tiles] so that they broadcast with `view`."""
        if self.even:
            return scale[..., :, None, :, None]
        rows = scale.repeat_interleave(self.rows, dim=-2)[..., : self.dv, :]
        return rows.repeat_interleave(self.keys, dim=-1)[..., : self.dk]

    def amax(self, x: Tensor) -> Tensor:
        """Largest magnitude of every block: [..., row tiles, key tiles], NaN if one is in it."""
        size = x.abs()
        if not self.even:
            # Zeros added to the last tiles cannot raise a maximum of magnitudes.
            pad = (0, -self.dk % self.keys, 0, -self.dv % self.rows)
            size = torch.nn.functional.pad(size, pad)
        lead = x.shape[:-2]
        down, across = size.shape[-2] // self.rows, size.shape[-1] // self.keys
        if self.rows == 1:
            return size.view(*lead, down, across, self.keys).amax(-1)
        if self.keys == 1:
            return size.view(*lead, down, self.rows, across).amax(-2)
        return size.view(*lead, down, self.rows, across, self.keys).amax((-3, -1))


class BlockScales(NamedTuple):
    """Scales of all blocks, FP32 [..., row tiles, key tiles].

    Attributes:
        stored: values of the scale's type; NaN marks a poisoned block.
        state: FP32 [..., 1, 1], the state scale of a two-level format, else None.
        divisor: what elements are divided by.
        multiplier: what decoded elements are multiplied by.
        zeroed: bool, blocks that decode to zero although their maximum is not zero.
    """

    stored: Tensor
    state: Tensor | None
    divisor: Tensor
    multiplier: Tensor
    zeroed: Tensor


def block_scales(amax: Tensor, fmt: Format) -> BlockScales:
    """Find the scales of blocks from their maxima.

    Args:
        amax: FP32 [..., row tiles, key tiles], largest magnitudes.
        fmt: a scaled format.

    Returns:
        The scales, as stored and as used.
    """
    scale = fmt.scale
    if scale is None:
        raise ValueError(f"{fmt} has no scale")
    finite = amax.isfinite()
    qmax = float(scale.qmax)
    state: Tensor | None = None
    if scale.mode is not None:
        stored = _power_of_two(amax, fmt)
    elif scale.per_state:
        largest = torch.where(finite, amax, 0.0).amax((-2, -1), keepdim=True)
        state = _divide(largest, scale.type.max_finite * qmax)
        state = torch.where(state == 0, 1.0, state).clamp_(max=_state_cap(scale))
        stored = _round_scale(_divide(amax, qmax) / state, scale)
    else:
        stored = _round_scale(_divide(amax, qmax), scale)
    if state is None:
        zero = (stored == 0) & finite
        used = stored = torch.where(zero, 1.0, stored)
    else:
        used = stored * state
        zero = (used == 0) & finite
    stored = torch.where(finite, stored, _NAN)
    used = torch.where(finite, used, _NAN)
    return BlockScales(
        stored=stored,
        state=state,
        divisor=torch.where(zero, _INF, used),
        multiplier=used,
        zeroed=zero & (amax > 0),
    )


def _divide(value: Tensor, by: float) -> Tensor:
    """Divide by a constant, correctly rounded: CUDA multiplies by 1 / by if `by` is a number."""
    return value / torch.full((), by, dtype=value.dtype, device=value.device)


def _round_scale(value: Tensor, scale: Scale) -> Tensor:
    element = ELEMENTS[scale.type.name]
    assert isinstance(element, FloatElement)
    value = value.clamp(max=scale_cap(scale.type, scale.qmax))
    if element.name == "float32":
        return value
    if scale.round == "up":
        return round_up(value, element)
    return round_clamped(value, element, None)


def _power_of_two(amax: Tensor, fmt: Format) -> Tensor:
    """E8M0 scales of FP32 maxima, as FP32 powers of two."""
    scale = fmt.scale
    assert scale is not None
    top = _floor_log2(scale.qmax.numerator / scale.qmax.denominator)
    if scale.mode == "rceil":
        exponent = _ceil_exponent(_divide(amax, float(scale.qmax)))
    elif scale.mode == "ceil":
        exponent = _ceil_exponent(amax) - top
    elif scale.mode == "even":
        mantissa = fmt.element.man_bits if isinstance(fmt.element, FloatElement) else top
        half = 1 << (22 - mantissa)
        exponent = _floor_exponent((amax.view(torch.int32) + half).view(torch.float32)) - top
    else:
        exponent = _floor_exponent(amax) - top
    return exponent_value(exponent.clamp_(-127, 127 - top))


@cache
def scale_cap(kind: ScaleType, factor: Fraction) -> float:
    """Largest scale of a float type that stays finite in FP32 when multiplied by `factor`."""
    element = ELEMENTS[kind.name]
    assert isinstance(element, FloatElement)
    limit = Fraction(torch.finfo(torch.float32).max) / factor
    if limit >= element.max_finite:
        return float(element.max_finite)
    step = Fraction(2) ** (_floor_log2(float(limit)) - element.man_bits)
    return float(limit // step * step)


@cache
def _state_cap(scale: Scale) -> float:
    """Largest state scale; lower by 2^-20, more than its two roundings in the product can add."""
    factor = scale.qmax * Fraction(scale.type.max_finite) * (1 + Fraction(1, 1 << 20))
    return scale_cap(SCALE_TYPES["float32"], factor)


def _floor_log2(value: float) -> int:
    exponent = 0
    while 2.0 ** (exponent + 1) <= value:
        exponent += 1
    while 2.0**exponent > value:
        exponent -= 1
    return exponent


def _floor_exponent(value: Tensor) -> Tensor:
    """Floor of log2 of non-negative FP32; at most -127 for subnormals and zero."""
    return (value.view(torch.int32) >> 23) - 127


def _ceil_exponent(value: Tensor) -> Tensor:
    """Ceiling of log2 of non-negative FP32; at most -126 for subnormals and zero."""
    bits = value.view(torch.int32)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(torch.int32)
