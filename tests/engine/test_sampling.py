"""Sampling: the softmax's law, filters in their order, noise that belongs to a place."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from quantlab.engine.sampling import Sampling, choose, gumbel, scores, stream_id
from quantlab.errors import UsageError
from quantlab.formats.philox import sr_words


def noise(rows, *, seed=0, vocabulary=16, step=0, repetition=0):
    full = torch.full((rows,), 1)
    return gumbel(
        seed=seed, question=torch.arange(rows), repetition=repetition * full,
        step=step * full, vocabulary=vocabulary,
    )  # fmt: skip


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_draws_follow_the_softmax(temperature):
    n = 40_000
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -5.0, 0.5]).expand(n, -1)
    kept = scores(logits, Sampling(temperature=temperature))
    token, margin = choose(kept, noise(n, vocabulary=6))
    expected = n * (logits[0].double() / temperature).softmax(0).numpy()
    assert chisquare(np.bincount(token, minlength=6), expected).pvalue > 1e-4
    assert (margin > 0).all()


def test_noise_is_standard_gumbel():
    g = noise(1000, vocabulary=999).numpy().ravel()
    # mean γ, variance π²/6; 4 standard errors of 999,000 draws
    assert abs(g.mean() - np.euler_gamma) < 4 * math.pi / math.sqrt(6 * g.size)
    assert abs(g.var() - math.pi**2 / 6) < 0.02
    assert np.isfinite(g).all()


def test_noise_belongs_to_its_place():
    whole = noise(5, vocabulary=11)
    assert torch.equal(noise(3, vocabulary=11), whole[:3])
    assert torch.equal(noise(5, vocabulary=7), whole[:, :7])
    for change in ({"seed": 1}, {"step": 1}, {"repetition": 1}):
        other = noise(5, vocabulary=11, **change)
        assert not (other == whole).any()
    assert len(whole.unique()) == whole.numel()


def test_noise_shares_no_word_with_state_rounding():
    """The same question as a stream and its step as a flush: other words."""
    state = sr_words(
        seed=0, layer=0, copy=0, stream=torch.tensor([3]), flush=5, heads=1, dv=1, dk=64
    )
    u = torch.exp(-torch.exp(-gumbel(
        seed=0, question=torch.tensor([3]), repetition=torch.tensor([0]), step=torch.tensor([5]),
        vocabulary=64,
    )))  # fmt: skip
    assert ((u * 2**32 - 0.5).round().long() != state.flatten()).all()


def reference(logits, s, seen):
    """The filters once more, a row at a time in numpy."""
    x = logits.astype(np.float64).copy()
    x[list(seen)] -= s.presence_penalty
    x /= s.temperature
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if s.top_k:
        order = order[: s.top_k]
    p = np.exp(x[order] - x[order[0]])
    p /= p.sum()
    kept, total = [], 0.0
    for i, share in zip(order, p, strict=True):
        if total < s.top_p:
            kept.append(i)
        total += share
    return set(kept), x


@pytest.mark.parametrize(
    "s",
    [
        Sampling(top_p=0.95),
        Sampling(top_p=0.95, top_k=20, presence_penalty=1.5),
        Sampling(temperature=0.6, top_p=0.95, top_k=20),
        Sampling(top_k=3),
        Sampling(top_p=1e-6),
        Sampling(top_k=1000),
    ],
)
def test_filters_match_a_plain_reference(s):
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 2, (20, 50)).astype(np.float32)
    logits[3] = 1.0  # ties everywhere: the least ids stay
    seen = generator.random((20, 50)) < 0.2
    got = scores(torch.from_numpy(logits), s, seen=torch.from_numpy(seen)).numpy()
    for row in range(20):
        kept, x = reference(logits[row], s, np.flatnonzero(seen[row]))
        assert set(np.flatnonzero(np.isfinite(got[row]))) == kept
        assert np.allclose(got[row][list(kept)], x[list(kept)], rtol=1e-12)


def test_greedy_takes_the_least_of_equal_ids():
    s = Sampling(temperature=0)
    token, margin = choose(scores(torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.5, 1.0]]), s), None)
    assert token.tolist() == [1, 0] and margin.tolist() == [0.0, 1.0]
    penalised = Sampling(temperature=0, presence_penalty=1.5)
    seen = torch.tensor([[False, False, False], [True, False, False]])
    token, _ = choose(
        scores(torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.5, 1.0]]), penalised, seen=seen), None
    )
    assert token.tolist() == [1, 2]


def test_one_kept_token_has_no_runner_up():
    kept = scores(torch.tensor([[0.0, 5.0]]), Sampling(top_k=1))
    token, margin = choose(kept, noise(1, vocabulary=2))
    assert token.item() == 1 and margin.item() == math.inf


@pytest.mark.parametrize(
    "bad", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}]
)
def test_settings_that_cannot_be(bad):
    with pytest.raises(UsageError):
        Sampling(**bad)


def test_stream_ids_are_distinct():
    ids = {stream_id(q, r) for q in (0, 1, 12_031, 2**20 - 1) for r in (0, 1, 2, 4095)}
    assert len(ids) == 16 and max(ids) < 2**32
    for q, r in ((2**20, 0), (0, 4096), (-1, 0)):
        with pytest.raises(UsageError):
            stream_id(q, r)
