"""The zoo's training recurrence in plain torch, a token at a time: reference, and CPU fallback."""

from __future__ import annotations

from torch import Tensor

from quantlab.recurrence import OpInputs, textbook


def sequential_scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None = None
) -> Tensor:
    """Run what `quantlab_kernels.chunk_any.chunk_any` does by the textbook step.

    Differentiable in every argument.

    Args:
        q: [rows, T, Hk, dk] — queries, normalised and scaled already (Mamba-2: C).
        k: [rows, T, Hk, dk] — keys, normalised already (Mamba-2: B); Hk divides H.
        v: [rows, T, H, dv] — values (Mamba-2: Δ · x).
        log_decay: [rows, T, H], or per key channel [rows, T, H, dk] — natural log, ≤ 0.
        beta: [rows, T, H] — write strength; present if and only if the delta rule applies.

    Returns:
        [rows, T, H, dv] in q's dtype; computed in FP32, or in FP64 for FP64 inputs.
    """
    outputs, _ = textbook(OpInputs(q=q, k=k, v=v, log_decay=log_decay, beta=beta))
    return outputs.to(q.dtype)
