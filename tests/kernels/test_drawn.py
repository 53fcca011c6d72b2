"""Stochastic rounding straight to codes: at its decision thresholds, and where y is not finite.

Random draws hit a threshold once in 2^32: here they lie on it and next to it.
"""

from __future__ import annotations

import pytest
import torch

from quantlab.formats.element import ELEMENTS
from quantlab.formats.rounding import round_clamped
from tests.kernels.device import DEVICE, MARKS

import triton  # isort: skip
import triton.language as tl  # isort: skip
from quantlab_kernels.drawn import DRAWS, drawn_fp16, drawn_quanta, drawn_sizes  # isort: skip

pytestmark = MARKS
N = 1024


@triton.jit
def drawn_kernel(
    y_ptr, words_ptr, out_ptr, LARGEST, N: tl.constexpr, MAN: tl.constexpr, EMIN: tl.constexpr
):
    """Round and encode N values with given draws; MAN = 0 stands for whole numbers."""
    i = tl.arange(0, N)
    y = tl.load(y_ptr + i)
    words = tl.load(words_ptr + i).to(tl.uint32, bitcast=True)
    if MAN == 0:
        out = drawn_quanta(y, DRAWS, words)
    else:
        largest = tl.full([N], LARGEST, tl.uint32)
        codes, _ = drawn_sizes(y, words, largest, MAN, EMIN)
        out = codes.to(tl.int32, bitcast=True)
    tl.store(out_ptr + i, out)


def drawn(y: torch.Tensor, words: torch.Tensor, largest: int, man: int, emin: int) -> torch.Tensor:
    """Round y, a whole number of it where man = 0, else the value of a code, without its sign."""
    given = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    out = torch.empty(N, dtype=torch.int32, device=DEVICE)
    drawn_kernel[(1,)](
        y.to(DEVICE),
        given.to(DEVICE),
        out,
        largest,
        N=N,
        MAN=man,
        EMIN=emin,
        enable_fp_fusion=False,
    )
    codes = out.cpu()
    if man == 0:
        return codes.float()
    field, fraction = codes >> man, codes & ((1 << man) - 1)
    significand = torch.where(field > 0, fraction + (1 << man), fraction)
    return torch.ldexp(significand.double(), field.clamp(min=1) - 1 + emin - man).float()


@pytest.mark.parametrize(
    "name, man, emin, top, largest",
    [
        ("float16", 10, -14, 65504.0, 0x7BFF),
        ("float8_e4m3fn", 3, -6, 448.0, 0x7E),
        ("float4_e2m1fn", 1, 0, 6.0, 7),
        ("int8", 0, 0, 127.0, 0),
        ("int4", 0, 0, 7.0, 0),
    ],
)
def test_draws_at_the_threshold(name: str, man: int, emin: int, top: float, largest: int) -> None:
    g = torch.Generator().manual_seed(2)
    # from far inside the first gap, where f has bits below 2^-32, to the largest value
    scale = 2.0 ** torch.linspace(emin - man - 30, 6, N // 8)
    y = (torch.randn(8, N // 8, generator=g) * scale).flatten().clamp(-top, top)
    least = 2.0**emin
    y[:12] = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, 1.5, -1.5, 2.5, -2.5, least, -least, top, -top]  # ties too
    )
    exponent = torch.frexp(y.double())[1] - 1
    quantum = 2.0 ** (exponent.clamp(min=emin) - man).double() if man else torch.ones(N).double()
    units = y.double() / quantum
    threshold = ((units - units.floor()) * 2.0**32).floor().to(torch.int64)
    for step in (-1, 0, 1):
        words = (threshold + step).clamp(0, 2**32 - 1)
        expected = round_clamped(y.clone(), ELEMENTS[name], words)
        got = drawn(y, words, largest, man, emin)
        assert torch.equal(got, expected if man == 0 else expected.abs()), step
        if step == 0:
            low = round_clamped(y.clone(), ELEMENTS[name], (threshold - 1).clamp(min=0))
            assert (low != expected)[threshold > 0].all()  # it is where rounding turns


@pytest.mark.parametrize(
    "man, emin, largest", [(10, -14, 0x7BFF), (3, -6, 0x7E), (3, -6, 0x7F), (1, 0, 7), (1, 0, 0)]
)
def test_larger_and_not_finite_values_take_the_largest_code(
    man: int, emin: int, largest: int
) -> None:
    inf, nan = float("inf"), float("nan")
    y = torch.tensor([inf, -inf, nan, -nan, 3e38, -3e38, 1e5, -1e5]).repeat(N // 8)
    words = torch.randint(0, 2**32, (N,), generator=torch.Generator().manual_seed(3))
    zero = torch.zeros(N)
    want = drawn(zero, words, largest, man, emin)
    assert torch.equal(want, zero)
    got = drawn(y, words, largest, man, emin)
    field, fraction = largest >> man, largest & ((1 << man) - 1)
    significand = fraction + (1 << man) if field else fraction
    assert (got == significand * 2.0 ** (max(field, 1) - 1 + emin - man)).all()


@triton.jit
def fp16_kernel(x_ptr, words_ptr, out_ptr, N: tl.constexpr):
    """Round N values to FP16 with given draws."""
    i = tl.arange(0, N)
    words = tl.load(words_ptr + i).to(tl.uint32, bitcast=True)
    tl.store(out_ptr + i, drawn_fp16(tl.load(x_ptr + i), words))


@pytest.mark.parametrize("word", [0, 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_fp16_where_nearest_rounding_has_a_say(word: int) -> None:
    # just below 65520, from where there is only inf; subnormals and carries out of them; zeros
    below = 65520.0 - 2.0**-8
    least, first = 2.0**-24, 2.0**-14
    large = [65504.0, 65505.0, below, 65520.0, 65536.0, 3e38, float("inf"), float("nan")]
    small = [0.0, 1e-45, 2.0**-50, least / 2, least, 1.5 * least, first - least / 2, first]
    between = [first - least / 1024, 1.0, 1 + 2.0**-11, 2 - 2.0**-12, 2 - 2.0**-23, 4096.5, 0.1]
    x = torch.tensor([*large, *small, *between])
    x = torch.cat([x, -x])
    x = x.repeat(N // len(x) + 1)[:N]
    words = torch.full((N,), word)
    clamped = torch.where(x.abs() < 65520.0, x, 0.0)
    expected = round_clamped(clamped.clamp(-65504.0, 65504.0), ELEMENTS["float16"], words)
    expected = torch.where(x.abs() < 65520.0, expected.copysign(x).half(), x.half())
    given = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    out = torch.empty(N, dtype=torch.float16, device=DEVICE)
    fp16_kernel[(1,)](x.to(DEVICE), given.to(DEVICE), out, N=N, enable_fp_fusion=False)
    out = out.cpu()
    same = out.view(torch.int16) == expected.view(torch.int16)
    assert (same | (out.isnan() & x.isnan())).all()
