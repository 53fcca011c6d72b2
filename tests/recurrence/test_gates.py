"""Gates at the edges where others turned NaN, and their normalisations."""

from __future__ import annotations

import math

import pytest
import torch

from quantlab.recurrence.gates import (
    MIN_LOG_DECAY,
    gdn_log_decay,
    l2norm,
    mamba2_dt,
    mamba2_log_decay,
    softplus,
)


def test_softplus_against_fp64() -> None:
    x = torch.linspace(-30, 30, 10_001, dtype=torch.float64)
    exact = torch.tensor([math.log1p(math.exp(v)) for v in x.tolist()], dtype=torch.float64)
    assert torch.allclose(softplus(x), exact, rtol=1e-14, atol=0)
    # FP32: exp and log1p of at most an ulp or two each
    assert torch.allclose(softplus(x.float()).double(), exact, rtol=6e-7 * 4, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_l2norm_works_in_fp32_or_fp64(dtype: torch.dtype) -> None:
    x = torch.full((4, 64), 3.0, dtype=dtype)
    y = l2norm(x)
    assert y.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert y[0, 0].item() == pytest.approx(0.125, rel=1e-6)


def test_gdn_gate_against_fp64() -> None:
    g = torch.Generator().manual_seed(0)
    a = torch.randn(1000, generator=g) * 5
    rate = torch.randn(1000, generator=g)
    bias = torch.randn(1000, generator=g)
    naive = -rate.double().exp() * torch.nn.functional.softplus((a + bias).double(), threshold=100)
    assert torch.allclose(gdn_log_decay(a, rate, bias).double(), naive, rtol=1e-6, atol=0)


def test_write_gate_is_not_rounded_to_the_activations() -> None:
    # B04: a 16-bit round trip of sigmoid(0.1) reads 0.523438
    raw = torch.tensor([0.1], dtype=torch.bfloat16)
    dt = mamba2_dt(raw, torch.tensor([0.001]))
    assert dt.dtype == torch.float32
    exact = math.log1p(math.exp(float(raw) + 0.001))
    assert dt.item() == pytest.approx(exact, rel=1e-6)


def test_mamba2_limit_and_decay() -> None:
    raw = torch.tensor([-20.0, 0.0, 20.0])
    dt = mamba2_dt(raw, limit=(0.001, 2.0))
    assert dt.tolist() == pytest.approx([0.001, math.log(2), 2.0])
    assert torch.equal(mamba2_dt(dt, apply_softplus=False), dt)
    log_decay = mamba2_log_decay(dt, torch.tensor([-1.0, -2.0, -1e30]))
    assert log_decay.tolist() == pytest.approx([-0.001, -2 * math.log(2), MIN_LOG_DECAY])
