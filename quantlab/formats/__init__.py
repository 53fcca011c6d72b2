"""How a state is stored: element types, block scales, rounding, counter RNG, names.

`parse_format("nvfp4-sr")` names a format; `quantize` stores and loads a state at once, `encode` and
`decode` do the two halves with real codes and scales; `quantlab.formats.philox` draws the words
that stochastic rounding takes. Names and tables import no torch; the casts import it on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from quantlab.formats.element import ELEMENTS
from quantlab.formats.grammar import parse_format
from quantlab.formats.registry import FORMATS, PRESETS
from quantlab.formats.spec import Format, FormatError

if TYPE_CHECKING:
    from quantlab.formats.cast import CastCounts, Encoded, decode, encode, quantize

__all__ = [
    "ELEMENTS",
    "FORMATS",
    "PRESETS",
    "CastCounts",
    "Encoded",
    "Format",
    "FormatError",
    "decode",
    "encode",
    "parse_format",
    "quantize",
]

_NEED_TORCH = ("CastCounts", "Encoded", "decode", "encode", "quantize")


def __getattr__(name: str) -> object:
    if name in _NEED_TORCH:
        return getattr(import_module("quantlab.formats.cast"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
