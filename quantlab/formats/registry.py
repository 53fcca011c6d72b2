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


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "vllm-fp32": _preset("fp32", 1, "vLLM, Nemotron-H default", "vllm#39032"),
        "vllm-fp16-sr": _preset("fp16-sr", 2, "vLLM", "vllm#35753"),
        "sglang-fp16-sr": _preset("fp16-sr", 3, "SGLang", "sglang#26929"),
        "sglang-bf16-sr": _preset("bf16-sr", 4, "SGLang, unmerged", "sglang#27975"),
        "trtllm-fp16-sr": _preset("fp16-sr", 5, "TensorRT-LLM", "TensorRT-LLM#11972"),
        "nemotron-super-fp16": _preset("fp16", 6, "Nemotron 3 Super", "Nemotron docs"),
        "trtllm-fp32": _preset("fp32", 7, "TensorRT-LLM, Nemotron-Nano", "TensorRT-LLM#14448"),
        "flashinfer-int16-row": _preset("int16@row", 8, "FlashInfer", "flashinfer#2645"),
        "flashinfer-fp16-sr": _preset("fp16-sr", 8, "FlashInfer", "flashinfer#2645"),
        "flashinfer-int8-row": _preset("int8@row", 9, "FlashInfer", "flashinfer#3324"),
        "flashinfer-int8-row-sr": _preset("int8@row-sr", 9, "FlashInfer", "flashinfer#3324"),
        "flashinfer-int16-row-sr": _preset("int16@row-sr", 9, "FlashInfer", "flashinfer#3324"),
        "flashinfer-fp8-row": _preset("fp8@row", 9, "FlashInfer", "flashinfer#3324"),
        "flashinfer-fp8-row-sr": _preset("fp8@row-sr", 9, "FlashInfer", "flashinfer#3324"),
        "vllm-int8-row": _preset("int8@row", 10, "vLLM, open", "vllm#40012"),
        "vllm-int8-row-sr": _preset("int8@row-sr", 10, "vLLM, open", "vllm#40012"),
        "vllm-int16-row": _preset("int16@row", 10, "vLLM, open", "vllm#40012"),
        "vllm-int16-row-sr": _preset("int16@row-sr", 10, "vLLM, open", "vllm#40012"),
        "vllm-fp8-row": _preset("fp8@row", 10, "vLLM, open", "vllm#40012"),
        "vllm-fp8-row-sr": _preset("fp8@row-sr", 11, "vLLM with ReplaySSM, open", "vllm#52962"),
        "sglang-int8-snapshot": _preset("int8@key:scale=bf16", 14, "SGLang", "sglang#28185"),
        "sglang-fp8-tile": _preset(
            "fp8@tile32x128:qmax=240", 16, "SGLang, proposal", "sglang#40706"
        ),
        "hipfire-int8-row-sr": _preset("int8@row-sr", 18, "hipfire, if per row", "hipfire#384"),
        "lattice-fp16": _preset("fp16", 20, "lattice", "lattice#484"),
        "imp-bf16": _preset("bf16", 21, "imp", "imp#1776"),
        "vllm-tpu-bf16": _preset("bf16", 22, "vLLM on TPU", "tpu-inference#2482"),
        "atom-fp16": _preset("fp16", 23, "ATOM", "ATOM#2130"),
        "atom-bf16": _preset("bf16", 23, "ATOM", "ATOM#2130"),
        "omlx-int8-row": _preset("int8@row", 24, "oMLX, open", "omlx#2366"),
        "llamacpp-fp16": _preset("fp16", 27, "llama.cpp, closed", "llama.cpp#16982"),
    }
)
"""Engine presets by name; block maxima and scales as the engine defines them, random words ours."""


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
