"""Random words on Triton against `quantlab.formats.philox` and `tl.philox`, bit for bit."""

from __future__ import annotations

import pytest
import torch

from quantlab.formats.philox import sr_words
from tests.kernels.device import DEVICE, MARKS

import triton  # isort: skip
import triton.language as tl  # isort: skip
from quantlab_kernels.draws import (  # isort: skip
    lane_channels,
    lane_order,
    lane_words,
    philox,
    tile_words,
)

pytestmark = MARKS


@triton.jit(do_not_specialize=["seed"])
def compare_kernel(counters_ptr, differ_ptr, seed, N: tl.constexpr):
    """Count words that differ from Triton's own generator."""
    i = tl.arange(0, N)
    c0 = tl.load(counters_ptr + i).to(tl.uint32, bitcast=True)
    c1 = tl.load(counters_ptr + N + i).to(tl.uint32, bitcast=True)
    c2 = tl.load(counters_ptr + 2 * N + i).to(tl.uint32, bitcast=True)
    c3 = tl.load(counters_ptr + 3 * N + i).to(tl.uint32, bitcast=True)
    a0, a1, a2, a3 = philox(seed, c0, c1, c2, c3)
    b0, b1, b2, b3 = tl.philox(seed, c0, c1, c2, c3)
    differ = (a0 != b0) | (a1 != b1) | (a2 != b2) | (a3 != b3)
    tl.store(differ_ptr, tl.sum(differ.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["seed", "place", "stream", "flush"])
def words_kernel(
    out_ptr, seed, place, stream, flush, first, dk, V: tl.constexpr, K: tl.constexpr,
    QUADS: tl.constexpr,
):  # fmt: skip
    """Write a tile of words."""
    words = tile_words(seed, place, stream, flush, first, dk, V, K, QUADS)
    row, col = tl.arange(0, V), tl.arange(0, K)
    out = out_ptr + row[:, None] * dk + col[None, :]
    tl.store(out, words.to(tl.int32, bitcast=True), mask=(col < dk)[None, :])


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 + 12345, -(2**63)])
def test_philox_is_tritons(seed: int) -> None:
    g = torch.Generator().manual_seed(4)
    counters = torch.randint(-(2**31), 2**31, (4, 512), generator=g).to(torch.int32).to(DEVICE)
    differ = torch.full((1,), -1, dtype=torch.int32, device=DEVICE)
    compare_kernel[(1,)](counters, differ, seed, N=512)
    assert int(differ) == 0


@pytest.mark.parametrize("dk", [32, 36, 33])
def test_tile_words_are_the_formats_words(dk: int) -> None:
    heads, dv, seed, layer, copy = 2, 16, 2**63 + 99, 7, 1
    # ids beyond 31 bits are legal counter words
    stream, flush = 2**31 + 3, 2**31 + 5
    want = sr_words(
        seed=seed, layer=layer, copy=copy, stream=torch.tensor([stream]), flush=flush,
        heads=heads, dv=dv, dk=dk,
    )[0, 1]  # fmt: skip
    out = torch.zeros(dv, dk, dtype=torch.int32, device=DEVICE)
    words_kernel[(1,)](
        out, seed - 2**64, layer + (copy << 24), stream, flush, dv * dk, dk,
        V=dv, K=64, QUADS=dk % 4 == 0,
    )  # fmt: skip
    assert torch.equal(out.cpu().to(torch.int64) & 0xFFFFFFFF, want)


@triton.jit(do_not_specialize=["seed"])
def lanes_kernel(
    words_ptr, lane_words_ptr, ordered_ptr, channels_ptr, seed, dk, V: tl.constexpr,
    K: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """Write words and channels in the order of lanes."""
    row, col = tl.arange(0, V)[:, None], tl.arange(0, K)[None, :]
    tile = row * K + col
    x = tl.zeros([V, K], tl.float32) + 1.0
    draw = (seed, 5, 7, 9)
    words = tile_words(seed, 5, 7, 9, 4 * dk, dk, V, K, QUADS)
    tl.store(words_ptr + tile, words.to(tl.int32, bitcast=True))
    words = lane_words(x, 4 * dk + tl.arange(0, V) * dk, draw, QUADS)
    tl.store(lane_words_ptr + tile, words.to(tl.int32, bitcast=True))
    tl.store(ordered_ptr + tile, lane_order(tile.to(tl.float32)))
    tl.store(channels_ptr + tl.arange(0, K), lane_channels(K))


@pytest.mark.parametrize("dk", [64, 50])
def test_words_in_the_order_of_lanes(dk: int) -> None:
    V, K = 4, 64
    tiles = [torch.zeros(V, K, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    ordered = torch.zeros(V, K, device=DEVICE)
    channels = torch.zeros(K, dtype=torch.int32, device=DEVICE)
    lanes_kernel[(1,)](*tiles, ordered, channels, 11, dk, V=V, K=K, QUADS=dk % 4 == 0)
    order = channels.cpu().long()
    assert order.sort().values.equal(torch.arange(K))
    # columns 0, 1, 8, 9 of 16, which one lane holds, are four neighbours
    assert order[[0, 1, 8, 9]].tolist() == [0, 1, 2, 3]
    words, lanes = (x.cpu() for x in tiles)
    live = order < dk
    assert lanes[:, live].equal(words[:, order][:, live])
    assert ordered.cpu().equal(torch.arange(V * K).float().view(V, K)[:, order])
