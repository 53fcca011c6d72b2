"""Public reports of hybrid caches going wrong, as tests, named by their case.

Each runs on tiny random models of every adapted family, in FP32, with the installed transformers.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import transformers

from quantlab.errors import UsageError
from quantlab.models import (
    OpCall,
    check_model,
    forward,
    forward_hidden,
    head,
    new_cache,
    replaced,
    takes_positions,
)
from quantlab.models.check import exact_op
from quantlab.models.identity import refuse_mixed, set_time_step_limit
from quantlab.models.load import quiet_transformers
from tests.models.tiny import FAMILY_NAMES, tiny, tokens

EVERY = pytest.mark.parametrize("family", FAMILY_NAMES)


@pytest.fixture(autouse=True)
def _quiet():
    with quiet_transformers(), torch.inference_mode():
        yield


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def stepped(m, x: torch.Tensor, size: int, prompt: int = 12) -> torch.Tensor:
    cache = new_cache(m)
    parts = [head(m, forward_hidden(m, x[:, :prompt], cache=cache))]
    for start in range(prompt, x.shape[1], size):
        piece = x[:, start : start + size]
        parts.append(head(m, forward_hidden(m, piece, cache=cache, start=start)))
    return torch.cat(parts, 1)


@EVERY
def test_C01_several_tokens_with_a_filled_cache(family):
    """Prefill + steps of 3, 7 and 1 tokens agree with the full forward, transformers' own op too.

    One-token steps of Nemotron-H's own op do not, which is why one limit of Δ is applied.
    """
    m, x = tiny(family), tokens(2, 26)
    full = head(m, forward_hidden(m, x))
    for size in (3, 7) if family == "nemotron_h" else (1, 3, 7):
        assert relative(stepped(m, x, size), full) < 1e-4
    with replaced(m, exact_op):
        ours = head(m, forward_hidden(m, x))
        for size in (1, 3, 7):
            assert relative(stepped(m, x, size), ours) < 1e-4


@EVERY
def test_C02_left_padding_does_not_reach_the_state(family):
    m, x = tiny(family), tokens(1, 9)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.int64), x], dim=1)
    batch = torch.cat([padded, tokens(1, 14, seed=9)])
    mask = torch.ones(2, 14, dtype=torch.int64)
    mask[0, :5] = 0
    with replaced(m, exact_op):
        alone = m.model(input_ids=x).logits[0, -1]
        one = m.model(input_ids=padded, attention_mask=mask[:1]).logits[0, -1]
        two = m.model(input_ids=batch, attention_mask=mask).logits[0, -1]
    assert relative(one, alone) < 1e-4
    assert relative(two, alone) < 1e-4


@EVERY
def test_C03_right_padding_is_refused(family):
    m, x = tiny(family), tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, -3:] = 0
    with pytest.raises(UsageError, match="right padding"), replaced(m, exact_op):
        m.model(input_ids=x, attention_mask=mask)


def test_C03_pads_keep_decaying_a_state():
    """Why: 7 pads with Δ = 0.1 and A = -1 leave exp(-0.7) = 0.4966 of a state."""
    from quantlab.recurrence.inputs import OpInputs

    zeros = torch.zeros(1, 7, 1, 2)
    inputs = OpInputs(
        q=zeros, k=zeros, v=zeros, log_decay=torch.full((1, 7, 1), -0.1),
        dt=torch.full((1, 7, 1), 0.1),
    )  # fmt: skip
    call = OpCall(layer=0, inputs=inputs, initial_state=torch.ones(1, 1, 2, 2), wants_state=True)
    _, state = exact_op(call)
    assert torch.allclose(state, torch.full_like(state, math.exp(-0.7)), rtol=1e-6)


def _greedy(m, x: torch.Tensor) -> torch.Tensor:
    return m.model.generate(input_ids=x, max_new_tokens=8, min_new_tokens=8, do_sample=False)


@EVERY
def test_C05_greedy_tokens_with_and_without_our_op(family):
    """Eight greedy tokens are equal, and after a prefill every layer says it has a state."""
    m, x = tiny(family), tokens(1, 12)
    if m.family.op == "mamba2":
        set_time_step_limit(m, (0.0, math.inf))  # decode clamps as little as transformers' does
    own = _greedy(m, x)
    with replaced(m, exact_op) as seen:
        ours = _greedy(m, x)
    assert torch.equal(own, ours)
    assert seen.calls == [8] * m.layers
    for handler in (exact_op, lambda c: (exact_op(c)[0], None)):
        cache = new_cache(m)
        with replaced(m, handler):
            forward_hidden(m, x, cache=cache)
        layers = [cache.layers[mixer.layer_idx] for mixer in m.recurrent_modules]
        assert all(layer.has_previous_state[0] for layer in layers)


def test_C06_multipliers_of_the_pure_torch_path():
    """Falcon-H1 with every multiplier ≠ 1: our path against transformers', and they matter."""
    m, x = tiny("falcon_h1"), tokens(2, 20)
    own = forward.call(m.model, x).logits
    with replaced(m, exact_op):
        assert relative(forward.call(m.model, x).logits, own) < 1e-3
    plain = tiny("falcon_h1", ssm_multipliers=[1.0] * 5, ssm_in_multiplier=1.0)
    assert relative(forward.call(plain.model, x).logits, own) > 1e-2


def test_C08_implementations_are_recorded_and_never_mixed():
    a, b = tiny("qwen3_5").identity, tiny("qwen3_5").identity
    assert a["op_implementation"] == "torch"
    assert a["transformers"] == transformers.__version__
    refuse_mixed(a, b)
    with pytest.raises(UsageError, match="op_implementation"):
        refuse_mixed(a, {**b, "op_implementation": "fla 0.6.0"})


@EVERY
def test_C09_positions_forced_to_0_fail_the_self_test(family, monkeypatch):
    m = tiny(family)
    own = forward.positions
    monkeypatch.setattr(forward, "positions", lambda start, ids: own(0, ids))
    report = check_model(m)
    # Mamba-2 has no positions; Nemotron-H's and Kimi's attention uses none.
    expected = {"mamba2": True, "nemotron_h": True, "kimi_linear": True}.get(family, False)
    assert report.passed == expected, report.table()
    assert takes_positions(m.model.base_model) == (family != "mamba2")


@EVERY
def test_C11_arms_from_one_prefix_do_not_touch_each_other(family):
    """Baseline, quantized, baseline again from copies of one prefix: first = third, bitwise."""
    m, x = tiny(family), tokens(2, 16)

    def coarse(c: OpCall):
        o, state = exact_op(c)
        return o, (state * 4).round() / 4

    prefix = new_cache(m)
    with replaced(m, exact_op):
        forward_hidden(m, x[:, :12], cache=prefix)
    arms = []
    for handler in (exact_op, coarse, exact_op):
        cache = copy.deepcopy(prefix)
        with replaced(m, handler):
            arms.append(
                torch.cat(
                    [
                        head(m, forward_hidden(m, x[:, t : t + 1], cache=cache, start=t))
                        for t in range(12, 16)
                    ],
                    1,
                )
            )
    assert torch.equal(arms[0], arms[2])
    assert relative(arms[1], arms[0]) > 1e-3


def test_D05_equal_arms_are_equal_in_every_recorded_respect():
    """One engine, weights and ids in both arms: identical identities, and logits bit for bit."""
    a, b = tiny("qwen3_5"), tiny("qwen3_5")
    refuse_mixed(a.identity, b.identity)
    x = tokens(2, 20)
    with replaced(a, exact_op):
        first = head(a, forward_hidden(a, x))
        again = head(a, forward_hidden(a, x))
    with replaced(b, exact_op):
        other = head(b, forward_hidden(b, x))
    assert torch.equal(first, again) and torch.equal(first, other)
    divergence = torch.nn.functional.kl_div(
        again.log_softmax(-1), first.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert float(divergence) == 0.0
