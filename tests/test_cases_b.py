"""Recurrent-state numerics: faults met in neighbouring software, by their ids."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from quantlab.recurrence import OpInputs, exact_scan, step, textbook
from quantlab.recurrence.gates import MIN_LOG_DECAY, gdn_log_decay, l2norm, mamba2_dt, softplus
from quantlab.replay import StepwiseCache, WindowedScan, parse_policy
from tests.recurrence.sampling import KINDS, relative, sample_inputs

FP64 = 1e-12
SIXTEEN_BIT = [torch.bfloat16, torch.float16]


def single(
    k: torch.Tensor, v: torch.Tensor, *, beta: float | None = None, log_decay: float = 0.0
) -> OpInputs:
    """One step of one head, q = k."""
    k, v = k.view(1, 1, 1, -1), v.view(1, 1, 1, -1)
    return OpInputs(
        q=k,
        k=k,
        v=v,
        log_decay=torch.full((1, 1, 1), log_decay),
        beta=None if beta is None else torch.full((1, 1, 1), beta),
        activation_dtype=v.dtype,
    )


def test_B01_readout_beyond_fp16_stays_finite() -> None:
    inputs = single(torch.ones(1), torch.zeros(1, dtype=torch.float16))
    for engine in (WindowedScan, StepwiseCache):
        scan = engine([parse_policy("shared:fp32")], torch.tensor([0]), layer=0, seed=0)
        scan.prefill(inputs)
        scan.start(torch.full((1, 1, 1, 1), 70_000.0), inputs)
        o = scan(inputs)
        assert o.dtype == torch.float32
        assert o.item() == 70_000.0
        assert scan.diverged_at.tolist() == [-1]


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_B03_residual_is_formed_in_fp32(dtype: torch.dtype) -> None:
    # S k = 4098 is no BF16 or FP16 number, v = 4096 is: the residual is −2, not 0.
    inputs = single(torch.ones(1), torch.tensor([4096.0], dtype=dtype), beta=1.0)
    start = torch.full((1, 1, 1, 1), 4098.0)
    for run in (exact_scan, textbook):
        assert run(inputs, start)[1].item() == 4096.0
    scan = WindowedScan([parse_policy("shared:fp32")], torch.tensor([0]), layer=0, seed=0)
    scan.start(start, inputs)
    scan(inputs)
    assert scan.state().item() == 4096.0


def test_B04_gates_are_fp32() -> None:
    # σ(0.1) = 0.524979; through BF16 it reads 0.523438 (−0.29 %).
    beta = torch.sigmoid(torch.tensor([0.1]))
    narrow = beta.bfloat16().float()
    assert beta.item() == pytest.approx(0.524979, abs=1e-6)
    assert narrow.item() == pytest.approx(0.523438, abs=1e-6)
    one = torch.ones(1)
    inputs = single(one, one.bfloat16(), beta=beta.item())
    assert exact_scan(inputs)[1].item() == beta.item()
    assert mamba2_dt(torch.tensor([0.1], dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_B05_state_is_fp32_whatever_the_activations(dtype: torch.dtype) -> None:
    inputs = sample_inputs("gdn", rows=2, steps=40, activation_dtype=dtype, dtype=torch.float32)
    inputs = replace(inputs, v=inputs.v.to(dtype))
    for engine in (WindowedScan, StepwiseCache):
        scan = engine([parse_policy("conventional")], torch.tensor([0, 1]), layer=0, seed=0)
        scan.prefill(inputs.slice(0, 20))
        o = scan(inputs.slice(20, 40))
        assert o.dtype == scan.state().dtype == torch.float32
    # a counter that a 16-bit state would lose: 2048 + 0.5 · 1000
    ones = single(torch.ones(1), torch.full((1,), 0.5, dtype=dtype))
    scan = WindowedScan([parse_policy("conventional")], torch.tensor([0]), layer=0, seed=0)
    scan.start(torch.full((1, 1, 1, 1), 2048.0), ones)
    scan(replace(ones, **{n: getattr(ones, n).expand(1, 1000, *getattr(ones, n).shape[2:])
                          for n in ("q", "k", "v", "log_decay")}))  # fmt: skip
    assert scan.state().item() == 2548.0


def test_B07_gate_is_finite_for_all_finite_parameters() -> None:
    gate = gdn_log_decay(torch.tensor([-200.0]), torch.tensor([100.0]), torch.tensor([0.0]))
    assert gate.exp().item() == 1.0
    a, rate = torch.meshgrid(
        torch.linspace(-300, 300, 61), torch.linspace(-300, 300, 61), indexing="ij"
    )
    gate = gdn_log_decay(a, rate, torch.zeros(61))
    assert torch.isfinite(gate).all()
    assert gate.min() >= MIN_LOG_DECAY
    assert gate.max() <= 0


def test_B08_softplus_does_not_overflow() -> None:
    y = softplus(torch.tensor([20.0, 50.0, 89.0, 100.0, -100.0]))
    assert torch.equal(y[:4], torch.tensor([20.0, 50.0, 89.0, 100.0]))
    # exp(−100) is a subnormal number; 0 where subnormals are flushed
    assert y[4].item() == pytest.approx(math.exp(-100), rel=0.05) or y[4].item() == 0


@pytest.mark.parametrize("kind", [*KINDS, "gla"])
def test_B09_strong_decay_is_finite_and_causal(kind: str) -> None:
    weak = sample_inputs(kind, steps=64, dtype=torch.float32)
    inputs = replace(weak, log_decay=torch.full_like(weak.log_decay, -5.1))
    o, s = exact_scan(inputs)
    o_ref, s_ref = textbook(inputs)
    assert relative(o, o_ref) < 1e-5
    assert relative(s, s_ref) < 1e-5
    later = {name: getattr(inputs, name).clone() for name in ("q", "k", "v", "log_decay")}
    for x in later.values():
        x[:, 40:] *= 1.7
    o_later, _ = exact_scan(replace(inputs, **later))
    assert torch.equal(o_later[:, :40], o[:, :40])
    assert not torch.equal(o_later[:, 40:], o[:, 40:])


def test_B11_epsilon_is_added_to_the_sum() -> None:
    x = torch.full((128,), 1e-4)
    assert l2norm(x)[0].item() == pytest.approx(0.0662266, abs=1e-7)
    assert torch.equal(l2norm(torch.zeros(128)), torch.zeros(128))


@pytest.mark.parametrize("kind", KINDS)
def test_B12_baseline_against_itself_is_exactly_equal(kind: str) -> None:
    # Equal rows of one batch take the same path: their KL is exactly 0.
    policies = [
        parse_policy("conventional"),
        parse_policy("shared:fp8"),
        parse_policy("conventional"),
    ]
    base = sample_inputs(kind, rows=2, steps=60, dv=64, dk=128, dtype=torch.float32)
    inputs = base.rows(torch.arange(2).repeat(3))
    scan = WindowedScan(policies, torch.tensor([0, 1]), layer=0, seed=0)
    scan.prefill(inputs.slice(0, 20))
    o = scan(inputs.slice(20, 60))
    assert torch.equal(o[:2], o[4:])
    assert not torch.equal(o[:2], o[2:4])


@pytest.mark.parametrize("kind", KINDS)
def test_B13_final_state_does_not_depend_on_the_split(kind: str) -> None:
    steps = 2 * 64 + 37
    inputs = sample_inputs(kind, steps=steps, dtype=torch.float32)
    o, whole = exact_scan(inputs)
    first, state = exact_scan(inputs.slice(0, 69))
    rest, split = exact_scan(inputs.slice(69, steps), state)
    one_by_one = None
    for t in range(steps):
        _, one_by_one = exact_scan(inputs.slice(t, t + 1), one_by_one)
    assert one_by_one is not None
    assert relative(split, whole) < 1e-5
    assert relative(one_by_one, whole) < 1e-5
    assert relative(torch.cat([first, rest], 1), o) < 1e-5


def test_B15_heads_of_a_group_are_consecutive() -> None:
    inputs = sample_inputs("gdn", rows=1, heads=4, key_heads=2, steps=3)
    k = inputs.k.clone()
    k[:, :, 1] *= -1  # the second key head belongs to value heads 2 and 3 only
    for run in (exact_scan, textbook):
        _, s = run(inputs)
        _, changed = run(replace(inputs, k=k))
        assert torch.equal(s[:, :2], changed[:, :2])
        assert relative(changed[:, 2:], -s[:, 2:]) < FP64


def test_B16_rows_are_values_and_columns_are_keys() -> None:
    for dv, dk in ((5, 3), (4, 4)):
        k, v = torch.zeros(dk), torch.zeros(dv)
        k[0], v[1] = 1.0, 1.0
        inputs = single(k, v)
        expected = torch.zeros(1, 1, dv, dk)
        expected[0, 0, 1, 0] = 1.0
        assert torch.equal(exact_scan(inputs)[1], expected)
        scan = WindowedScan([parse_policy("shared:fp8")], torch.tensor([0]), layer=0, seed=0)
        scan.prefill(inputs)
        assert torch.equal(scan.state(), expected)
        again = WindowedScan([parse_policy("shared:fp8")], torch.tensor([0]), layer=0, seed=0)
        again.load_state_dict(scan.state_dict())
        again(inputs)
        assert torch.equal(again.state(), 2 * expected)


def test_B19_decay_then_predict_then_write() -> None:
    k = torch.tensor([0.6, 0.8], dtype=torch.float64)
    v = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    half = torch.tensor(0.5, dtype=torch.float64)
    state = torch.zeros(3, 2, dtype=torch.float64)
    for _ in range(2):
        _, state = step(state, q=k, k=k, v=v, log_decay=half.log(), beta=half)
    assert torch.allclose(state, 0.625 * torch.outer(v, k), rtol=1e-15)  # 0.5 in the wrong order
