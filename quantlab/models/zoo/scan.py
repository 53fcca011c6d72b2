"""The zoo's training recurrence in plain torch, a token at a time: reference, and CPU fallback."""

from __future__ import annotations

import torch
from torch import Tensor


def sequential_scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None = None
) -> Tensor:
    """Run what `quantlab_kernels.chunk_train.chunk_scan` does, token by token, differentiably.

    Args:
        q: [rows, T, Hk, dk] — queries, normalised and scaled already (Mamba-2: C).
        k: [rows, T, Hk, dk] — keys, normalised already (Mamba-2: B); Hk divides H.
        v: [rows, T, H, dv] — values (Mamba-2: Δ · x).
        log_decay: [rows, T, H] — natural log, ≤ 0.
        beta: [rows, T, H] — write strength; present if and only if the delta rule applies.

    Returns:
        [rows, T, H, dv] in q's dtype; computed in FP32, or in FP64 for FP64 inputs.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = v.shape[2] // q.shape[2]
    queries = q.to(dtype).repeat_interleave(group, 2).unbind(1)
    keys = k.to(dtype).repeat_interleave(group, 2).unbind(1)
    values = v.to(dtype).unbind(1)
    decays = log_decay.to(dtype).exp().unbind(1)
    strengths = beta.to(dtype).unbind(1) if beta is not None else None
    rows, heads, dv = values[0].shape
    state = torch.zeros(rows, heads, dv, q.shape[-1], dtype=dtype, device=q.device)
    outputs = []
    for t in range(len(values)):
        state = state * decays[t][..., None, None]
        write = values[t]
        if strengths is not None:
            read = (state @ keys[t][..., None]).squeeze(-1)
            write = strengths[t][..., None] * (write - read)
        state = state + write[..., None] * keys[t][..., None, :]
        outputs.append((state @ queries[t][..., None]).squeeze(-1))
    return torch.stack(outputs, 1).to(q.dtype)
