"""Per-position KL, NLL and top-1 agreement from logits, over the full vocabulary.

Log-softmax and the sum run in FP64 over FP32 logits: in FP32 the error of the two log-normalisers
(6e-8 relative on values near 10) is itself about 1e-6 nats, above the KL of an FP16 state. Blocks
of rows bound the memory, and only scalars survive a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quantlab.errors import RunError

# KL is non-negative; FP64 over 250,000 terms can leave about -1e-12. Anything below this is a bug
# or a broken input, and is reported instead of clamped. See case D01 in tests/CASES.md.
MOST_NEGATIVE_KL = -1e-9
# |log(q / p)| below which q − p is taken as p · expm1: beyond it, q − p loses two bits at most.
NEAR = 0.5
# FP64 temporaries alive at once in a block, per logit: log p, log q and seven of the sum.
FP64_COPIES = 9
BLOCK_BYTES = {"cpu": 8 << 20, "cuda": 1 << 30}


class TokenMetrics(NamedTuple):
    """Metrics of each policy against the reference; on the logits' device.

    Attributes:
        kl: [policies, streams, n] FP64 nats, D_KL(reference ‖ policy); NaN where the policy's
            logits are NaN, inf where it gives 0 to a token that the reference does not.
        nll: [policies, streams, n] FP64 nats of the target.
        nll_reference: [streams, n] FP64 nats.
        top1_agrees: [policies, streams, n] bool: same most likely token; False for NaN logits.
    """

    kl: Tensor
    nll: Tensor
    nll_reference: Tensor
    top1_agrees: Tensor


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Sum over the last axis of p log(p / q), with 0 log 0 = 0.

    Taken as the sum of q − p − p log(q / p), which is the same for distributions, since p and q
    both sum to 1. Every term is then non-negative, nothing cancels, and an error of the two
    normalisers enters squared: a KL of 1e-18 comes out right, where the plain sum has an error of
    1e-16 and either sign.

    Args:
        log_p: [..., V] log-probabilities that sum to 1 after exp; -inf allowed.
        log_q: [..., V] the same; -inf where p > 0 gives inf.

    Returns:
        [...] nats in the inputs' dtype; NaN where log_q has a NaN.
    """
    p, q = log_p.exp(), log_q.exp()
    ratio = log_q - log_p
    near = p * (ratio.expm1() - ratio)
    far = q - p - p * ratio
    # p = 0 leaves q, also where log_q − log_p is (−inf) − (−inf)
    terms = torch.where(p > 0, torch.where(ratio.abs() < NEAR, near, far), q)
    return terms.sum(-1)


def compare(logits: Tensor, targets: Tensor, *, block_bytes: int | None = None) -> TokenMetrics:
    """Compare every policy with the reference, position by position.

    Args:
        logits: [1 + policies, streams, n, V] FP32, the reference first. `logits[..., t, :]`
            scores `targets[..., t]`: the shift by one is the caller's.
        targets: [streams, n] int64.
        block_bytes: bytes of temporaries; at least one row is taken.

    Returns:
        The metrics.

    Raises:
        RunError: if the reference's logits are NaN or +inf, or a KL is below -1e-9 nats.
    """
    if logits.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"logits must be FP32 or FP64 (got {logits.dtype}): upcast before softmax")
    rows, streams, n, vocab = logits.shape
    if rows < 2 or targets.shape != (streams, n):
        raise ValueError(
            f"expected logits [1 + policies, streams, n, V] and targets [streams, n], got "
            f"{tuple(logits.shape)} and {tuple(targets.shape)}"
        )
    if block_bytes is None:
        block_bytes = BLOCK_BYTES[logits.device.type]
    step = max(1, block_bytes // (FP64_COPIES * 8 * vocab))
    shape = (rows - 1, streams, n)
    kl = torch.empty(shape, dtype=torch.float64, device=logits.device)
    nll = torch.empty_like(kl)
    agrees = torch.empty(shape, dtype=torch.bool, device=logits.device)
    nll_reference = torch.empty((streams, n), dtype=torch.float64, device=logits.device)
    with torch.no_grad():
        for stream in range(streams):
            for start in range(0, n, step):
                cut = (stream, slice(start, start + step))
                target = targets[cut].to(logits.device)[:, None]
                reference = logits[(0, *cut)]
                log_p = reference.double().log_softmax(-1)
                top = reference.argmax(-1)
                nll_reference[cut] = -log_p.gather(-1, target)[:, 0]
                for policy in range(1, rows):
                    here = (policy - 1, *cut)
                    other = logits[(policy, *cut)]
                    log_q = other.double().log_softmax(-1)
                    kl[here] = kl_divergence(log_p, log_q)
                    nll[here] = -log_q.gather(-1, target)[:, 0]
                    agrees[here] = (other.argmax(-1) == top) & ~kl[here].isnan()
                    del log_q
                del log_p
    if not bool(nll_reference.isfinite().all()):
        _refuse_reference(nll_reference)
    worst = float(kl.nan_to_num(nan=0.0).min())
    if worst < MOST_NEGATIVE_KL:
        raise RunError(
            f"a KL divergence came out as {worst:.3g} nats, below {MOST_NEGATIVE_KL:g}: it cannot "
            "be negative, so the logits or their comparison are wrong"
        )
    return TokenMetrics(kl=kl, nll=nll, nll_reference=nll_reference, top1_agrees=agrees)


def _refuse_reference(nll: Tensor) -> None:
    """Raise when the reference is not a distribution; a target of probability 0 is allowed."""
    broken = nll.isnan()
    if bool(broken.any()):
        stream, offset = (int(i) for i in broken.nonzero()[0])
        raise RunError(
            f"the reference's logits are not finite (stream {stream} of the batch, measured "
            f"position {offset} of the chunk): nothing can be compared with them"
        )
