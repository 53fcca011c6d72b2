"""What the scan refuses, reports and carries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantlab.replay import StepwiseCache, WindowedScan, parse_policy
from tests.recurrence.sampling import sample_inputs
from tests.replay.decoding import PROMPT, STREAMS, Engine, decode, for_policies

ENGINES = [WindowedScan, StepwiseCache]


@pytest.mark.parametrize("engine", ENGINES)
def test_divergence_is_noted_where_it_begins_and_the_run_goes_on(engine: type[Engine]) -> None:
    # From step 40 on stream 1 is written values beyond FP16; its state overflows at the store
    # that ends the window, 48 tokens after the prompt.
    texts = ["shared:fp16", "shared:fp32", "fp16 / fp32", "conventional:fp16"]
    policies = [parse_policy(text) for text in texts]
    inputs = sample_inputs("mamba2", steps=PROMPT + 70, half_lives=(50.0, 2000.0))
    assert inputs.dt is not None
    v = inputs.v.clone()
    v[1, PROMPT + 40 :] = 1e7
    inputs = for_policies(replace(inputs, v=v), len(policies))
    o, scan = decode(engine, policies, inputs, [PROMPT, PROMPT + 30])
    at = scan.diverged_at.view(len(policies), 2)
    assert at[:, 0].tolist() == [-1] * 4
    assert at[0, 1] == 48
    assert at[1, 1] == -1
    assert at[2, 1] == 48  # the read copy overflows, the recurrence copy does not
    assert 41 <= at[3, 1] <= 44
    assert torch.isfinite(o[::2]).all()
    assert not torch.isfinite(o[1, -1]).all()
    assert torch.isfinite(o[3]).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_divergence_of_the_prompts_state_is_position_0(engine: type[Engine]) -> None:
    inputs = sample_inputs("gdn", steps=20)
    scan = engine([parse_policy("shared:fp16")], STREAMS, layer=0, seed=0)
    state = torch.zeros(2, 4, 8, 16, dtype=torch.float64)
    state[1] = 1e6
    scan.start(state, inputs)
    assert scan.diverged_at.tolist() == [-1, 0]


@pytest.mark.parametrize("engine", ENGINES)
def test_refuses_to_decode_before_a_prompt(engine: type[Engine]) -> None:
    inputs = sample_inputs("gdn", steps=20)
    scan = engine([parse_policy("shared:fp16")], STREAMS, layer=0, seed=0)
    with pytest.raises(RuntimeError, match="prefill"):
        scan(inputs)
    with pytest.raises(RuntimeError, match="prefill"):
        scan.state()


def test_refuses_other_rows_and_narrow_products() -> None:
    inputs = sample_inputs("gdn", steps=20)
    with pytest.raises(ValueError, match="4 rows, got 2"):
        decode(WindowedScan, [parse_policy("shared:fp16")] * 2, inputs)
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(RuntimeError, match="full FP32"):
            decode(WindowedScan, [parse_policy("shared:fp16")], inputs)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_refuses_a_state_of_other_policies() -> None:
    inputs = sample_inputs("gdn", steps=20)
    _, scan = decode(WindowedScan, [parse_policy("shared:fp16")], inputs)
    for text in ("shared:fp16 L=4", "fp8 / fp16"):
        _, other = decode(WindowedScan, [parse_policy(text)], inputs)
        with pytest.raises(ValueError, match="saved state"):
            other.load_state_dict(scan.state_dict())


@pytest.mark.parametrize("engine", ENGINES)
def test_inputs_and_given_states_are_left_alone(engine: type[Engine]) -> None:
    policies = [parse_policy(t) for t in ("shared:fp32", "nvfp4 / fp32 records=bf16")]
    inputs = for_policies(sample_inputs("gdn", steps=60, dtype=torch.float32), 2)
    given = [inputs.q, inputs.k, inputs.v, inputs.log_decay]
    before = [x.clone() for x in given]
    state = torch.randn(4, 4, 8, 16)
    kept = state.clone()
    scan = engine(policies, STREAMS, layer=0, seed=0)
    scan.start(state, inputs)
    scan(inputs.slice(0, 50))
    now = scan.state()
    then = now.clone()
    saved = scan.state_dict()
    frozen = {name: x.clone() for name, x in saved.items()}
    scan(inputs.slice(50, 60))
    assert torch.equal(state, kept)
    assert torch.equal(now, then)
    assert all(torch.equal(saved[name], frozen[name]) for name in saved)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def test_a_state_can_be_loaded_outside_inference_mode() -> None:
    inputs = sample_inputs("gdn", steps=40)
    policies = [parse_policy("shared:fp16"), parse_policy("fp8 / fp16")]
    inputs = for_policies(inputs, 2)
    _, scan = decode(WindowedScan, policies, inputs)
    with torch.inference_mode():
        _, other = decode(WindowedScan, policies, inputs.slice(0, 20))
    other.load_state_dict(scan.state_dict())
    assert torch.equal(other(inputs), scan(inputs))
