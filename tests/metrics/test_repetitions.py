"""The split of KL over seeds: an identity, checked in FP64."""

import torch

from quantlab.metrics.divergence import compare, kl_divergence
from quantlab.metrics.repetitions import kl_of_means

GROUPS = [(0, 2, 3)]


def make_logits():
    generator = torch.Generator().manual_seed(0)
    reference = 3 * torch.randn(1, 2, 7, 50, generator=generator)
    return torch.cat([reference, reference + torch.randn(4, 2, 7, 50, generator=generator)])


def test_mean_kl_is_kl_of_the_mean_plus_the_spread():
    logits = make_logits()
    kl = compare(logits, torch.zeros(2, 7, dtype=torch.int64)).kl
    of_mean = kl_of_means(logits, GROUPS, block_bytes=1)
    members = [1 + i for i in GROUPS[0]]
    center = logits[members].double().mean(0).log_softmax(-1)
    spread = torch.stack(
        [kl_divergence(center, logits[i].double().log_softmax(-1)) for i in members]
    ).mean(0)
    for policy in GROUPS[0]:
        torch.testing.assert_close(
            kl[list(GROUPS[0])].mean(0), of_mean[policy] + spread, rtol=1e-12, atol=0.0
        )
    assert of_mean[1].isnan().all()
    assert torch.equal(of_mean.nan_to_num(), kl_of_means(logits, GROUPS).nan_to_num())


def test_equal_seeds_are_all_bias_and_nan_stays_nan():
    logits = make_logits()
    logits[3] = logits[1]
    kl = compare(logits, torch.zeros(2, 7, dtype=torch.int64)).kl
    of_mean = kl_of_means(logits, [(0, 2)])
    torch.testing.assert_close(of_mean[0], kl[0], rtol=1e-9, atol=0.0)
    logits[1, 0, 4] = torch.nan
    of_mean = kl_of_means(logits, [(0, 2)])
    assert of_mean[2, 0, 4].isnan() and of_mean[2, 0, :4].isfinite().all()
