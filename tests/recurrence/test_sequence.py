"""exact_scan against the textbook recurrence, and the reports that concern it."""

from __future__ import annotations

import pytest
import torch

from quantlab.recurrence import decays, exact_scan, step, textbook, window
from tests.recurrence.sampling import KINDS, relative, sample_inputs

# FP64: the two forms differ by the order of at most 64·dk additions, about 1e-15·√(64·128) of the
# largest output; 1e-12 leaves room for cancellation in outputs. The mutants below move results by
# more than 1e-3.
FP64 = 1e-12
# FP32, the same argument with 6e-8: 5e-6.
FP32 = 5e-6


@pytest.mark.parametrize("kind", [*KINDS, "gla"])
@pytest.mark.parametrize("steps", [1, 15, 64, 133])
@pytest.mark.parametrize("dv_dk", [(5, 16), (8, 24), (3, 1)])
def test_equals_textbook_fp64(kind: str, steps: int, dv_dk: tuple[int, int]) -> None:
    inputs = sample_inputs(kind, steps=steps, dv=dv_dk[0], dk=dv_dk[1])
    start = torch.randn(2, 4, *dv_dk, dtype=torch.float64)
    o, s = exact_scan(inputs, start)
    o_ref, s_ref = textbook(inputs, start)
    assert relative(o, o_ref) < FP64
    assert relative(s, s_ref) < FP64


@pytest.mark.parametrize("kind", KINDS)
def test_equals_textbook_fp32(kind: str) -> None:
    inputs = sample_inputs(kind, steps=200, dk=128, dv=64, dtype=torch.float32)
    o, s = exact_scan(inputs)
    o_ref, s_ref = textbook(inputs)
    assert o.dtype == s.dtype == torch.float32
    assert relative(o, o_ref) < FP32
    assert relative(s, s_ref) < FP32


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_do_not_matter(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = sample_inputs(kind, steps=150)
    o, s = exact_scan(inputs, chunk=16)
    monkeypatch.setattr("quantlab.recurrence.sequence.PLAN_ELEMENTS", 1)
    o_one, s_one = exact_scan(inputs, chunk=16)
    assert relative(o_one, o) < FP64
    assert relative(s_one, s) < FP64


@pytest.mark.parametrize("kind", KINDS)
def test_B13_final_state_does_not_depend_on_the_split(kind: str) -> None:
    steps = 2 * 64 + 37
    inputs = sample_inputs(kind, steps=steps, dtype=torch.float32)
    o, whole = exact_scan(inputs)
    first, state = exact_scan(inputs.slice(0, 69))
    rest, split = exact_scan(inputs.slice(69, steps), state)
    single = None
    for t in range(steps):
        _, single = exact_scan(inputs.slice(t, t + 1), single)
    assert single is not None
    assert relative(split, whole) < 1e-5
    assert relative(single, whole) < 1e-5
    assert relative(torch.cat([first, rest], 1), o) < 1e-5


@pytest.mark.parametrize("kind", [*KINDS, "gla"])
def test_B09_strong_decay_is_finite_and_causal(kind: str) -> None:
    inputs = sample_inputs(kind, steps=64, dtype=torch.float32)
    strong = type(inputs)(
        **{
            name: getattr(inputs, name)
            for name in ("q", "k", "v", "beta", "dt", "activation_dtype")
        },
        log_decay=torch.full_like(inputs.log_decay, -5.1),
    )
    o, s = exact_scan(strong)
    o_ref, s_ref = textbook(strong)
    assert relative(o, o_ref) < 1e-5
    assert relative(s, s_ref) < 1e-5
    changed = strong.slice(0, 64)
    later = {name: getattr(changed, name).clone() for name in ("q", "k", "v", "log_decay")}
    for x in later.values():
        x[:, 40:] *= 1.7
    o_changed, _ = exact_scan(type(inputs)(**later, beta=strong.beta, dt=strong.dt))
    assert torch.equal(o_changed[:, :40], o[:, :40])
    assert not torch.equal(o_changed[:, 40:], o[:, 40:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_hard_reset_keeps_later_decays_exact(kind: str) -> None:
    # One gate of −300 puts the sum of logs at −300, where FP32 resolves 3e-5.
    inputs = sample_inputs(kind, steps=16, dtype=torch.float32, half_lives=(100.0, 2000.0))
    inputs.log_decay[:, 2] = -300.0
    o, _ = exact_scan(inputs)
    o_ref, _ = textbook(inputs)
    assert relative(o[:, 3:], o_ref[:, 3:]) < 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_minus_infinity_is_a_reset(kind: str) -> None:
    inputs = sample_inputs(kind, steps=20)
    inputs.log_decay[:, 7] = -torch.inf
    o, s = exact_scan(inputs, chunk=16)
    o_ref, s_ref = textbook(inputs)
    assert relative(o, o_ref) < FP64
    assert relative(s, s_ref) < FP64


def test_B15_heads_of_a_group_are_consecutive() -> None:
    inputs = sample_inputs("gdn", rows=1, heads=4, key_heads=2, steps=3)
    apart = sample_inputs("gdn", rows=1, heads=4, key_heads=2, steps=3)
    apart.k[:, :, 1] = -apart.k[:, :, 1]  # the second key head changes value heads 2 and 3 only
    _, s = exact_scan(inputs)
    _, s_apart = exact_scan(apart)
    assert torch.equal(s[:, :2], s_apart[:, :2])
    assert relative(s_apart[:, 2:], -s[:, 2:]) < FP64


def test_B16_rows_are_values_and_columns_keys() -> None:
    for dv, dk in ((5, 3), (4, 4)):
        k = torch.zeros(1, 1, 1, dk)
        v = torch.zeros(1, 1, 1, dv)
        k[..., 0], v[..., 1] = 1.0, 1.0
        inputs = sample_inputs("gla", rows=1, steps=1, heads=1, key_heads=1, dv=dv, dk=dk)
        inputs = type(inputs)(q=k, k=k, v=v, log_decay=torch.zeros(1, 1, 1))
        _, s = exact_scan(inputs)
        expected = torch.zeros(1, 1, dv, dk)
        expected[0, 0, 1, 0] = 1.0
        assert torch.equal(s, expected)


def test_B19_decay_then_predict_then_write() -> None:
    k = torch.tensor([0.6, 0.8], dtype=torch.float64)
    v = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    half = torch.tensor(0.5, dtype=torch.float64)
    state = torch.zeros(3, 2, dtype=torch.float64)
    for _ in range(2):
        _, state = step(state, q=k, k=k, v=v, log_decay=half.log(), beta=half)
    assert torch.allclose(state, 0.625 * torch.outer(v, k), rtol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_B03_the_residual_is_formed_in_fp32(dtype: torch.dtype) -> None:
    # S k = 4098 is no BF16 or FP16 number; v = 4096 is.
    state = torch.tensor([[4098.0]])
    one = torch.ones(1)
    v = torch.tensor([4096.0], dtype=dtype).float()
    _, after = step(state, q=one, k=one, v=v, log_decay=torch.tensor(0.0), beta=torch.tensor(1.0))
    assert after.item() == 4096.0  # 4098 + (4096 − 4098): the residual is −2, not 0
    inputs = sample_inputs("gdn", rows=1, steps=1, heads=1, key_heads=1, dv=1, dk=1)
    inputs = type(inputs)(
        q=torch.ones(1, 1, 1, 1),
        k=torch.ones(1, 1, 1, 1),
        v=torch.full((1, 1, 1, 1), 4096.0, dtype=dtype),
        log_decay=torch.zeros(1, 1, 1),
        beta=torch.ones(1, 1, 1),
        activation_dtype=dtype,
    )
    _, scanned = exact_scan(inputs, torch.full((1, 1, 1, 1), 4098.0))
    assert scanned.item() == 4096.0


def test_is_differentiable() -> None:
    inputs = sample_inputs("gdn", steps=20)
    v = inputs.v.clone().requires_grad_()
    inputs = type(inputs)(q=inputs.q, k=inputs.k, v=v, log_decay=inputs.log_decay, beta=inputs.beta)
    exact_scan(inputs, chunk=8)[0].square().sum().backward()
    assert v.grad is not None
    by_scan = v.grad.clone()
    v.grad = None
    textbook(inputs)[0].square().sum().backward()
    assert relative(by_scan, v.grad) < FP64


def test_leaves_its_inputs_alone() -> None:
    inputs = sample_inputs("kda", steps=20)
    start = torch.randn(2, 4, 8, 16, dtype=torch.float64)
    before = [x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.log_decay, start)]
    exact_scan(inputs, start)
    after = (inputs.q, inputs.k, inputs.v, inputs.log_decay, start)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_mutant_decay_of_the_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    # γ_{j:s} in place of γ_{j+1:s}: the write of a step decayed by its own step.
    right = decays.WindowDecays.end_factors
    monkeypatch.setattr(
        decays.WindowDecays,
        "end_factors",
        lambda self, x: (
            right(self, x) * torch.exp(self.log.diff(dim=-2, prepend=self.log[..., :1, :] * 0))
        ),
    )
    inputs = sample_inputs("mamba2", steps=20)
    assert relative(exact_scan(inputs)[1], textbook(inputs)[1]) > 1e-3


def test_mutant_correction_without_write_strength(monkeypatch: pytest.MonkeyPatch) -> None:
    right = window._unit_lower_inverse
    monkeypatch.setattr(window, "_unit_lower_inverse", lambda x: right(x * 0.9))
    inputs = sample_inputs("gdn", steps=20)
    assert relative(exact_scan(inputs)[0], textbook(inputs)[0]) > 1e-3
