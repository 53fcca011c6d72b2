"""CPU and GPU give the same bits, and the fast path can be captured in a CUDA graph."""

import pytest
import torch

from quantlab.formats import ELEMENTS, encode, parse_format, quantize
from quantlab.formats.philox import sr_words
from quantlab.formats.rounding import round_clamped
from tests.formats.test_cast_laws import ALL, make_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit patterns, any NaN equal to any other."""
    b = b.cpu()
    if a.dtype == torch.float32:
        nan = a.isnan()
        return torch.equal(nan, b.isnan()) and torch.equal(
            a.view(torch.int32)[~nan], b.view(torch.int32)[~nan]
        )
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_words_are_the_same() -> None:
    common = {"seed": -7, "layer": 3, "copy": 1, "heads": 3, "dv": 33, "dk": 80}
    streams = torch.tensor([0, 5, (1 << 32) - 1])
    here = sr_words(stream=streams, flush=9, **common)
    there = sr_words(stream=streams.cuda(), flush=torch.tensor(9, device="cuda"), **common)
    assert there.is_cuda and torch.equal(here, there.cpu())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(16, 128), (33, 80)], ids=["16x128", "33x80"])
def test_casts_give_the_same_bits(name: str, shape: tuple[int, int]) -> None:
    fmt = parse_format(name)
    x = make_state(*shape)
    gen = torch.Generator().manual_seed(1)
    patterns = torch.randint(-(1 << 31), 1 << 31, (40, 2, *shape), generator=gen).to(torch.int32)
    x = torch.cat([x, patterns.view(torch.float32), torch.randn(40, 2, *shape, generator=gen)])
    words = torch.randint(0, 1 << 32, x.shape, generator=gen)
    here, counts = quantize(x, fmt, words)
    there, counts_there = quantize(x.cuda(), fmt, words.cuda())
    assert same_bits(here, there)
    assert [int(c) for c in counts] == [int(c) for c in counts_there]
    a, b = encode(x, fmt, words), encode(x.cuda(), fmt, words.cuda())
    assert same_bits(a.codes, b.codes)
    if a.scales is not None and b.scales is not None:
        assert torch.equal(a.scales.float().nan_to_num(7), b.scales.float().cpu().nan_to_num(7))


@pytest.mark.parametrize(
    "name", ["fp16-sr", "bf16-sr", "fp8-sr", "nvfp4-sr", "mxfp4", "int8@key-sr"]
)
def test_store_and_load_can_be_captured(name: str) -> None:
    fmt = parse_format(name)
    x = torch.randn(4, 2, 16, 128, device="cuda")
    flush = torch.zeros((), dtype=torch.int64, device="cuda")
    streams = torch.arange(4, device="cuda")

    def store() -> torch.Tensor:
        words = sr_words(
            seed=1, layer=0, copy=0, stream=streams, flush=flush, heads=2, dv=16, dk=128
        )
        return quantize(x, fmt, words, counts=False)[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        store()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = store()
    for step in (1, 2):
        flush.fill_(step)
        graph.replay()
        assert torch.equal(out, store())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"])
def test_all_fp32_patterns_against_torch(name: str) -> None:
    """Every FP32 value within the type's range, both zeros and all subnormals: 2^32 patterns."""
    element = ELEMENTS[name]
    largest = float(element.max_finite)
    seen = 0
    for start in range(-(1 << 31), 1 << 31, 1 << 27):
        bits = torch.arange(start, start + (1 << 27), dtype=torch.int64, device="cuda")
        x = bits.to(torch.int32).view(torch.float32)
        inside = x.abs() <= largest
        x = torch.where(inside, x, torch.zeros_like(x))
        theirs = x.to(getattr(torch, name)).float()
        seen += int(inside.count_nonzero())
        ours = round_clamped(x, element, None)
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    assert seen > 1 << 31
