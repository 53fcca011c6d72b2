"""Stochastic rounding to values at its decision thresholds, bit for bit as `formats.rounding`.

Random draws hit a threshold once in 2^32: here the draws are made to lie on it and next to it.
"""

from __future__ import annotations

import pytest
import torch

from quantlab.formats.element import ELEMENTS
from quantlab.formats.rounding import round_clamped
from tests.kernels.device import DEVICE, MARKS

import triton  # isort: skip
import triton.language as tl  # isort: skip
from quantlab_kernels.rounding import round_bf16  # isort: skip
from quantlab_kernels.stores import signed_elements, stored_fp16  # isort: skip

pytestmark = MARKS
N = 1024


@triton.jit
def rounding_kernel(y_ptr, words_ptr, out_ptr, N: tl.constexpr, FORMAT: tl.constexpr):
    """Round N values, which are their own quotients by a scale of 1, with given draws."""
    i = tl.arange(0, N)[:, None]
    y = tl.load(y_ptr + i)
    words = tl.load(words_ptr + i).to(tl.uint32, bitcast=True)
    if FORMAT == "bf16":
        out = round_bf16(y, words, True)
    elif FORMAT == "fp16":
        out = stored_fp16(y, words, True).to(tl.float32)
    else:
        out = signed_elements(y, tl.full([N], 1.0, tl.float32), words, FORMAT, True)
    tl.store(out_ptr + i, out)


def positions(y: torch.Tensor, man: int, emin: int) -> torch.Tensor:
    """Return floor(f 2^32), f the position of y between its neighbours, exactly in FP64."""
    exponent = torch.frexp(y.double())[1] - 1  # of y's own binade
    quantum = 2.0 ** (exponent.clamp(min=emin) - man).double()
    units = y.double() / quantum
    return ((units - units.floor()) * 2.0**32).floor().to(torch.int64)


@pytest.mark.parametrize(
    "fmt, name, man, emin, top",
    [
        ("fp16", "float16", 10, -14, 6e4),
        ("fp8", "float8_e4m3fn", 3, -6, 448.0),
        ("nvfp4", "float4_e2m1fn", 1, 0, 6.0),
        ("int8", "int8", 7, 7, 127.0),
        ("int4", "int4", 7, 7, 7.0),
        ("bf16", "bfloat16", 7, -126, 3e38),
    ],
)
def test_draws_at_the_threshold(fmt: str, name: str, man: int, emin: int, top: float) -> None:
    g = torch.Generator().manual_seed(2)
    # from far inside the first gap, where f has bits below 2^-32, to the largest value
    scale = 2.0 ** torch.linspace(emin - man - 30, 6, N // 8)
    y = torch.randn(8, N // 8, generator=g) * scale
    y = y.flatten().clamp(-top, top)
    y[:8] = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0**emin, -(2.0**emin), top, -top])
    if fmt not in ("fp16", "bf16"):
        # quotients lie beyond the largest element by what their scale was rounded
        y[8:10] = torch.tensor([top, -top]) * (1 + 2.0**-20)
    inside = y.clamp(-top, top)
    threshold = positions(y, man, emin)
    for step in (-1, 0, 1):
        words = (threshold + step).clamp(0, 2**32 - 1)
        expected = round_clamped(inside.clone(), ELEMENTS[name], words)
        if name.startswith("int"):
            expected += 0.0  # no minus zero
        given = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
        out = torch.empty_like(y, device=DEVICE)
        rounding_kernel[(1,)](
            y.to(DEVICE),
            given.to(DEVICE),
            out,
            N=N,
            FORMAT=fmt,
            enable_fp_fusion=False,
        )
        got = out.cpu()
        assert torch.equal(got.view(torch.int32), expected.view(torch.int32)), step
        if step == 0:
            below = (words > 0) & (y == inside)
            low = round_clamped(inside.clone(), ELEMENTS[name], (threshold - 1).clamp(min=0))
            assert (got < low)[below].all()  # the threshold itself is where rounding turns
