"""Random op inputs that behave like a trained layer's: slow and fast heads, correlated keys."""

from __future__ import annotations

import math

import torch

from quantlab.recurrence import RECURRENCES, OpInputs
from quantlab.recurrence.gates import l2norm

KINDS = ("mamba2", "gdn", "kda")


def sample_inputs(
    kind: str,
    *,
    rows: int = 2,
    steps: int = 48,
    heads: int = 4,
    key_heads: int = 2,
    dv: int = 8,
    dk: int = 16,
    dtype: torch.dtype = torch.float64,
    activation_dtype: torch.dtype = torch.float32,
    half_lives: tuple[float, float] = (2.0, 2000.0),
    seed: int = 0,
) -> OpInputs:
    """Op inputs of one of KINDS (or gla), drawn in FP64 and cast.

    Heads get half-lives spread geometrically over `half_lives`. v (and Mamba-2's B, C) hold
    values of `activation_dtype`, as a model's would; delta rules' q and k are normalised after.
    """
    g = torch.Generator().manual_seed(seed)
    recurrence = RECURRENCES[kind]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def activation(x: torch.Tensor) -> torch.Tensor:
        return x.to(activation_dtype).double()

    common = 0.5 * normal(1, 1, key_heads, dk)  # keys that share a direction overlap
    q = activation(normal(rows, steps, key_heads, dk))
    k = activation(normal(rows, steps, key_heads, dk) + common)
    v = activation(normal(rows, steps, heads, dv))
    low, high = (math.log(x) for x in half_lives)
    rate = math.log(2) / torch.exp(torch.linspace(low, high, heads, dtype=torch.float64))
    jitter = torch.rand(rows, steps, heads, dk, generator=g, dtype=torch.float64) + 0.5
    log_decay = -rate[:, None] * jitter
    if not recurrence.per_channel:
        log_decay = log_decay[..., 0]
    beta = dt = None
    if recurrence.delta:
        q, k = l2norm(q) * dk**-0.5, l2norm(k)
        beta = torch.sigmoid(normal(rows, steps, heads)).to(dtype)
    elif kind == "mamba2":
        q, k = q * dk**-0.5, k * dk**-0.5
        q, k = activation(q), activation(k)
        dt = (torch.rand(rows, steps, heads, generator=g, dtype=torch.float64) * 0.1).to(dtype)
    return OpInputs(
        q=q.to(dtype),
        k=k.to(dtype),
        v=v.to(dtype),
        log_decay=log_decay.to(dtype),
        beta=beta,
        dt=dt,
        activation_dtype=activation_dtype,
    )


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference over the largest magnitude of b."""
    return float((a - b).abs().max() / b.abs().max())
