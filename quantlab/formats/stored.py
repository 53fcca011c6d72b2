"""A stored state as it lies in memory: four-bit codes two to a byte.

`Encoded` keeps one code per element, for study; this is what is written and read, so its bytes are
the bytes of the format.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from quantlab.formats.cast import CastCounts, Encoded
from quantlab.formats.codes import pack_nibbles, unpack_nibbles
from quantlab.formats.element import IntElement
from quantlab.formats.spec import Format


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStates:
    """States in a format, as stored.

    Attributes:
        fmt: the format.
        dk: key channels of a state.
        codes: [rows, heads, dv, dk] of the types of `Encoded.codes`; four-bit codes are uint8
            [rows, heads, dv, ceil(dk / 2)], the first code in the low nibble.
        scales: as `Encoded.scales`.
        state_scale: as `Encoded.state_scale`.
    """

    fmt: Format
    dk: int
    codes: Tensor
    scales: Tensor | None
    state_scale: Tensor | None

    @classmethod
    def of(cls, encoded: Encoded) -> StoredStates:
        """Pack what `encode` returned."""
        codes = encoded.codes
        return cls(
            fmt=encoded.fmt,
            dk=codes.shape[-1],
            codes=pack_nibbles(codes) if encoded.fmt.element.bits == 4 else codes,
            scales=encoded.scales,
            state_scale=encoded.state_scale,
        )

    def encoded(self) -> Encoded:
        """Unpack for `decode`; counts are not stored, and are −1."""
        element, codes = self.fmt.element, self.codes
        if element.bits == 4:
            codes = unpack_nibbles(codes, self.dk, signed=isinstance(element, IntElement))
        unknown = torch.full((), -1, dtype=torch.int64, device=codes.device)
        counts = CastCounts(nonfinite=unknown, clipped=unknown, zeroed=unknown, flushed=unknown)
        return Encoded(
            fmt=self.fmt,
            codes=codes,
            scales=self.scales,
            state_scale=self.state_scale,
            counts=counts,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        parts = (self.codes, self.scales, self.state_scale)
        return sum(x.numel() * x.element_size() for x in parts if x is not None)


def bytes_moved(fmt: Format, elements: int, dv: int, dk: int) -> int:
    """Bytes that a cast from FP32, or its decoder, must move: values, codes and scales once."""
    per_element = 4 + fmt.bits_per_element(dv, dk) / 8
    return int(Fraction(elements) * per_element)
