"""Parts of a forward that several architectures of the zoo share; pure functions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm in FP32, back to x's dtype; weight is the whole factor."""
    y = x.float()
    y = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (y * weight).to(x.dtype)


def swiglu(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float) -> Tensor:
    """Gated MLP with its norm (weight is the whole factor) and residual."""
    h = rms_norm(x, norm, eps)
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)
