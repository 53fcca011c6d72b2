"""The recurrence over a whole sequence, nothing rounded: prefill, and our op in parity checks."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from quantlab.recurrence.inputs import OpInputs
from quantlab.recurrence.layout import Windows, concatenate, cut, flat, uncut
from quantlab.recurrence.step import zero_state
from quantlab.recurrence.window import affine_window

# Elements of one [W, B, n, dk] tensor formed at a time; about a dozen such tensors live at once.
PLAN_ELEMENTS = 1 << 22


def exact_scan(
    inputs: OpInputs, state: Tensor | None = None, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """Run T steps chunk by chunk.

    The states between chunks are kept in the compute dtype. Outputs of step t depend on steps
    ≤ t only. The chunk grid starts at the first step given, so cutting a sequence elsewhere
    changes the order of additions (to about 1e-6 relative in FP32), nothing else. Differentiable.

    Args:
        inputs: any T ≥ 1.
        state: [rows, H, dv, dk] state before the first step, left as it was; zeros if None.
        chunk: steps per chunk.

    Returns:
        Outputs [rows, T, H, dv] and the final state [rows, H, dv, dk], FP32 (FP64 in FP64).
    """
    shape = (inputs.n_rows, inputs.heads, inputs.dv, inputs.dk)
    if state is None:
        state = zero_state(inputs)
    elif tuple(state.shape) != shape:
        raise ValueError(f"state is {shape}, got {tuple(state.shape)}")
    s = flat(state.to(inputs.compute_dtype))
    per_chunk = s.shape[0] * chunk * max(inputs.dk, inputs.dv)
    block = max(1, PLAN_ELEMENTS // per_chunk) * chunk
    whole = inputs.steps - inputs.steps % chunk
    cuts = [*range(0, whole, block), whole] if whole else [0]
    if inputs.steps > whole:
        cuts.append(inputs.steps)
    outputs = []
    for start, stop in pairwise(cuts):
        piece = cut(inputs.slice(start, stop), min(chunk, stop - start))
        o, s = _chunks(piece, s)
        outputs.append(uncut(o, inputs.heads))
    return concatenate(outputs), s.reshape(shape)


def _chunks(piece: Windows, s: Tensor) -> tuple[Tensor, Tensor]:
    plan = affine_window(
        q=piece.q,
        k=piece.k,
        v=piece.written,
        decays=piece.decays,
        beta=piece.beta,
        keys_queries=piece.keys_queries,
    )
    n = piece.v.shape[-2]
    bias, met = plan.columns(0, n if plan.written is not None else 2 * n)
    outputs = []
    for w in range(bias.shape[0]):
        columns = torch.baddbmm(bias[w], s, met[w])
        outputs.append(columns[..., :n])
        written = columns[..., n:] if plan.written is None else plan.written[w]
        s = torch.baddbmm(s * plan.total[w], written, plan.fold[w])
    return torch.stack(outputs), s
