"""Repetitions of a policy under several seeds: how much of its KL is systematic.

With q̄ the softmax of the mean logits over the K seeds of a policy (their normalised geometric
mean), for any reference p and exactly

    mean_i KL(p ‖ q_i)  =  KL(p ‖ q̄)  +  mean_i KL(q̄ ‖ q_i).

The first part is what all seeds have in common, the bias; the second is their spread. From K seeds
the spread comes out too small by (K − 1)/K and the bias too large by the same amount, to leading
order; `quantlab.analysis.rounding` corrects for it. Source of the identity: Heskes 1998 (bias and
variance of the Kullback-Leibler divergence).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantlab.metrics.divergence import BLOCK_BYTES, FP64_COPIES, kl_divergence


def kl_of_means(
    logits: Tensor, groups: Sequence[Sequence[int]], *, block_bytes: int | None = None
) -> Tensor:
    """KL of the reference from each group's mean logits.

    Args:
        logits: [1 + policies, streams, n, V] FP32, the reference first.
        groups: indices among the policies (without the reference) of the repetitions of one.
        block_bytes: bytes of temporaries; at least one row is taken.

    Returns:
        [policies, streams, n] FP64 nats, the same for all policies of a group; NaN for policies
        in no group and where a logit is NaN.
    """
    rows, streams, n, vocab = logits.shape
    shape = (rows - 1, streams, n)
    out = torch.full(shape, torch.nan, dtype=torch.float64, device=logits.device)
    if block_bytes is None:
        block_bytes = BLOCK_BYTES[logits.device.type]
    step = max(1, block_bytes // (FP64_COPIES * 8 * vocab))
    with torch.no_grad():
        for group in groups:
            for stream in range(streams):
                for start in range(0, n, step):
                    cut = (stream, slice(start, start + step))
                    mean = torch.zeros_like(logits[(0, *cut)], dtype=torch.float64)
                    for policy in group:
                        mean += logits[(1 + policy, *cut)].double()
                    log_q = (mean / len(group)).log_softmax(-1)
                    log_p = logits[(0, *cut)].double().log_softmax(-1)
                    value = kl_divergence(log_p, log_q)
                    for policy in group:
                        out[(policy, *cut)] = value
    return out
