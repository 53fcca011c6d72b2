"""Element types: what one stored number can be.

A format's element is described by a handful of parameters (exponent bits, mantissa bits, bias, how
the top codes are used); everything else (largest value, smallest step, overflow threshold) is
derived, so a table entry cannot contradict itself. Names are those of `ml_dtypes`.

Adding an element type is one entry in `ELEMENTS`. This module imports no torch.

Sources: IEEE 754-2019 (float16, float32, float64); Micikevicius et al. 2022, "FP8 formats for deep
learning" (E4M3FN, E5M2); OCP Microscaling Formats (MX) v1.0, 2023, sections 5.3 and 5.4 (E2M1,
E8M0); Noune et al. 2022, "8-bit numerical formats" (FNUZ).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

Encoding = Literal["ieee", "fn", "fnuz", "finite"]
"""How the top codes are used: inf and NaN as in IEEE 754; only the all-ones code is NaN; only the
code of minus zero is NaN (and there is no minus zero); every code is finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatElement:
    """A binary floating-point element type, with gradual underflow.

    Attributes:
        name: the `ml_dtypes` name.
        alias: the short name.
        exp_bits: width of the exponent field, in bits.
        man_bits: width of the stored mantissa, in bits.
        bias: exponent bias.
        encoding: use of the top codes.
        source: where the parameters are defined.
    """

    name: str
    alias: str
    exp_bits: int
    man_bits: int
    bias: int
    encoding: Encoding
    source: str

    def __post_init__(self) -> None:
        if self.exp_bits < 1 or self.man_bits < 1 or self.bias < 0:
            raise ValueError(f"{self.name}: exponent and mantissa bits must be >= 1, bias >= 0")

    @property
    def bits(self) -> int:
        """Storage bits of one code."""
        return 1 + self.exp_bits + self.man_bits

    @property
    def has_inf(self) -> bool:
        """Whether some code is an infinity."""
        return self.encoding == "ieee"

    @property
    def has_nan(self) -> bool:
        """Whether some code is a NaN."""
        return self.encoding != "finite"

    @property
    def signed_zero(self) -> bool:
        """Whether minus zero has a code."""
        return self.encoding != "fnuz"

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def emax(self) -> int:
        """Exponent of the largest finite number."""
        top = (1 << self.exp_bits) - 1 - self.bias
        return top - 1 if self.encoding == "ieee" else top

    @property
    def max_finite(self) -> Fraction:
        """Largest finite value."""
        lost = 2 if self.encoding == "fn" else 1
        return (2 - lost * Fraction(1, 1 << self.man_bits)) * Fraction(2) ** self.emax

    @property
    def smallest_normal(self) -> Fraction:
        """Smallest positive normal value."""
        return Fraction(2) ** self.emin

    @property
    def smallest_subnormal(self) -> Fraction:
        """Smallest positive value: the step of the subnormal range and of the first gap."""
        return Fraction(2) ** (self.emin - self.man_bits)

    @property
    def overflow_threshold(self) -> Fraction:
        """The midpoint beyond the largest finite value: where rounding to nearest overflows."""
        return self.max_finite + Fraction(2) ** (self.emax - self.man_bits - 1)

    @property
    def overflows_at_tie(self) -> bool:
        """Whether the threshold itself overflows: the largest mantissa is odd, so even is above."""
        return self.encoding != "fn"

    @property
    def nan_code(self) -> int | None:
        """The code written for a NaN (quiet, positive), or None."""
        if self.encoding == "ieee":
            return (((1 << self.exp_bits) - 1) << self.man_bits) | (1 << (self.man_bits - 1))
        if self.encoding == "fn":
            return (1 << (self.bits - 1)) - 1
        return 1 << (self.bits - 1) if self.encoding == "fnuz" else None

    def holds(self, value: Fraction) -> bool:
        """Whether `value` is exactly a finite value of this type."""
        size = abs(value)
        if size == 0:
            return True
        if size > self.max_finite:
            return False
        exponent = self.emin
        while Fraction(2) ** (exponent + 1) <= size:
            exponent += 1
        return (size / Fraction(2) ** (exponent - self.man_bits)).denominator == 1

    def value(self, code: int) -> float:
        """Decode one code.

        Args:
            code: an unsigned code of `bits` bits.

        Returns:
            Its value; infinities and NaN where the encoding has them.
        """
        sign = -1.0 if code >> (self.bits - 1) else 1.0
        magnitude = code & ((1 << (self.bits - 1)) - 1)
        field, mantissa = magnitude >> self.man_bits, magnitude & ((1 << self.man_bits) - 1)
        if self.encoding == "fnuz" and sign < 0 and magnitude == 0:
            return float("nan")
        if self.encoding == "fn" and magnitude == (1 << (self.bits - 1)) - 1:
            return float("nan")
        if self.encoding == "ieee" and field == (1 << self.exp_bits) - 1:
            return float("nan") if mantissa else sign * float("inf")
        if field == 0:
            size = mantissa * self.smallest_subnormal
        else:
            step = Fraction(2) ** (field - self.bias - self.man_bits)
            size = ((1 << self.man_bits) + mantissa) * step
        return sign * float(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntElement:
    """A signed integer element type, used symmetrically: -qmax .. qmax.

    Attributes:
        name: the `ml_dtypes` (or numpy) name, also its short name.
        bits: storage bits of one code.
        source: where its use is defined.
    """

    name: str
    bits: int
    source: str

    @property
    def alias(self) -> str:
        """The short name."""
        return self.name

    @property
    def max_finite(self) -> Fraction:
        """Largest value; the most negative code is never written."""
        return Fraction((1 << (self.bits - 1)) - 1)

    @property
    def smallest_subnormal(self) -> Fraction:
        """The step of the grid."""
        return Fraction(1)

    @property
    def signed_zero(self) -> bool:
        """Integers have one zero."""
        return False

    @property
    def nan_code(self) -> None:
        """Integers have no NaN."""
        return None

    def holds(self, value: Fraction) -> bool:
        """Whether `value` is exactly a value of this type."""
        return value.denominator == 1 and abs(value) <= self.max_finite


Element = FloatElement | IntElement

_IEEE = "IEEE 754-2019, 3.6"
_FP8 = "Micikevicius et al. 2022, table 1"
_MX = "OCP MX v1.0, 5.3"


def _float(name: str, alias: str, exp: int, man: int, encoding: Encoding, src: str) -> FloatElement:
    bias = (1 << (exp - 1)) - (0 if encoding == "fnuz" else 1)
    return FloatElement(
        name=name,
        alias=alias,
        exp_bits=exp,
        man_bits=man,
        bias=bias,
        encoding=encoding,
        source=src,
    )


_TABLE: tuple[Element, ...] = (
    _float("float64", "fp64", 11, 52, "ieee", _IEEE),
    _float("float32", "fp32", 8, 23, "ieee", _IEEE),
    _float("float16", "fp16", 5, 10, "ieee", _IEEE),
    _float("bfloat16", "bf16", 8, 7, "ieee", "the upper half of float32"),
    _float("float8_e4m3fn", "fp8", 4, 3, "fn", _FP8),
    _float("float8_e5m2", "fp8-e5m2", 5, 2, "ieee", _FP8),
    _float("float8_e4m3fnuz", "fp8-fnuz", 4, 3, "fnuz", "Noune et al. 2022, table 1"),
    _float("float4_e2m1fn", "fp4", 2, 1, "finite", _MX),
    IntElement(name="int4", bits=4, source=_MX),
    IntElement(name="int6", bits=6, source="by analogy with int8"),
    IntElement(name="int8", bits=8, source=_MX),
    IntElement(name="int16", bits=16, source="FlashInfer PR 2645"),
)

ELEMENTS: Mapping[str, Element] = MappingProxyType({e.name: e for e in _TABLE})
"""Element types by canonical name."""

ELEMENT_ALIASES: Mapping[str, str] = MappingProxyType({e.alias: e.name for e in _TABLE})
"""Short name of an element type to its canonical name."""
