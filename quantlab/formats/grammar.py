"""Names of formats: reading and printing.

Grammar::

    <element>[@<scale>][:<option>=<value>,...][-<rounding>]

    element    an ml_dtypes name or its alias: float8_e4m3fn or fp8, int8, ...; or a name in FORMATS
               or PRESETS, which stands for a whole format (options may follow)
    scale      row | key | state | blockN | tileRxC | none
    option     qmax=<value>  scale=fp32|bf16|fp16|e8m0|e4m3  scale_round=nearest|up
               mode=floor|ceil|rceil|even  state_scale=fp32  overflow=ieee|saturate
    rounding   rtn (also the default) | sr

The canonical form spells element and scale types with their ml_dtypes names, names the block axis
always, prints options only where they differ from the default (an E8M0 rule always), and `-sr`
but not `-rtn`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple, cast, get_args

from quantlab.formats.element import ELEMENT_ALIASES, ELEMENTS, Element, FloatElement
from quantlab.formats.registry import FORMATS, PRESETS
from quantlab.formats.scale import (
    AXES,
    SCALE_ALIASES,
    SCALE_TYPES,
    MxMode,
    Scale,
    ScaleRound,
    ScaleType,
    Tile,
)
from quantlab.formats.spec import Format, FormatError, Overflow, Rounding, _number

OPTIONS = ("qmax", "scale", "scale_round", "mode", "state_scale", "overflow")
"""Options of a format, in the grammar's order."""
_NUMBER = re.compile(r"[0-9]{1,5}(\.[0-9]{1,5})?")
_DEFAULT_TILE = {"float8_e4m3fn": "block128", "float8_e5m2": "block128"}
"""Scales of elements named bare: the paper's FP8 (one FP32 scale per 128 along dk)."""


class _Parts(NamedTuple):
    name: str
    scale: str | None
    options: dict[str, str]
    rounding: Rounding | None


@lru_cache(maxsize=512)
def parse_format(text: str) -> Format:
    """Read the name of a format.

    Args:
        text: a short name (`nvfp4-sr`), a preset (`vllm-int8-row`) or the grammar above.

    Returns:
        The format; `str()` of it is canonical and parses back to an equal value.

    Raises:
        FormatError: a ValueError; unknown names come with the known ones and the nearest match,
            senseless combinations with what is wrong.
    """
    parts = _split(text.strip())
    try:
        return _build(parts)
    except FormatError as error:
        prefix = "" if str(error).startswith("unknown format") else f"format {text.strip()!r}: "
        raise FormatError(f"{prefix}{error}") from None


def _split(text: str) -> _Parts:
    if not text:
        raise FormatError("empty format name")
    rounding: Rounding | None = None
    if text not in PRESETS:
        head, dash, tail = text.rpartition("-")
        if dash and tail in get_args(Rounding):
            text, rounding = head, cast(Rounding, tail)
    head, colon, tail = text.partition(":")
    if colon and not tail:
        raise FormatError(f"format {text!r}: no option after ':'")
    name, at, scale = head.partition("@")
    options: dict[str, str] = {}
    for item in tail.split(",") if tail else []:
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals or not value:
            raise FormatError(f"format {text!r}: options are written key=value, got {item!r}")
        if key not in OPTIONS:
            raise FormatError(f"format {text!r}: {_unknown('option', key, OPTIONS)}")
        if key in options:
            raise FormatError(f"format {text!r}: option {key} is given twice")
        options[key] = value
    return _Parts(name.strip(), scale.strip() if at else None, options, rounding)


def _build(parts: _Parts) -> Format:
    named = PRESETS.get(parts.name) or FORMATS.get(parts.name)
    if named is not None and named.spec != _element_name(parts.name) and parts.scale is None:
        base = _split(named.spec)
        parts = _Parts(
            base.name, base.scale, base.options | parts.options, parts.rounding or base.rounding
        )
    name = _element_name(parts.name)
    if name is None:
        if named is not None:
            raise FormatError(f"{parts.name} names its scale already: {named.spec}")
        head, dash, tail = parts.name.rpartition("-")
        if dash and (_element_name(head) or head in FORMATS):
            raise FormatError(_unknown("rounding", tail, get_args(Rounding)))
        shown = list(dict.fromkeys([*FORMATS, *ELEMENT_ALIASES]))
        raise FormatError(
            _unknown("format", parts.name, shown, hidden=[*PRESETS, *ELEMENTS])
            + f", their ml_dtypes names, and {len(PRESETS)} engine presets such as vllm-fp16-sr"
        )
    element = ELEMENTS[name]
    tile = _tile(element, parts.scale)
    rounding = parts.rounding or "rtn"
    if tile is None:
        for key in parts.options:
            if key != "overflow":
                raise FormatError(f"{key}= needs a scale, and {element.name} has none here")
        wide = isinstance(element, FloatElement) and element.bits > 8
        overflow = _choice(
            "overflow", parts.options.get("overflow", "ieee" if wide else "saturate"), Overflow
        )
        return Format(element=element, rounding=rounding, overflow=cast(Overflow, overflow))
    if "overflow" in parts.options:
        raise FormatError("overflow= is for unscaled formats; a scaled one saturates at qmax")
    return Format(element=element, scale=_scale(element, tile, parts.options), rounding=rounding)


def _element_name(name: str) -> str | None:
    return name if name in ELEMENTS else ELEMENT_ALIASES.get(name)


def _tile(element: Element, text: str | None) -> Tile | None:
    if text is None:
        default = _DEFAULT_TILE.get(element.name)
        return None if default is None else Tile.parse(default)
    if text == "none":
        return None
    try:
        tile = Tile.parse(text)
    except ValueError as error:
        raise FormatError(f"scale @{text}: {error}") from None
    if tile is None:
        raise FormatError(_unknown("scale axis", text, [*AXES, "none"]))
    return tile


def _scale(element: Element, tile: Tile, options: Mapping[str, str]) -> Scale:
    scale_type = _scale_type("scale", options.get("scale", "fp32"))
    e8m0 = scale_type.name == "float8_e8m0fnu"
    mode = options.get("mode", "floor" if e8m0 else None)
    state = options.get("state_scale")
    if state is not None and _scale_type("state_scale", state).name != "float32":
        raise FormatError(f"state_scale={state}: only fp32 is defined")
    return Scale(
        tile=tile,
        type=scale_type,
        qmax=_qmax(options["qmax"]) if "qmax" in options else element.max_finite,
        round=cast(
            ScaleRound,
            _choice("scale_round", options.get("scale_round", "nearest"), ScaleRound),
        ),
        mode=None if mode is None else cast(MxMode, _choice("mode", mode, MxMode)),
        per_state=state is not None,
    )


def _qmax(text: str) -> Fraction:
    if not _NUMBER.fullmatch(text):
        raise FormatError(f"qmax={text} is not a number such as 240")
    return Fraction(text)


def _scale_type(option: str, text: str) -> ScaleType:
    name = SCALE_ALIASES.get(text, text)
    if name not in SCALE_TYPES:
        raise FormatError(_unknown(option, text, [*SCALE_ALIASES, *SCALE_TYPES]))
    return SCALE_TYPES[name]


def _choice(option: str, text: str, literal: object) -> str:
    known = get_args(literal)
    if text not in known:
        raise FormatError(_unknown(option, text, known))
    return text


def _unknown(kind: str, name: str, known: Iterable[str], hidden: Iterable[str] = ()) -> str:
    names = list(known)
    near = difflib.get_close_matches(name.lower(), [*names, *hidden], n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {name!r}.{hint} Known: {', '.join(names)}"


def canonical(fmt: Format) -> str:
    """Print a format in its long form."""
    options: list[str] = []
    scale = fmt.scale
    text = fmt.element.name
    if scale is None:
        wide = isinstance(fmt.element, FloatElement) and fmt.element.bits > 8
        if not wide:
            text += "@none"
        if fmt.overflow != ("ieee" if wide else "saturate"):
            options.append(f"overflow={fmt.overflow}")
    else:
        text += f"@{scale.tile}"
        if scale.qmax != fmt.element.max_finite:
            options.append(f"qmax={_number(scale.qmax)}")
        if scale.type.name != "float32":
            options.append(f"scale={scale.type.name}")
        if scale.round != "nearest":
            options.append(f"scale_round={scale.round}")
        if scale.mode is not None:
            options.append(f"mode={scale.mode}")
        if scale.per_state:
            options.append("state_scale=float32")
    if options:
        text += ":" + ",".join(options)
    return text + ("-sr" if fmt.rounding == "sr" else "")


def with_element_alias(text: str) -> str:
    """Shorten the type names in a canonical form; the result parses to the same format."""
    head, colon, tail = text.partition(":")
    name, at, scale = head.partition("@")
    for alias, scale_name in SCALE_ALIASES.items():
        tail = tail.replace(f"scale={scale_name}", f"scale={alias}")
    return ELEMENTS[name].alias + at + scale + colon + tail
