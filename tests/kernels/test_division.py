"""FP32 division through an FP64 reciprocal, bit for bit against numpy's correctly rounded one."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.kernels.device import DEVICE, MARKS

import triton  # isort: skip
import triton.language as tl  # isort: skip
from quantlab_kernels.division import divide, reciprocal  # isort: skip

pytestmark = MARKS
CONSTANTS = (6.0, 7.0, 127.0, 448.0)


@triton.jit
def division_kernel(a_ptr, b_ptr, out_ptr, n, N: tl.constexpr):
    """Divide N numbers of a block by N others."""
    i = tl.program_id(0) * N + tl.arange(0, N)
    a = tl.load(a_ptr + i, mask=i < n, other=1.0)
    b = tl.load(b_ptr + i, mask=i < n, other=1.0)
    tl.store(out_ptr + i, divide(a, reciprocal(b)), mask=i < n)


def quotients(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    n = a.size
    out = torch.empty(n, device=DEVICE)
    arguments = [torch.from_numpy(x).to(DEVICE) for x in (a, b)]
    division_kernel[(triton.cdiv(n, 65536),)](*arguments, out, n, N=65536, enable_fp_fusion=False)
    return out.cpu().numpy()


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


def test_quotients_nearest_to_midpoints() -> None:
    a, b = near_midpoints(4000)
    with np.errstate(all="ignore"):
        want = a / b
    assert np.array_equal(quotients(a, b).view(np.int32), want.view(np.int32))
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
