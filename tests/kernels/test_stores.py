"""Stores on Triton against `quantlab.formats.quantize`, bit for bit.

The reference has its own proofs against ml_dtypes, torch and FP64 oracles (tests/formats). Every
comparison here is of bits, NaN counted equal to NaN; there is no tolerance.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from quantlab.formats import parse_format, quantize
from quantlab.formats.philox import sr_words
from tests.kernels.device import DEVICE, MARKS

from quantlab_kernels.draws import COPY_STRIDE  # isort: skip
from quantlab_kernels.stores import (  # isort: skip
    STORE_NAMES,
    signed_seed,
    store_and_load,
    store_kind,
    tile_shape,
    tile_warps,
)

pytestmark = MARKS

NAMES = [name + suffix for name in STORE_NAMES if name != "fp32" for suffix in ("", "-sr")]
# stream ids and seeds beyond 31 bits are legal counter and key words
STREAMS = torch.tensor([5, 2**31 + 7])
SEED = -123456789012345


@triton.jit(do_not_specialize=["seed", "layer_copy", "flush"])
def store_kernel(
    x_ptr,
    out_ptr,
    streams_ptr,
    seed,
    layer_copy,
    flush,
    heads,
    dv,
    dk,
    FORMAT: tl.constexpr,
    SR: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    QUADS: tl.constexpr,
):
    """One program per (head, row): its whole state, so that a state scale needs no second pass."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    value = tl.arange(0, BLOCK_V)
    channel = tl.arange(0, BLOCK_K)
    mask = (value < dv)[:, None] & (channel < dk)[None, :]
    start = (row.to(tl.int64) * heads + head) * dv * dk
    place = start + value[:, None] * dk + channel[None, :]
    x = tl.load(x_ptr + place, mask=mask, other=0.0)
    stream = tl.load(streams_ptr + row)
    y = store_and_load(
        x,
        seed,
        layer_copy,
        stream,
        flush,
        head * dv * dk,
        dk,
        FORMAT,
        SR,
        BLOCK_V,
        BLOCK_K,
        QUADS,
    )
    tl.store(out_ptr + place, y, mask=mask)


def stored(x: torch.Tensor, name: str, streams: torch.Tensor = STREAMS) -> torch.Tensor:
    rows, heads, dv, dk = x.shape
    kind, x = store_kind(parse_format(name)), x.to(DEVICE)
    block_v, block_k = tile_shape(dv, dk)
    out = torch.empty_like(x)
    store_kernel[(heads, rows)](
        x,
        out,
        streams.to(DEVICE),
        signed_seed(SEED),
        3 + COPY_STRIDE.value,
        9,
        heads,
        dv,
        dk,
        FORMAT=kind.name,
        SR=kind.sr,
        BLOCK_V=block_v,
        BLOCK_K=block_k,
        QUADS=dk % 4 == 0,
        num_warps=tile_warps(block_v, block_k),
        enable_fp_fusion=False,
    )
    return out.cpu()


def expected(x: torch.Tensor, name: str, streams: torch.Tensor = STREAMS) -> torch.Tensor:
    fmt = parse_format(name)
    heads, dv, dk = x.shape[1:]
    where = {"heads": heads, "dv": dv, "dk": dk}
    words = sr_words(seed=SEED, layer=3, copy=1, stream=streams, flush=9, **where)
    return quantize(x, fmt, words if fmt.needs_words else None, counts=False)[0]


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    same = (a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())
    return int((~same).sum())


def values(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g)
    if kind == "wide":
        return x * torch.exp(6 * torch.randn(shape, generator=g))
    if kind == "tiny":
        return x * 1e-38
    if kind == "huge":
        x = torch.sign(x) * torch.exp(2 * x + 85)
        return torch.where(x.isfinite(), x, 3.4e38)
    if kind == "ties":
        return (64 * x).round() / 16
    bits = torch.randint(-(2**31), 2**31, shape, generator=g).to(torch.int32).view(torch.float32)
    return bits if kind == "bits" else torch.where(bits.isfinite(), bits, 1.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["normal", "wide", "tiny", "huge", "ties", "bits", "finite bits"])
def test_equals_reference(name: str, kind: str) -> None:
    # widths that fill the tile, that do not, and that do not divide a block or a Philox call
    for dv, dk in ((64, 128), (20, 36), (7, 33)):
        x = values(kind, (2, 2, dv, dk))
        assert differing(stored(x, name), expected(x, name)) == 0, (dv, dk)


@pytest.mark.parametrize("name", NAMES)
def test_specials_and_zeros(name: str) -> None:
    x = torch.zeros(2, 1, 20, 64)
    x[0, 0, 3, 5] = float("nan")
    x[0, 0, 9, 60] = float("-inf")
    x[0, 0, 4] = torch.linspace(-2, 2, 64)
    x[1, 0, 0, :2] = torch.tensor([-0.0, 1e-45])
    got = stored(x, name)
    assert differing(got, expected(x, name)) == 0
    assert got[0].isnan().any() and got[1].isfinite().all()


def _around(points: torch.Tensor) -> torch.Tensor:
    """Points, and their FP32 neighbours on either side, of both signs."""
    near = [torch.nextafter(points, torch.full_like(points, s * 1e30)) for s in (-1, 1)]
    return torch.cat([points, *near, -points, *(-x for x in near)])


@pytest.mark.parametrize("name", ["fp16", "fp16-sr", "bf16", "bf16-sr"])
def test_unscaled_midpoints(name: str) -> None:
    """Every tenth FP16 or 40th BF16 code, the midpoint above it, one ulp either side, overflow."""
    dtype, stride = (torch.float16, 10) if name.startswith("fp16") else (torch.bfloat16, 40)
    codes = torch.arange(0, 0x7F80 if dtype == torch.bfloat16 else 0x7C00, stride)
    low = codes.to(torch.int16).view(dtype).float()
    high = (codes + 1).to(torch.int16).view(dtype).float()
    edges = torch.tensor([65504.0, 65519.996, 65520.0, 65536.0, 3.3895e38, 3.3961777e38, 3.4e38])
    x = _around(torch.cat([low, (low.double() + high.double()).div(2).float(), edges]))
    x = torch.nn.functional.pad(x, (0, -x.numel() % 256)).view(1, 1, -1, 256)
    streams = STREAMS[:1]
    assert differing(stored(x, name, streams), expected(x, name, streams)) == 0


@pytest.mark.parametrize(
    "name", ["fp8", "fp8-sr", "nvfp4", "nvfp4-sr", "int8@row", "int6@row", "int4@row-sr"]
)
def test_scaled_midpoints(name: str) -> None:
    """All element midpoints ± 1 ulp, with scales of exactly 1 so that they stay midpoints."""
    if name.startswith("fp8"):
        grid = torch.arange(0x7F).to(torch.uint8).view(torch.float8_e4m3fn).float()
        block, top = 128, 448.0
    elif name.startswith("nvfp4"):
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0])
        block, top = 16, 6.0
    else:
        top = {"int8": 127.0, "int6": 31.0, "int4": 7.0}[name[:4]]
        grid, block = torch.arange(top + 1), 128
    points = _around(torch.cat([grid, (grid[1:] + grid[:-1]) / 2])).clamp(-top, top)
    points = torch.nn.functional.pad(points, (0, -points.numel() % (block - 1)))
    points = points.view(-1, block - 1)
    points = torch.cat([points, torch.full((len(points), 1), top)], 1)  # every block's maximum
    if name.startswith("nvfp4"):
        rows = torch.nn.functional.pad(points.flatten(), (0, -points.numel() % 128)).view(-1, 128)
        peak = torch.zeros(1, 128)
        peak[0, 0] = 6.0 * 448.0  # makes the state scale 1
        points = torch.cat([rows, peak])
    x = points.view(1, 1, -1, 128)
    streams = STREAMS[:1]
    assert differing(stored(x, name, streams), expected(x, name, streams)) == 0


def test_a_draw_depends_on_nothing_but_its_counter() -> None:
    """Case A18: a row alone gives the bits it has in a batch."""
    x = values("normal", (2, 3, 16, 32))
    together = stored(x, "nvfp4-sr")
    for row in range(2):
        alone = stored(x[row : row + 1], "nvfp4-sr", STREAMS[row : row + 1])
        assert differing(alone, together[row : row + 1]) == 0
    assert differing(together, stored(x, "nvfp4-sr", STREAMS.flip(0))) > 0


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot store mxfp4.*nvfp4"):
        store_kind(parse_format("mxfp4"))
