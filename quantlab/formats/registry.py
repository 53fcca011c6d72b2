"""Named formats and presets: one table each.

`FORMATS` holds the names quantlab teaches, `PRESETS` the state formats that serving engines ship
or propose, with their row in the survey of September 2026 (31 rows; rows without an entry either
keep extra state, which no format alone can hold, or do not say what they store).

To add a format that the grammar can already express, add one entry to `FORMATS` (or `PRESETS`).
To add an element type, add one entry to `quantlab.formats.element.ELEMENTS`; casts, codes, bits,
names and tests follow from its parameters. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from quantlab.formats.spec import Format


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatEntry:
    """A named format.

    Attributes:
        spec: what the name stands for, in the grammar's long form.
        summary: one line for listings.
    """

    spec: str
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A state format of a serving engine.

    Attributes:
        spec: the format, in the grammar's long form.
        row: row of the survey.
        project: who ships or proposes it.
        source: where that is said.
    """

    spec: str
    row: int
    project: str
    source: str


FORMATS: Mapping[str, FormatEntry] = MappingProxyType(
    {
        "fp64": FormatEntry(spec="float64", summary="exact storage, for proofs in FP64"),
        "fp32": FormatEntry(spec="float32", summary="the reference: what states are computed in"),
        "fp16": FormatEntry(spec="float16", summary="IEEE half, infinity from 65520"),
        "bf16": FormatEntry(spec="bfloat16", summary="upper half of FP32"),
        "fp8": FormatEntry(
            spec="float8_e4m3fn@block128", summary="E4M3, FP32 scale per 128 along dk"
        ),
        "fp8-e5m2": FormatEntry(
            spec="float8_e5m2@block128", summary="E5M2, FP32 scale per 128 along dk"
        ),
        "nvfp4": FormatEntry(
            spec="float4_e2m1fn@block16:scale=float8_e4m3fn,state_scale=float32",
            summary="E2M1, E4M3 scale per 16 along dk, FP32 scale per state",
        ),
        "mxfp4": FormatEntry(
            spec="float4_e2m1fn@block32:scale=float8_e8m0fnu,mode=floor",
            summary="E2M1, power-of-two scale per 32 along dk",
        ),
        "mxfp8": FormatEntry(
            spec="float8_e4m3fn@block32:scale=float8_e8m0fnu,mode=floor",
            summary="E4M3, power-of-two scale per 32 along dk",
        ),
    }
)
"""Formats by short name. Any element with any scale is a format too: see the grammar."""


def _preset(spec: str, row: int, project: str, source: str) -> Preset:
    return Preset(spec=spec, row=row, project=project, source=source)


PRESETS: Mapping[str, Preset] = MappingProxyType({})
"""Engine presets by name."""


@cache
def _short_names() -> Mapping[str, str]:
    return {entry.spec: name for name, entry in FORMATS.items()}


def short_name(fmt: Format) -> str:
    """Return the shortest name of a format that parses back to it."""
    from quantlab.formats.grammar import canonical, with_element_alias

    base = canonical(fmt).removesuffix("-sr")
    suffix = "-sr" if fmt.rounding == "sr" else ""
    best = [name for spec, name in _short_names().items() if spec == base]
    return (best[0] if best else with_element_alias(base)) + suffix
