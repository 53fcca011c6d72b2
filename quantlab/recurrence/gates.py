"""Gates in front of a recurrence, stable over all finite parameters.

Everything here is FP32 (FP64 for FP64 inputs), whatever the activations are: a write gate that
takes a 16-bit round trip puts its error into the state once per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Added to the sum of squares, not to their mean. Source: flash-linear-attention `l2norm`, which
# transformers follows.
L2_EPSILON = 1e-6
# exp(-800) is 0 in FP32 and FP64 alike, and a sum of such logs still resolves 1e-13 in FP64, so
# that later decays survive; -inf could not be subtracted again.
MIN_LOG_DECAY = -800.0


def _working(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)) as max(x, 0) + log1p(exp(-|x|)): no overflow, no cut at 20."""
    x = _working(x)
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def l2norm(x: Tensor, epsilon: float = L2_EPSILON) -> Tensor:
    """Return x / sqrt(Σ x² + epsilon) over the last axis, in FP32 or FP64; zeros stay zeros."""
    x = _working(x)
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + epsilon)


def mamba2_dt(
    raw: Tensor,
    bias: Tensor | None = None,
    *,
    limit: tuple[float, float] = (0.0, float("inf")),
    apply_softplus: bool = True,
) -> Tensor:
    """Form Mamba-2's step size Δ = clamp(softplus(raw + bias), limit).

    Args:
        raw: [..., H] projected step size.
        bias: [H] learned bias, added in FP32.
        limit: smallest and largest Δ. Prefill and decode must use the same one: a clamp in only
            one of them changes the model.
        apply_softplus: False where raw is Δ already.

    Returns:
        [..., H] FP32 (FP64 for FP64 inputs).
    """
    dt = _working(raw)
    if bias is not None:
        dt = dt + _working(bias)
    if apply_softplus:
        dt = softplus(dt)
    return dt.clamp(*limit)


def mamba2_log_decay(dt: Tensor, a: Tensor) -> Tensor:
    """Form the log decay A·Δ per value head, at least MIN_LOG_DECAY.

    Args:
        dt: [..., H] Δ.
        a: [H] A = -exp(A_log), negative.
    """
    return (_working(dt) * _working(a)).clamp(min=MIN_LOG_DECAY)


def gdn_log_decay(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Form -exp(A_log)·softplus(a + dt_bias), finite for all finite parameters.

    exp(A_log) may overflow where softplus underflows to 0, and ∞·0 is NaN, which would poison the
    state for good. There (A_log > 88 in FP32) the product is formed as exp(A_log + y): either it is
    beyond the clamp, or y < -80 and log softplus(y) = y to FP64 accuracy.

    Args:
        a: [..., H] projected gate.
        a_log: [H] log of the decay rate.
        dt_bias: [H] learned bias.

    Returns:
        [..., H] FP32 (FP64 for FP64 inputs), in [MIN_LOG_DECAY, 0].
    """
    y = _working(a) + _working(dt_bias)
    rate = _working(a_log)
    product = torch.exp(rate) * softplus(y)
    in_logs = torch.exp(rate + torch.minimum(y, torch.zeros_like(y)))
    finite_rate = torch.isfinite(torch.exp(rate))
    return -torch.where(finite_rate, product, in_logs).clamp(max=-MIN_LOG_DECAY)
