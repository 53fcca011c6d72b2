from __future__ import annotations

import inspect

import pytest
import torch

from quantlab.errors import UsageError
from quantlab.models import cache_keyword, forward_hidden, head, new_cache, takes_positions
from quantlab.models.forward import call, product_fp32
from quantlab.models.load import quiet_transformers
from tests.models.tiny import FAMILY_NAMES, tiny, tokens


@pytest.fixture(autouse=True)
def _quiet():
    with quiet_transformers(), torch.inference_mode():
        yield


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_head_of_hidden_is_the_models_own_logits(family):
    """In FP32 the product is the model's own, multipliers and divisors included: bit for bit."""
    m, x = tiny(family), tokens(2, 9)
    own = call(m.model, x).logits
    hidden = forward_hidden(m, x)
    assert torch.equal(head(m, hidden), own)
    assert torch.equal(head(m, hidden[:, [2, 7]]), head(m, hidden)[:, [2, 7]])
    assert "forward" not in m.model.base_model.__dict__
    assert torch.equal(call(m.model, x).logits, own), "nothing stays patched"


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_bf16_head_is_not_rounded(family):
    """Logits of a BF16 model: FP64 product of the same factors to 1e-6, where the model's own are
    off by 2⁻⁹ (the mutant: a head that rounds)."""
    m, x = tiny(family, dtype=torch.bfloat16), tokens(2, 9)
    hidden = forward_hidden(m, x)
    assert hidden.dtype in (torch.bfloat16, torch.float32)
    got = head(m, hidden)
    assert got.dtype == torch.float32
    config = m.model.config
    scale = getattr(config, "lm_head_multiplier", 1.0) / getattr(config, "logits_scaling", 1.0)
    weight = m.model.get_output_embeddings().weight
    exact = hidden.to(weight.dtype).double() @ weight.double().t() * scale
    assert float((got - exact).abs().max() / exact.abs().max()) < 1e-6
    own = call(m.model, x).logits
    assert float((own - exact).abs().max() / exact.abs().max()) > 1e-4


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_cache_keyword_is_named_in_both_signatures(family):
    m = tiny(family)
    for model in (m.model, m.model.base_model):
        assert cache_keyword(model) in inspect.signature(model.forward).parameters
    cache = new_cache(m)
    forward_hidden(m, tokens(1, 5), cache=cache)
    filled = [m.recurrent_modules[i].layer_idx for i in range(m.layers)]
    assert all(cache.layers[i].recurrent_states[0] is not None for i in filled)


def test_cache_keyword_prefers_the_newest_and_refuses_none():
    class New(torch.nn.Module):
        def forward(self, input_ids, past_key_values=None, cache=None): ...

    class Old(torch.nn.Module):
        def forward(self, input_ids, past_key_values=None, **kwargs): ...

    class Without(torch.nn.Module):
        def forward(self, input_ids, **kwargs): ...

    assert cache_keyword(New()) == "cache"
    assert cache_keyword(Old()) == "past_key_values"
    with pytest.raises(UsageError, match="names no cache argument"):
        cache_keyword(Without())


def test_only_mamba2_takes_no_positions():
    assert [f for f in FAMILY_NAMES if not takes_positions(tiny(f).model.base_model)] == ["mamba2"]


def test_product_fp32_splits_a_large_head(monkeypatch):
    from quantlab.models import forward

    monkeypatch.setattr(forward, "_HEAD_CHUNK", 64)
    x, w = torch.randn(3, 4, 16).bfloat16(), torch.randn(37, 16).bfloat16()
    bias = torch.randn(37).bfloat16()
    want = x.double() @ w.double().t() + bias.double()
    got = product_fp32(x, w, bias)
    assert got.shape == (3, 4, 37)
    assert torch.allclose(got.double(), want, atol=1e-5)
