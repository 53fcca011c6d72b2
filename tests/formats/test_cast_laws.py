"""Laws every format keeps: quantize is decode(encode), idempotence, no change of the input."""

import pytest
import torch

from quantlab.formats import decode, encode, parse_format, quantize
from quantlab.formats.philox import sr_words

NAMES = [
    "fp32", "fp16", "bf16", "fp8", "fp8-e5m2", "fp8-fnuz@row", "nvfp4", "nvfp4:scale_round=up",
    "mxfp4", "mxfp4:mode=rceil", "mxfp4:mode=ceil", "mxfp4:mode=even", "mxfp8", "int4@block32",
    "int6@row", "int8@row", "int8@key:scale=bf16", "int8@state", "int8@row:scale=fp16",
    "int8@row:scale=e4m3", "int8@row:scale=e8m0", "int16@row", "fp8@tile32x128:qmax=240",
    "fp8@tile32x128:qmax=240,scale=bf16,scale_round=up", "fp8@none", "fp8@none:overflow=ieee",
    "fp8-e5m2@none:overflow=ieee", "fp16:overflow=saturate",
]  # fmt: skip
ALL = [n + r for n in NAMES for r in ("", "-sr") if n + r != "fp32-sr"]


def make_state(dv: int, dk: int) -> torch.Tensor:
    """Rows over 60 binades, zeros of both signs, huge and tiny values, NaN and infinity."""
    gen = torch.Generator().manual_seed(7)
    x = torch.randn(3, 2, dv, dk, generator=gen)
    x *= torch.exp2(torch.randint(-30, 31, (3, 2, dv, 1), generator=gen).float())
    x[0, 0, 0] = 0.0
    x[0, 0, 1] = -0.0
    x[0, 1, 2] = 3e38
    x[0, 1, 3] = 1e-44
    # GPUs' NaN, a signalling one, a negative one: carries into the sign if treated as numbers
    patterns = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32)
    x[1, 0, 4, 3:6] = patterns.view(torch.float32)
    x[1, 0, 5, 3] = float("-inf")
    x[2] = torch.randn(2, dv, dk, generator=gen)
    return x


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(16, 128), (33, 80)], ids=["16x128", "33x80"])
def test_quantize_is_decode_of_encode(name: str, shape: tuple[int, int]) -> None:
    fmt = parse_format(name)
    x = make_state(*shape)
    before = x.clone()
    words = sr_words(
        seed=5, layer=1, copy=0, stream=torch.arange(3), flush=2, heads=2, dv=shape[0], dk=shape[1]
    )
    fused, counts = quantize(x, fmt, words)
    encoded = encode(x, fmt, words)
    slow = decode(encoded)
    assert torch.equal(
        fused.view(torch.int32)[~fused.isnan()], slow.view(torch.int32)[~slow.isnan()]
    )
    assert torch.equal(fused.isnan(), slow.isnan())
    nan_code = fmt.element.nan_code or 0
    assert all(int(c) == nan_code for c in encoded.codes[fused.isnan()])
    assert [int(c) for c in counts] == [int(c) for c in encoded.counts]
    assert torch.equal(x.view(torch.int32), before.view(torch.int32))
    skipped, none = quantize(x, fmt, words, counts=False)
    assert none is None and torch.equal(skipped.nan_to_num(7.0), fused.nan_to_num(7.0))
    wide, _ = quantize(x.double(), fmt, words)
    assert wide.dtype == torch.float64
    assert torch.equal(wide.float().nan_to_num(7.0), fused.nan_to_num(7.0))


def test_fp64_is_exact() -> None:
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    out, _ = quantize(x, parse_format("fp64"))
    assert torch.equal(out, x) and out.data_ptr() != x.data_ptr()
    assert torch.equal(decode(encode(x, parse_format("fp64"))), x)
