"""CASES group (d) that needs a model: D05, D08 and D11.

D01-D04, D08 (toy logits) and D10 are in tests/metrics/test_divergence.py, D05 (resume) in
tests/study/test_run.py, D07 in tests/data/test_tokenize.py.
"""

import math

import pytest
import torch

from quantlab.engine import TeacherForcing
from quantlab.errors import UsageError
from quantlab.metrics.divergence import compare
from quantlab.models import forward_hidden, head
from quantlab.models.identity import refuse_mixed
from quantlab.replay.policy import parse_policy
from tests.models.tiny import VOCAB, tiny


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return tiny("qwen3_5")


def forced(m, tokens, *, engine, policies=("shared:fp16-sr",), seed=0):
    forcing = TeacherForcing(
        m,
        tokens,
        policies=[parse_policy(p) for p in policies],
        stream_ids=range(tokens.shape[0]),
        positions=range(1, 33),
        prompt=11,
        segment=32,
        seed=seed,
        engine=engine,
    )
    parts = list(forcing.run())
    logits = torch.cat([p.logits for p in parts], dim=2)
    return logits, torch.cat([p.targets for p in parts], dim=1)


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(VOCAB, (2, 11 + 32 + 1), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("field", ["sha256", "torch", "transformers", "op_implementation", "dtype"])
def test_D05_two_arms_must_match(model, field):
    refuse_mixed(model.identity, dict(model.identity))
    with pytest.raises(UsageError, match=field):
        refuse_mixed(model.identity, {**model.identity, field: "another"})


def test_D05_self_kl_of_equal_runs_is_zero(model, tokens):
    first, targets = forced(model, tokens, engine="windowed")
    second, _ = forced(model, tokens, engine="windowed")
    repeat = torch.stack([first[0], second[0]])
    assert (compare(repeat, targets).kl == 0).all()
    # listed as a policy of its own batch, the reference differs by what a product's rows do to
    # each other: 2^-24 relative of logits of a few units, squared
    pair, _ = forced(model, tokens, engine="windowed", policies=("conventional:fp32",))
    assert compare(pair, targets).kl.max() < 1e-10


@pytest.mark.parametrize("engine", ["windowed", "stepwise"])
def test_D08_logits_score_the_next_token_in_full_and_cached_mode(model, tokens, engine):
    logits, targets = forced(model, tokens, engine=engine)
    # position t has consumed the prompt and t more tokens, and scores the one after them
    assert torch.equal(targets, tokens[:, 12:44])
    with torch.inference_mode():
        plain = model.model(tokens).logits
    full = plain[:, 11 : 11 + 32].float()
    # FP32 noise against logits of a few units; a shift by one is off by units
    assert (logits[0] - full).abs().max() < 1e-3 * full.abs().max()
    shifted = plain[:, 10 : 10 + 32].float()
    assert (logits[0] - shifted).abs().max() > 0.1 * full.abs().max()
    nll = compare(logits, targets).nll_reference
    direct = torch.nn.functional.cross_entropy(
        full.flatten(0, 1).double(), targets.flatten(), reduction="none"
    )
    assert (nll.flatten() - direct).abs().max() < 1e-3
    assert nll.mean() < math.log(VOCAB) + 5


def test_D11_last_hidden_state_is_normed_and_the_layers_output_is_not(model, tokens):
    seen = {}
    inner = model.model.model
    handle = inner.layers[-1].register_forward_hook(
        lambda module, inputs, output: seen.update(
            layer=output[0] if isinstance(output, tuple) else output
        )
    )
    try:
        with torch.inference_mode():
            last = model.model(tokens, output_hidden_states=True).hidden_states[-1]
            hidden = forward_hidden(model, tokens)
            ours = head(model, hidden)
            plain = model.model(tokens).logits
    finally:
        handle.remove()
    with torch.inference_mode():
        normed = inner.norm(seen["layer"])
    assert torch.equal(normed, last) and not torch.allclose(seen["layer"], last, rtol=0.05)
    # what the study's head takes is the normed one, once: norming twice would move the logits
    assert torch.allclose(ours, plain.float(), atol=1e-5)
