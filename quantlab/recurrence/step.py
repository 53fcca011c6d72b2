"""The textbook step of a gated linear recurrence, with its two switches.

    S' = S·α                 α one number per head, or one per key channel (column of S)
    u  = β(v − S'k)          delta rule; without it u = v
    S  = S' + u kᵀ
    o  = S q

Decay first, then predict, then write. Mamba-2, GDN and KDA are settings of the two switches, and
so are GLA and DeltaNet. Nothing is rounded here: the output reads the state before any store.
Works in FP32 and FP64; no sum is taken in a narrower type.

Source: Mamba-2 arXiv 2405.21060; GDN arXiv 2412.06464; KDA arXiv 2510.26692.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.recurrence.inputs import OpInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """A named setting of the two switches.

    Attributes:
        name: the field's name.
        per_channel: one decay per key channel instead of one per head.
        delta: values become corrections β(v − αSk).
    """

    name: str
    per_channel: bool
    delta: bool


RECURRENCES: dict[str, Recurrence] = {
    r.name: r
    for r in (
        Recurrence(name="mamba2", per_channel=False, delta=False),
        Recurrence(name="gdn", per_channel=False, delta=True),
        Recurrence(name="kda", per_channel=True, delta=True),
        Recurrence(name="gla", per_channel=True, delta=False),
    )
}


def step(
    state: Tensor,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Take one token; the state given is left as it was.

    Args:
        state: [..., dv, dk] state before the token.
        q: [..., dk] query (Mamba-2: C), of the state's dtype as all others.
        k: [..., dk] key (Mamba-2: B).
        v: [..., dv] value (Mamba-2: Δ·x).
        log_decay: [...] or [..., dk], natural log, ≤ 0.
        beta: [...] write strength; given exactly for delta rules.

    Returns:
        Output [..., dv] and the state [..., dv, dk] it was read from.
    """
    state, _ = write(state, k=k, v=v, log_decay=log_decay, beta=beta)
    return read(state, q), state


def write(
    state: Tensor, *, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Take one token without reading out: the new state [..., dv, dk] and u [..., dv]."""
    state = state * decay_of(state, log_decay)
    u = v if beta is None else beta.unsqueeze(-1) * (v - read(state, k))
    # In place it costs a third; autograd may still need the decayed state.
    add = state.addcmul if torch.is_grad_enabled() else state.addcmul_
    return add(u.unsqueeze(-1), k.unsqueeze(-2)), u


def read(state: Tensor, q: Tensor) -> Tensor:
    """Form S q: [..., dv, dk] and [..., dk] to [..., dv]."""
    # As a row times Sᵀ: the CPU's product with a column is six times slower.
    return torch.matmul(q.unsqueeze(-2), state.mT).squeeze(-2)


def decay_of(state: Tensor, log_decay: Tensor) -> Tensor:
    """Form one step's decay in a shape that multiplies the state: [..., 1, 1] or [..., 1, dk]."""
    decay = torch.exp(log_decay)
    return decay.unsqueeze(-2) if decay.ndim == state.ndim - 1 else decay[..., None, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One step's inputs with q and k expanded to all value heads, in the compute dtype.

    Attributes:
        q: [rows, H, dk].
        k: [rows, H, dk].
        v: [rows, H, dv], before Δ.
        log_decay: [rows, H] or [rows, H, dk].
        beta: [rows, H] or None.
        dt: [rows, H] or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None
    dt: Tensor | None

    @property
    def written(self) -> Tensor:
        """[rows, H, dv] what the recurrence writes: Δ·v in the compute dtype, or v."""
        return self.v if self.dt is None else self.dt.unsqueeze(-1) * self.v


def token(inputs: OpInputs, t: int) -> Token:
    """Take step t (0-based) of a layer's inputs."""
    dtype = inputs.compute_dtype
    group = inputs.heads // inputs.k.shape[2]

    def of_heads(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[:, t].to(dtype)

    return Token(
        q=inputs.q[:, t].to(dtype).repeat_interleave(group, dim=1),
        k=inputs.k[:, t].to(dtype).repeat_interleave(group, dim=1),
        v=inputs.v[:, t].to(dtype),
        log_decay=inputs.log_decay[:, t].to(dtype),
        beta=of_heads(inputs.beta),
        dt=of_heads(inputs.dt),
    )


def textbook(inputs: OpInputs, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Run all steps one by one, unrounded: the definition every faster form is tested against.

    Args:
        inputs: T steps.
        state: [rows, H, dv, dk] state before the first; zeros if None.

    Returns:
        Outputs [rows, T, H, dv] and the final state [rows, H, dv, dk].
    """
    if state is None:
        state = zero_state(inputs)
    outputs = []
    for t in range(inputs.steps):
        x = token(inputs, t)
        o, state = step(state, q=x.q, k=x.k, v=x.written, log_decay=x.log_decay, beta=x.beta)
        outputs.append(o)
    return torch.stack(outputs, dim=1), state


def zero_state(inputs: OpInputs) -> Tensor:
    """Return the state before any token, [rows, H, dv, dk] in the compute dtype."""
    shape = (inputs.n_rows, inputs.heads, inputs.dv, inputs.dk)
    return torch.zeros(shape, dtype=inputs.compute_dtype, device=inputs.v.device)
