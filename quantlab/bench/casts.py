"""Casts and decoders of every format that the kernels have, against a device copy and rivals.

A cast is checked bit for bit against `quantlab.formats` on the whole tensor it is timed on, in
slices of rows, before it is timed; a decoder likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantlab.bench.measure import Bench, Row, Timing
from quantlab.dispatch import cast_kernels, cast_launch
from quantlab.formats import Format, decode, encode, parse_format
from quantlab.formats.philox import sr_words
from quantlab.formats.stored import StoredStates, bytes_moved

FORMATS = ("fp16", "bf16", "fp8", "nvfp4", "int8@row", "int4@row")
HEADS, DV, DK = 32, 128, 128
KEYS: dict[str, Any] = {"seed": 2**63 + 5, "layer": 3, "copy": 1, "flush": 7}
CHECKED_ROWS = 16
"""Rows of a slice of the check: 8 Mi elements, at some 20 temporaries of 8 bytes."""


def bench_casts(
    bench: Bench, *, elements: int, heads: int = HEADS, sweep: bool = False
) -> Iterator[Row]:
    """Measure everything; `elements` is rounded up to whole rows of `heads` states."""
    per_row = heads * DV * DK
    rows = -(-elements // per_row)
    x = _states(rows, heads, bench.device)
    streams = torch.arange(rows, device=bench.device)
    copy = bench.copy_rate(x.numel())
    yield Row(name="copy", values={"tb_per_s": copy / 1e12, "elements": float(x.numel())})
    for base in FORMATS:
        for name in (base, f"{base}-sr"):
            yield cast_row(bench, x, streams, parse_format(name), copy)
            if sweep:
                yield from sweep_rows(bench, x, streams, parse_format(name), copy)
        yield decoder_row(bench, x, streams, parse_format(base), copy)
    yield from rival_rows(bench, x, copy)
    again = bench.copy_rate(x.numel())
    yield Row(name="copy again", values={"tb_per_s": again / 1e12, "of_first": again / copy})


def cast_row(
    bench: Bench,
    x: Tensor,
    streams: Tensor,
    fmt: Format,
    copy: float,
    cast: Callable[..., StoredStates] | None = None,
) -> Row:
    """Measure one cast; `cast` instead of the kernels' own is for testing the check."""
    encode_states: Callable[..., StoredStates] = cast or cast_kernels()[0]

    def call() -> StoredStates:
        return encode_states(x, fmt, streams=streams, **KEYS)

    return bench.measured(
        f"encode {fmt.short}",
        call,
        check=lambda: cast_fault(call(), x, streams, fmt),
        values=_rates(fmt, x, copy),
    )


def decoder_row(bench: Bench, x: Tensor, streams: Tensor, fmt: Format, copy: float) -> Row:
    """Measure one decoder, on what the cast makes of x."""
    name = f"decode {fmt.short}"
    try:
        cast, load = cast_kernels()
        stored = cast(x, fmt, streams=streams, **KEYS)
    except Exception as error:
        # what keeps the cast from running keeps this from being measured
        return Row(name=name, status="refused", reason=f"{type(error).__name__}: {error}"[:300])

    def check() -> str | None:
        values = load(stored)
        for rows in _slices(x):
            differ = differing(values[rows], decode(_part(stored, rows).encoded()))
            if differ:
                return f"{differ} values differ from the reference in rows {rows.start} on"
        return None

    return bench.measured(name, lambda: load(stored), check=check, values=_rates(fmt, x, copy))


def cast_fault(stored: StoredStates, x: Tensor, streams: Tensor, fmt: Format) -> str | None:
    """Say where codes or scales differ from the reference's, or None."""
    heads, dv, dk = x.shape[1:]
    for rows in _slices(x):
        words = None
        if fmt.needs_words:
            words = sr_words(stream=streams[rows], heads=heads, dv=dv, dk=dk, **KEYS)
        want = StoredStates.of(encode(x[rows], fmt, words))
        got = _part(stored, rows)
        for part in ("codes", "scales", "state_scale"):
            a, b = getattr(got, part), getattr(want, part)
            if a is not None and (differ := differing(a, b)):
                return f"{differ} {part} differ from the reference in rows {rows.start} on"
    return None


def differing(a: Tensor, b: Tensor) -> int:
    """Count elements with other bits, NaN equal to NaN."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    unequal = a.view(integers[a.element_size()]) != b.view(integers[b.element_size()])
    if a.is_floating_point():
        unequal &= ~(a.isnan() & b.isnan())
    return int(unequal.sum())


def sweep_rows(bench: Bench, x: Tensor, streams: Tensor, fmt: Format, copy: float) -> Iterator[Row]:
    """Measure other launches of a cast, and of the decoder of a nearest one.

    A launch changes no bit, so only the first is checked.
    """
    cast, load = cast_kernels()
    launch_of = cast_launch()
    tiles = {
        f"{n}/{w}": launch_of(elements=n, warps=w)
        for n in (512, 1024, 2048, 4096)
        for w in (1, 2, 4, 8)
        if n >= 256 * w
    }
    states = {
        f"state {w}/{r}": launch_of(state_warps=w, state_registers=r)
        for w, r in ((4, 255), (8, 255), (8, 168), (8, 128), (16, 128), (16, 80), (16, 64))
    }
    calls: list[tuple[str, Callable[[], Any]]] = []
    for cut, launch in (states if fmt.element.name == "float4_e2m1fn" else tiles).items():
        encode_by = partial(cast, x, fmt, streams=streams, launch=launch, **KEYS)
        calls.append((f"encode {fmt.short} {cut}", encode_by))
    if not fmt.needs_words:
        stored = cast(x, fmt, streams=streams, **KEYS)
        for cut, launch in tiles.items():
            calls.append((f"decode {fmt.short} {cut}", partial(load, stored, launch=launch)))
    for name, call in calls:
        yield bench.measured(
            name,
            call,
            check=lambda: None,
            values=_rates(fmt, x, copy),
            repeats=max(3, bench.repeats // 4),
        )


def rival_rows(bench: Bench, x: Tensor, copy: float) -> Iterator[Row]:
    """Measure what is installed beside: torch's casts, torch.compile, torchao."""
    fp8, fp16 = parse_format("fp8"), parse_format("fp16")
    compiled = torch.compile(plain_fp8) if bench.on_cuda else plain_fp8

    def fp8_fault() -> str | None:
        codes, _ = compiled(x[:1])
        ours = encode(x[:1], fp8).codes.view(torch.float8_e4m3fn)
        share = differing(codes.view(x[:1].shape), ours) / ours.numel()
        return None if share < 1e-3 else f"{share:.1e} of its codes differ from ours"

    yield bench.measured(
        "rival fp8 torch.compile", lambda: compiled(x), check=fp8_fault, values=_rates(fp8, x, copy)
    )
    yield bench.measured(
        "rival fp16 torch.to",
        lambda: x.to(torch.float16),
        check=lambda: None,
        values=_rates(fp16, x, copy),
    )
    yield bench.measured(
        "rival nvfp4 torchao",
        lambda: _torchao(x[: max(1, x.shape[0] // 16)]),
        check=lambda: None,
        values=_rates(parse_format("nvfp4"), x[: max(1, x.shape[0] // 16)], copy),
        repeats=3,
    )


def plain_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast to FP8 with a scale per 128 in three lines, as one writes it in torch."""
    blocks = x.view(-1, 128)
    scale = blocks.abs().amax(1, keepdim=True) / 448.0
    return (blocks / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale


def _torchao(x: Tensor) -> Any:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    return NVFP4Tensor.to_nvfp4(x.view(-1, x.shape[-1]))


def _states(rows: int, heads: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(11)
    x = torch.empty((rows, heads, DV, DK), device=device)
    return x.normal_(generator=generator)


def _slices(x: Tensor) -> Iterator[slice]:
    for start in range(0, x.shape[0], CHECKED_ROWS):
        yield slice(start, min(start + CHECKED_ROWS, x.shape[0]))


def _part(stored: StoredStates, rows: slice) -> StoredStates:
    return StoredStates(
        fmt=stored.fmt,
        dk=stored.dk,
        codes=stored.codes[rows],
        scales=None if stored.scales is None else stored.scales[rows],
        state_scale=None if stored.state_scale is None else stored.state_scale[rows],
    )


def _rates(fmt: Format, x: Tensor, copy: float) -> Callable[[Timing], dict[str, float]]:
    moved = bytes_moved(fmt, x.numel(), x.shape[-2], x.shape[-1])

    def values(timing: Timing) -> dict[str, float]:
        rate = moved / timing.median
        return {"floor_ms": moved / copy * 1e3, "tb_per_s": rate / 1e12, "of_copy": rate / copy}

    return values
