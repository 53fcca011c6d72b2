"""Proof 1: the windowed scan is the stepwise cache is the textbook recurrence, in FP64."""

from __future__ import annotations

import pytest
import torch

from quantlab.recurrence import textbook
from quantlab.replay import StepwiseCache, WindowedScan, parse_policy
from tests.recurrence.sampling import KINDS, relative, sample_inputs
from tests.replay.decoding import FP64, PROMPT, STREAMS, Engine, compare, decode, for_policies

STEPS = 75


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 2, 4, 16, 64])
def test_unrounded_equals_textbook(kind: str, window: int) -> None:
    texts = ["conventional:fp64", "shared:fp64"] + ["fp64 / fp64"] * (window > 1)
    policies = [parse_policy(t, window=window, records="exact") for t in texts]
    inputs = for_policies(sample_inputs(kind, steps=STEPS, dv=5, dk=16), len(policies))
    o_ref, s_ref = textbook(inputs)
    for engine in (WindowedScan, StepwiseCache):
        o, scan = decode(engine, policies, inputs)
        assert relative(o, o_ref) < FP64
        assert relative(scan.state(), s_ref) < FP64


EVERY_FORMAT = (
    "fp32", "fp16", "fp16-sr", "bf16", "bf16-sr", "fp8", "fp8-sr", "nvfp4", "nvfp4-sr", "mxfp4",
    "int8@row", "int8@key-sr", "fp8@tile32x128:qmax=240,scale=bf16,scale_round=up",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_format(kind: str) -> None:
    policies = [parse_policy(f"shared:{fmt}") for fmt in EVERY_FORMAT]
    policies += [parse_policy(f"{fmt} / fp16-sr") for fmt in EVERY_FORMAT]
    # dk is no multiple of a block of 16 or 32
    compare(policies, sample_inputs(kind, steps=STEPS, dv=5, dk=24))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("records", ["auto", "bf16", "fp32", "exact"])
@pytest.mark.parametrize("corrections", ["rederive", "fold"])
def test_every_record_type(kind: str, records: str, corrections: str) -> None:
    texts = ("conventional:nvfp4-sr", "shared:fp8-sr", "nvfp4 / fp16-sr", "nvfp4 / fp32")
    policies = [
        parse_policy(f"{text} records={records} corrections={corrections}") for text in texts
    ]
    for activation in (torch.bfloat16, torch.float32):
        inputs = sample_inputs(
            kind, steps=STEPS, heads=6, key_heads=2, dv=3, dk=16, activation_dtype=activation
        )
        compare(policies, inputs, [PROMPT, 10, 11, 25, 57, 58])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [2, 4, 16, 64])
@pytest.mark.parametrize("records", ["bf16", "exact"])
def test_segments_cut_anywhere(kind: str, window: int, records: str) -> None:
    texts = ("shared:nvfp4-sr", "fp8 / fp16-sr", "fp16 / fp8 corrections=fold")
    policies = [parse_policy(f"{text} L={window} records={records}") for text in texts]
    inputs = sample_inputs(kind, steps=STEPS, dv=5, dk=16)
    cuts = torch.randperm(STEPS - PROMPT - 1, generator=torch.Generator().manual_seed(window))
    compare(policies, inputs, [PROMPT, *sorted((PROMPT + 1 + cuts[:7]).tolist())])


def test_windows_and_kinds_mix_in_one_batch() -> None:
    texts = ("conventional", "shared:fp8-sr L=4", "nvfp4 / fp32", "conventional:nvfp4-sr",
             "shared:fp16 L=5", "shared:fp32", "nvfp4 / fp32")  # fmt: skip
    policies = [parse_policy(text) for text in texts]
    compare(policies, sample_inputs("gdn", steps=STEPS), [PROMPT, 20])


def test_planning_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    policies = [parse_policy("nvfp4 / fp16-sr L=4"), parse_policy("conventional:fp8")]
    inputs = for_policies(sample_inputs("gdn", steps=STEPS), 2)
    o, scan = decode(WindowedScan, policies, inputs)
    monkeypatch.setattr("quantlab.replay.scan.PLAN_ELEMENTS", 1)
    o_small, scan_small = decode(WindowedScan, policies, inputs)
    assert relative(o_small, o) < FP64
    assert relative(scan_small.state(), scan.state()) < FP64


def test_F07_one_step_windows_equal_the_stepwise_engine_bit_for_bit() -> None:
    for kind in KINDS:
        for dtype in (torch.float32, torch.float64):
            inputs = sample_inputs(kind, steps=40, dk=128, dv=64, dtype=dtype)
            policies = [parse_policy("conventional:fp8-sr")]
            o_ref, cache = decode(StepwiseCache, policies, inputs)
            _, scan = decode(WindowedScan, policies, inputs)
            # the prompts' states differ in the order of additions: start both from one
            scan.start(cache.state(), inputs)
            cache.start(cache.state())
            assert torch.equal(scan(inputs), cache(inputs))
            assert torch.equal(scan.state(), cache.state())
            assert torch.isfinite(o_ref).all()


@pytest.mark.parametrize("engine", [WindowedScan, StepwiseCache])
def test_resumes_bit_for_bit(engine: type[Engine]) -> None:
    policies = [parse_policy("shared:nvfp4-sr"), parse_policy("fp8 / fp16-sr records=bf16")]
    policies.append(parse_policy("conventional:fp8-sr"))
    inputs = for_policies(sample_inputs("gdn", steps=STEPS, dtype=torch.float32), 3)
    o, whole = decode(engine, policies, inputs, [PROMPT, 30])
    _, first = decode(engine, policies, inputs.slice(0, 30), [PROMPT])
    saved = first.state_dict()
    second = engine(policies, STREAMS, layer=2, seed=7)
    second.load_state_dict(saved)
    assert torch.equal(second(inputs.slice(30, STEPS)), o[:, 30:])
    assert torch.equal(second.state(), whole.state())
    assert torch.equal(second.diverged_at, whole.diverged_at)
