"""KL, NLL and top-1 against scipy in FP64; cases D01-D04, D08, D10."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, rel_entr

from quantlab.errors import RunError
from quantlab.metrics.divergence import compare, kl_divergence


def random_logits(rows, streams, n, vocab, *, scale=4.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(1, streams, n, vocab, generator=generator) * scale
    noise = torch.randn(rows, streams, n, vocab, generator=generator) * 1e-3
    noise[0] = 0
    targets = torch.randint(vocab, (streams, n), generator=generator)
    return base + noise, targets


def one(p, q):
    """Compare two rows of logits given as lists."""
    logits = torch.tensor([p, q], dtype=torch.float32)[:, None, None, :]
    return compare(logits, torch.zeros(1, 1, dtype=torch.int64))


def scipy_kl(logits):
    log = log_softmax(logits.double().numpy(), axis=-1)
    return rel_entr(np.exp(log[:1]), np.exp(log[1:])).sum(-1)


def test_kl_is_scipys_in_fp64():
    logits, targets = random_logits(3, 2, 5, 1000)
    got = compare(logits, targets)
    expected = scipy_kl(logits)
    assert got.kl.shape == (2, 2, 5) and got.kl.dtype == torch.float64
    # 1,000 terms of at most 1e-3 nats, each with a few 2^-53: below 1e-15 in all. FP32
    # log-softmax is off by 1e-7 here, which this catches.
    np.testing.assert_allclose(got.kl.numpy(), expected, rtol=0, atol=1e-15)
    fp32 = torch.nn.functional.kl_div(
        logits[1:].log_softmax(-1), logits[:1].log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    assert abs(fp32.numpy() - expected).max() > 1e-9


def test_kl_far_below_fp64s_unit_roundoff_is_right():
    # KL of a small shift d of the logits is Var_p(d) / 2 + O(d^3): an oracle without cancellation
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(1000, dtype=torch.float64, generator=generator) * 4
    d = torch.randn(1000, dtype=torch.float64, generator=generator) * 2.0**-30
    shifted = base + d
    p, d = base.softmax(-1), shifted - base
    expected = ((p * d.square()).sum() - (p * d).sum().square()).item() / 2
    got = kl_divergence(base.log_softmax(-1), shifted.log_softmax(-1)).item()
    assert 1e-19 < expected < 1e-17
    # relative: 2^-30 of the cubic term, 2^-53 / d = 2^-23 of rounding in log q - log p
    assert got == pytest.approx(expected, rel=1e-5)
    plain = (p * (base.log_softmax(-1) - shifted.log_softmax(-1))).sum().item()
    assert abs(plain - expected) > 0.1 * expected  # what the rewritten sum is for


def test_tiny_probabilities_under_a_large_ratio():
    # p underflows to the subnormals where q is ordinary: exp(log q - log p) would overflow
    log_p = torch.tensor([0.0, -744.0], dtype=torch.float64)
    log_q = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    assert kl_divergence(log_p, log_q).item() == pytest.approx(math.log(2), rel=1e-15)


def test_nll_and_top1():
    logits, targets = random_logits(2, 2, 6, 50)
    logits[1, 0, 3] = -logits[1, 0, 3]
    got = compare(logits, targets)
    log = log_softmax(logits.double().numpy(), axis=-1)
    picked = -np.take_along_axis(log, targets.numpy()[None, :, :, None], -1)[..., 0]
    np.testing.assert_allclose(got.nll.numpy(), picked[1:], atol=1e-14)
    np.testing.assert_allclose(got.nll_reference.numpy(), picked[0], atol=1e-14)
    expected = (logits[1:].argmax(-1) == logits[:1].argmax(-1)).numpy()
    assert (got.top1_agrees.numpy() == expected).all() and not got.top1_agrees[0, 0, 3]


def test_equal_logits_give_exactly_zero():
    logits, targets = random_logits(2, 1, 3, 384)
    logits[1] = logits[0]
    assert (compare(logits, targets).kl == 0).all()


def test_D01_one_hot_over_a_large_vocabulary():
    logits = torch.full((2, 1, 1, 248_320), -30.0)
    logits[..., 0] = 0.0
    assert compare(logits, torch.zeros(1, 1, dtype=torch.int64)).kl.item() == 0.0
    # what a reference stored with a floor at 16 below its maximum reports: 2.7 % of false tail
    clipped = logits.clone()
    clipped[0].clamp_min_(-16.0)
    false = compare(clipped, torch.zeros(1, 1, dtype=torch.int64)).kl.item()
    assert false == pytest.approx(0.353, abs=1e-3)


def test_D01_negative_kl_is_a_failure(monkeypatch):
    monkeypatch.setattr(
        "quantlab.metrics.divergence.kl_divergence", lambda p, q: (p - q).sum(-1) * 0 - 2e-9
    )
    with pytest.raises(RunError, match=r"-2e-09 nats, below -1e-09"):
        one([0.0, 0.0], [0.0, 0.0])


def test_D02_minus_inf_on_both_sides():
    inf = math.inf
    log = lambda *p: [math.log(x) if x else -inf for x in p]  # noqa: E731
    both = one(log(0.5, 0.5, 0), log(0.5, 0.5, 0))
    assert both.kl.item() == 0.0
    assert one(log(0.3, 0.3, 0.4), log(0.5, 0.5, 0)).kl.item() == inf
    assert one(log(0.5, 0.5, 0), log(0.3, 0.3, 0.4)).kl.item() == pytest.approx(
        math.log(0.5 / 0.3), abs=1e-7
    )
    # what this guards against: torch's own gives NaN on such log-targets
    naive = torch.nn.functional.kl_div(
        torch.tensor(log(0.5, 0.5, 0)),
        torch.tensor(log(0.5, 0.5, 0)),
        log_target=True,
        reduction="sum",
    )
    assert naive.isnan()


def test_D03_logits_of_a_16_bit_model_are_upcast():
    logits = (torch.randn(1, 1, 4, 1000, generator=torch.Generator().manual_seed(3)) * 8).bfloat16()
    exact = log_softmax(logits.double().numpy(), axis=-1)
    stacked = torch.cat([logits, logits]).float()
    targets = torch.full((1, 4), 7)
    got = compare(stacked, targets).nll_reference.numpy()
    np.testing.assert_allclose(got, -exact[0, ..., 7], atol=1e-12)
    assert abs(logits.log_softmax(-1).double().numpy() - exact).max() > 0.01
    with pytest.raises(ValueError, match="upcast"):
        compare(torch.cat([logits, logits]), targets)


@pytest.mark.parametrize(
    "p, q, expected",
    [
        ([0.5, 0.3, 0.2], [0.4, 0.3, 0.3], 0.030479),
        ([0.5, 0.3, 0.2], [0.6, 0.35, 0.05], 0.139853),
    ],
)
def test_D04_full_vocabulary(p, q, expected):
    log_p, log_q = (torch.tensor(x, dtype=torch.float64).log() for x in (p, q))
    assert kl_divergence(log_p, log_q).item() == pytest.approx(expected, abs=5e-7)


def test_D08_certain_next_token_and_uniform_logits():
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    # logits at t score token t + 1: a model that knows it has NLL 0, one shifted by one has not
    certain = torch.full((2, 1, 4, 10), -1e4)
    certain.scatter_(-1, tokens[None, :, 1:, None].expand(2, 1, 4, 1), 0.0)
    assert (compare(certain, tokens[:, 1:]).nll_reference == 0).all()
    assert (compare(certain, tokens[:, :-1]).nll_reference > 100).any()
    uniform = compare(torch.zeros(2, 1, 4, 10), tokens[:, 1:])
    np.testing.assert_allclose(uniform.nll.numpy(), math.log(10), atol=1e-15)


def test_nan_logits_of_a_policy_are_nan_and_do_not_agree():
    logits, targets = random_logits(3, 2, 3, 40)
    logits[1, 1, 2, 5] = math.nan
    logits[0, 1, 2, 5] = -math.inf  # where the reference's own zero would mask it
    got = compare(logits, targets)
    assert got.kl[0, 1, 2].isnan() and got.nll[0, 1, 2].isnan()
    assert not got.top1_agrees[0, 1, 2]
    assert got.kl.isnan().sum() == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_reference_is_an_error(value):
    logits, targets = random_logits(2, 2, 3, 40)
    logits[0, 1, 2, 5] = value
    with pytest.raises(RunError, match=r"reference's logits are not finite \(stream 1"):
        compare(logits, targets)


def test_target_of_probability_zero_is_inf_not_an_error():
    got = one([-math.inf, 0.0], [-math.inf, 0.0])
    assert got.nll_reference.item() == math.inf and got.kl.item() == 0.0


def test_blocks_change_nothing():
    logits, targets = random_logits(3, 2, 7, 333)
    whole = compare(logits, targets, block_bytes=1 << 40)
    tiny = compare(logits, targets, block_bytes=1)
    for a, b in zip(whole, tiny, strict=True):
        assert torch.equal(a, b)


D10 = """
import resource, torch
from quantlab.metrics.divergence import compare
torch.set_num_threads(1)
T, V, chunk = {T}, 50_000, 64
logits = torch.randn(2, 1, chunk, V)          # the engine's own buffer, reused like a new chunk
targets = torch.zeros(1, chunk, dtype=torch.int64)
compare(logits[..., :100].contiguous(), targets)   # thread pools and code pages
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
kept = [compare(logits, targets).kl.sum().item() for _ in range(T // chunk)]
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, chunk * V * 4)
"""


def peak_of_chunks(tokens):
    run = subprocess.run(
        [sys.executable, "-c", D10.format(T=tokens)], capture_output=True, text=True, check=True
    )
    return (int(x) for x in run.stdout.split())


def test_D10_memory_is_bounded_by_a_chunk():
    peak, chunk_bytes = peak_of_chunks(512)
    assert peak <= 3 * chunk_bytes


@pytest.mark.slow
def test_D10_at_full_length():
    peak, chunk_bytes = peak_of_chunks(32_768)
    assert peak <= 3 * chunk_bytes
