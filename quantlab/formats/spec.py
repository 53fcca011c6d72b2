"""A state format: element type, block scale, rounding, and what happens beyond the range.

`Format` is the value that the rest of quantlab passes around. `str()` gives the canonical long
form, which `parse_format` reads back to an equal value; `short` gives the alias used in legends.
This module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from quantlab.formats.element import Element, FloatElement, IntElement
from quantlab.formats.scale import Scale

Rounding = Literal["rtn", "sr"]
"""Round to nearest, ties to even; or stochastic rounding."""

Overflow = Literal["ieee", "saturate"]
"""Unscaled values beyond the largest finite one: infinity (NaN where the type has no infinity)
from the overflow threshold on, or the largest finite value, infinities included."""


class FormatError(ValueError):
    """A format that does not exist or makes no sense; the message says what would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a state is stored.

    Attributes:
        element: type of one stored number.
        scale: the block scale, or None.
        rounding: "rtn" or "sr".
        overflow: rule for unscaled elements; scaled ones always saturate at qmax.
    """

    element: Element
    scale: Scale | None = None
    rounding: Rounding = "rtn"
    overflow: Overflow = "saturate"

    def __post_init__(self) -> None:
        element, scale = self.element, self.scale
        if self.rounding == "sr" and element.name in ("float64", "float32"):
            raise FormatError(
                f"{element.name}-sr: states are computed in FP32, so nothing would be rounded"
            )
        if scale is None:
            if isinstance(element, IntElement) or not element.has_nan:
                name = element.alias
                raise FormatError(
                    f"{element.name} needs a block scale: {name}@row (one per value row), "
                    f"{name}@key (one per key channel), {name}@state, {name}@block32 or "
                    f"{name}@tile32x128" + ("; or nvfp4, mxfp4" if name == "fp4" else "")
                )
        elif isinstance(element, FloatElement) and element.bits > 8:
            raise FormatError(f"{element.name} takes no scale; use it as {element.alias}")
        else:
            _check_scale(element, scale)
            if self.overflow != "saturate":
                raise FormatError("overflow= is for unscaled formats; a scaled one saturates")

    @property
    def needs_words(self) -> bool:
        """Whether storing a value takes a random word."""
        return self.rounding == "sr"

    @property
    def is_exact(self) -> bool:
        """Whether a state computed in FP32 is stored as it is."""
        return self.element.name in ("float64", "float32")

    @property
    def short(self) -> str:
        """The shortest name, for legends: `nvfp4-sr`, `int8@row`."""
        from quantlab.formats.registry import short_name

        return short_name(self)

    def bits_per_element(self, dv: int, dk: int) -> Fraction:
        """Exact storage bits per state element, scales included.

        Args:
            dv: value rows of the state.
            dk: key channels of the state.

        Returns:
            Bits, as a fraction.
        """
        if dv < 1 or dk < 1:
            raise ValueError(f"a state has at least one row and one channel, got {dv} x {dk}")
        scales = 0 if self.scale is None else self.scale.bits(dv, dk)
        return self.element.bits + Fraction(scales, dv * dk)

    def __str__(self) -> str:
        from quantlab.formats.grammar import canonical

        return canonical(self)


def _check_scale(element: Element, scale: Scale) -> None:
    if not 1 <= scale.qmax <= element.max_finite:
        raise FormatError(
            f"qmax={_number(scale.qmax)} is out of range: {element.name} takes "
            f"1 <= qmax <= {_number(element.max_finite)}"
        )
    if not element.holds(scale.qmax):
        raise FormatError(f"qmax={_number(scale.qmax)} is not a value of {element.name}")
    name = scale.type.name
    if (scale.mode is not None) != (name == "float8_e8m0fnu"):
        raise FormatError("mode= goes with scale=e8m0, and only with it")
    if scale.round == "up" and name in ("float32", "float8_e8m0fnu"):
        raise FormatError(
            f"scale_round=up needs a rounded scale (bf16, fp16 or e4m3), not {name}"
            + ("; name an E8M0 rule with mode=" if name == "float8_e8m0fnu" else "")
        )
    if scale.per_state and name != "float8_e4m3fn":
        raise FormatError("state_scale= goes with scale=e4m3 (two levels, as NVFP4)")


def _number(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else str(float(value))
