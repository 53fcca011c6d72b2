"""FP32 division through an FP64 reciprocal, bit for bit against numpy's correctly rounded one."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch

from tests.kernels.device import DEVICE, MARKS

import triton  # isort: skip
import triton.language as tl  # isort: skip
from quantlab_kernels.division import divide, divisor, quotient, reciprocal  # isort: skip

pytestmark = MARKS
CONSTANTS = (6.0, 7.0, 127.0, 448.0)


@triton.jit
def division_kernel(a_ptr, b_ptr, out_ptr, n, N: tl.constexpr):
    """Divide N numbers of a block by N others."""
    i = tl.program_id(0) * N + tl.arange(0, N)
    a = tl.load(a_ptr + i, mask=i < n, other=1.0)
    b = tl.load(b_ptr + i, mask=i < n, other=1.0)
    tl.store(out_ptr + i, divide(a, reciprocal(b)), mask=i < n)


@triton.jit
def quotient_kernel(a_ptr, b_ptr, out_ptr, n, N: tl.constexpr):
    """Likewise, by the FP32 steps of a GPU."""
    i = tl.program_id(0) * N + tl.arange(0, N)
    a = tl.load(a_ptr + i, mask=i < n, other=1.0)
    b = tl.load(b_ptr + i, mask=i < n, other=1.0)
    shift, minus, inverse = divisor(b, True)
    tl.store(out_ptr + i, quotient(a, shift, minus, inverse, True), mask=i < n)


def quotients(a: np.ndarray, b: np.ndarray, kernel=division_kernel) -> np.ndarray:
    n = a.size
    out = torch.empty(n, device=DEVICE)
    arguments = [torch.from_numpy(x).to(DEVICE) for x in (a, b)]
    kernel[(triton.cdiv(n, 65536),)](*arguments, out, n, N=65536, enable_fp_fusion=False)
    return out.cpu().numpy()


@cache
def near_midpoints(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Significands A, B < 2^24 with A 2^25 / B as near an odd whole number as can be.

    A 2^25 = M B + 1 or - 1 for an odd M: with B odd, A is 1 / 2^25 modulo B, up to sign.
    """
    a, b = [], []
    rng = np.random.default_rng(5)
    while len(a) < count:
        odd = int(rng.integers(1 << 23, 1 << 24)) | 1
        for sign in (1, -1):
            root = pow(pow(2, 25, odd), -1, odd) * sign % odd
            quotient = (root << 25) // odd
            if root >= 1 << 23 and (quotient + (sign < 0)) % 2:
                a.append(root)
                b.append(odd)
    return np.array(a, np.float32), np.array(b, np.float32)


@pytest.mark.parametrize("kernel", [division_kernel, quotient_kernel])
def test_quotients_nearest_to_midpoints(kernel) -> None:
    a, b = near_midpoints(4000)
    with np.errstate(all="ignore"):
        want = a / b
    assert np.array_equal(quotients(a, b, kernel).view(np.int32), want.view(np.int32))


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """FP32 a b + c, rounded once: the FP64 sum is rounded to odd on the way."""
    product = a.astype(np.float64) * b
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)
    bits = total.view(np.int64).copy()
    bits += np.where((lost != 0) & (bits % 2 == 0), np.where((lost > 0) == (total > 0), 1, -1), 0)
    return bits.view(np.float64).astype(np.float32)


def newton(d: np.ndarray, estimate: np.ndarray) -> np.ndarray:
    """The two steps of `divisor` from an estimate of 1 / d, and what mends the largest d."""
    one = np.ones_like(d)
    r = estimate
    for _ in range(2):
        r = fma(fma(-d, r, one), r, r)
    return np.maximum(r, np.float32(0.5 + 2.0**-24))


def significands(step: int) -> np.ndarray:
    """Every so many numbers of [1, 2), the first and the last among them."""
    bits = np.append(np.arange(0, 1 << 23, step, dtype=np.int32), (1 << 23) - 1)
    return (bits.astype(np.int32) | 0x3F800000).view(np.float32)


@pytest.mark.parametrize("off", [-2, -1, 0, 1, 2])
def test_reciprocals_by_newtons_steps(off: int) -> None:
    """All significands were tried once (step 1); one in 61 here, and the exception."""
    d = significands(61)
    want = (1 / d.astype(np.float64)).astype(np.float32)
    estimate = (want.view(np.int32) + off).view(np.float32)
    assert np.array_equal(newton(d, estimate), want)


def test_quotients_by_markstein_steps_near_midpoints() -> None:
    a, b = near_midpoints(4000)
    rng = np.random.default_rng(6)
    x, y = (significands(1)[rng.integers(0, 1 << 23, 200_000)] for _ in range(2))
    a, b = np.append(a, x), np.append(b, y)
    with np.errstate(all="ignore"):
        want = a / b
        d = b * np.exp2(-np.floor(np.log2(b))).astype(np.float32)
        x = a * (d / b)
    r = (1 / d.astype(np.float64)).astype(np.float32)
    q = x * r
    for _ in range(2):
        q = fma(fma(-q, d, x), r, q)
    assert np.array_equal(q, want)
    # the mutant: no correction
    assert np.any(x * r != want)
    # the mutant: one Newton step less than FP64, a product with the FP32 reciprocal
    assert ((a * (np.float32(1) / b)) != want).mean() > 0.1


def test_random_significands_and_exponents() -> None:
    rng = np.random.default_rng(6)
    bits = rng.integers(0, 1 << 23, (2, 200_000)) | (rng.integers(100, 150, (2, 200_000)) << 23)
    a, b = bits.astype(np.int32).view(np.float32)
    assert np.array_equal(quotients(a, b).view(np.int32), (a / b).view(np.int32))


@pytest.mark.parametrize("divisor", CONSTANTS)
def test_constants_divide_exactly_down_to_the_smallest(divisor: float) -> None:
    """Quotients below 2^-126 meet midpoints exactly: every subnormal numerator of 16 bits, ties."""
    assert abs(Fraction(1 / divisor) * int(divisor) - 1) <= Fraction(1, 1 << 54)
    a = np.concatenate([np.arange(1 << 16), np.arange(1 << 16) * int(divisor)]).astype(np.int32)
    a = a.view(np.float32)
    b = np.full_like(a, divisor)
    assert np.array_equal(quotients(a, b).view(np.int32), (a / b).view(np.int32))


def test_specials() -> None:
    a = np.array([0.0, -0.0, 1.0, 3e38, -1e-45, 1.0, np.inf, np.nan], np.float32)
    b = np.array([3.0, 3.0, np.inf, 1e-45, 1e30, 1e-45, 2.0, 2.0], np.float32)
    with np.errstate(all="ignore"):
        want = a / b
    got = quotients(a, b)
    same = (got.view(np.int32) == want.view(np.int32)) | (np.isnan(got) & np.isnan(want))
    assert same.all(), (got, want)
