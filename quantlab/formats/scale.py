"""Block scales: which elements share one scale, and how that scale is stored.

A block is a tile of R value rows by C key channels of one state [dv, dk]. The named axes are
special cases: `row` is 1 x dk (one value row), `key` is dv x 1 (one key channel), `state` is
dv x dk, `blockN` is 1 x N along dk. The last tile of an axis that does not divide is smaller and
has its own maximum. This module imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

ScaleRound = Literal["nearest", "up"]
"""How amax / qmax is rounded to the scale's type; `up` never clips the block's maximum."""

MxMode = Literal["floor", "ceil", "rceil", "even"]
"""How a power-of-two scale follows the block maximum, with E the exponent of qmax:
`floor` 2^(floor(log2 amax) - E) (OCP MX v1.0, 6.3); `ceil` 2^(ceil(log2 amax) - E); `rceil`
2^ceil(log2(amax / qmax)); `even` as floor, of amax rounded half up to the element's mantissa."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleType:
    """A type in which scales are stored.

    Attributes:
        name: the `ml_dtypes` name.
        alias: the short name.
        bits: storage bits of one scale.
        max_finite: largest scale; larger quotients saturate here.
    """

    name: str
    alias: str
    bits: int
    max_finite: float


_TYPES = (
    ScaleType(name="float32", alias="fp32", bits=32, max_finite=float.fromhex("0x1.fffffep127")),
    ScaleType(name="bfloat16", alias="bf16", bits=16, max_finite=float.fromhex("0x1.fep127")),
    ScaleType(name="float16", alias="fp16", bits=16, max_finite=65504.0),
    ScaleType(name="float8_e8m0fnu", alias="e8m0", bits=8, max_finite=2.0**127),
    ScaleType(name="float8_e4m3fn", alias="e4m3", bits=8, max_finite=448.0),
)
SCALE_TYPES: Mapping[str, ScaleType] = MappingProxyType({t.name: t for t in _TYPES})
"""Scale types by canonical name."""
SCALE_ALIASES: Mapping[str, str] = MappingProxyType({t.alias: t.name for t in _TYPES})
"""Short name of a scale type to its canonical name."""

_TILE = re.compile(r"tile([0-9]{1,9})x([0-9]{1,9})")
_BLOCK = re.compile(r"block([0-9]{1,9})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The elements that share a scale: `rows` value rows by `keys` key channels.

    Attributes:
        rows: value rows of a tile; None for all dv of them.
        keys: key channels of a tile; None for all dk of them.
    """

    rows: int | None
    keys: int | None

    def __post_init__(self) -> None:
        for size in (self.rows, self.keys):
            if size is not None and size < 1:
                raise ValueError(f"a tile side must be at least 1, got {size}")
        if (self.rows is None) != (self.keys is None) and 1 not in (self.rows, self.keys):
            raise ValueError("a tile that spans one whole axis must be a row or a key")

    @classmethod
    def parse(cls, text: str) -> Tile | None:
        """Read an axis name: row, key, state, blockN or tileRxC; None if it is none of them."""
        if text in _NAMED:
            return _NAMED[text]
        if match := _TILE.fullmatch(text):
            return cls(rows=int(match[1]), keys=int(match[2]))
        if match := _BLOCK.fullmatch(text):
            return cls(rows=1, keys=int(match[1]))
        return None

    def __str__(self) -> str:
        for name, tile in _NAMED.items():
            if tile == self:
                return name
        return f"block{self.keys}" if self.rows == 1 else f"tile{self.rows}x{self.keys}"

    def shape(self, dv: int, dk: int) -> tuple[int, int]:
        """Rows and keys of a full tile in a state [dv, dk]."""
        rows = dv if self.rows is None else min(self.rows, dv)
        keys = dk if self.keys is None else min(self.keys, dk)
        return max(rows, 1), max(keys, 1)

    def count(self, dv: int, dk: int) -> int:
        """Count the scales of one state, ragged tiles included."""
        rows, keys = self.shape(dv, dk)
        return -(-dv // rows) * -(-dk // keys)


_NAMED: Mapping[str, Tile] = MappingProxyType(
    {
        "row": Tile(rows=1, keys=None),
        "key": Tile(rows=None, keys=1),
        "state": Tile(rows=None, keys=None),
    }
)
AXES = (*_NAMED, "blockN", "tileRxC")
"""The spellings a scale axis may have, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The scale of a format: who shares it, its type, and how it is found from the maximum.

    Attributes:
        tile: the elements that share one scale.
        type: storage type.
        qmax: the element value that the block's maximum is mapped to.
        round: rounding of the stored scale (not for float32 and E8M0).
        mode: rule for E8M0 scales, None for the others.
        per_state: whether the scales themselves are relative to one FP32 scale per state (NVFP4).
    """

    tile: Tile
    type: ScaleType
    qmax: Fraction
    round: ScaleRound = "nearest"
    mode: MxMode | None = None
    per_state: bool = False

    def bits(self, dv: int, dk: int) -> int:
        """Bits of all the scales of one state [dv, dk]."""
        return self.tile.count(dv, dk) * self.type.bits + (32 if self.per_state else 0)
