"""exact_scan against the textbook recurrence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantlab.recurrence import OpInputs, decays, exact_scan, textbook, window
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


@pytest.mark.parametrize("kind", KINDS)
def test_is_differentiable_in_every_input(kind: str) -> None:
    inputs = sample_inputs(kind, steps=20)
    names = ("q", "k", "v", "log_decay", "beta", "dt")

    def gradients(scan: Callable[[OpInputs], tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        found = {
            n: x.clone().requires_grad_() for n in names if (x := getattr(inputs, n)) is not None
        }
        o, state = scan(replace(inputs, **found))
        (o.square().sum() + state.square().sum()).backward()
        return {n: x.grad for n, x in found.items() if x.grad is not None}

    want = gradients(textbook)
    got = gradients(lambda x: exact_scan(x, chunk=8))
    assert got.keys() == want.keys() and len(want) == 5
    for name, gradient in want.items():
        assert relative(got[name], gradient) < FP64, name


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
