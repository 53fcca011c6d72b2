"""The study's attention equals plain attention under a lower-right causal mask."""

import pytest
import torch

from quantlab.engine.attention import lower_right_attention


def plain(query, key, value, scale):
    """FP64 softmax attention, position i of the last T seeing all up to its own."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    scores = query.double() @ key.mT * scale
    steps, length = scores.shape[-2:]
    later = torch.arange(length)[None] > torch.arange(steps)[:, None] + length - steps
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2)


@pytest.mark.parametrize("steps", [1, 5, 9])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3)], ids=["grouped", "full"])
def test_matches_masked_softmax(steps, heads):
    torch.manual_seed(0)
    query = torch.randn(2, heads[0], steps, 8)
    key, value = torch.randn(2, heads[1], 9, 8), torch.randn(2, heads[1], 9, 6)
    out, _ = lower_right_attention(torch.nn.Identity(), query, key, value, None, scaling=0.3)
    want = plain(query, key, value, 0.3)
    # FP32 softmax over 9 terms of size ~1: a few ulp; an upper-left mask is off by 0.1 and more.
    assert (out - want).abs().max() < 2e-6
    if 1 < steps < 9:
        wrong = torch.nn.functional.scaled_dot_product_attention(
            query,
            *(x.repeat_interleave(heads[0] // heads[1], 1) for x in (key, value)),
            is_causal=True,
            scale=0.3,
        ).transpose(1, 2)
        assert (wrong - want).abs().max() > 0.05


def test_refuses_a_mask():
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="no mask"):
        lower_right_attention(torch.nn.Identity(), x, x, x, torch.ones(2, 2))
