"""Cut a layer's inputs into windows, heads beside rows, q and k expanded to value heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.recurrence.decays import WindowDecays
from quantlab.recurrence.inputs import OpInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """W windows of n steps of B = rows·H heads, in the compute dtype.

    Attributes:
        keys_queries: [W, B, 2n, dk] k over q of each window, in one tensor: the products with a
            state take both.
        v: [W, B, n, dv], before Δ.
        log_decay: [W, B, n] or [W, B, n, dk].
        beta: [W, B, n] or None.
        dt: [W, B, n] or None.
    """

    keys_queries: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None
    dt: Tensor | None

    @property
    def k(self) -> Tensor:
        """[W, B, n, dk]."""
        return self.keys_queries[..., : self.v.shape[-2], :]

    @property
    def q(self) -> Tensor:
        """[W, B, n, dk]."""
        return self.keys_queries[..., self.v.shape[-2] :, :]

    @property
    def written(self) -> Tensor:
        """[W, B, n, dv] what the recurrence writes: Δ·v in the compute dtype, or v."""
        return self.v if self.dt is None else self.dt.unsqueeze(-1) * self.v

    @property
    def decays(self) -> WindowDecays:
        """Cumulated within each window."""
        return WindowDecays.of(self.log_decay, per_channel=self.log_decay.ndim == 4)


def cut(inputs: OpInputs, n: int) -> Windows:
    """Cut T = W·n steps into windows of n.

    Raises:
        ValueError: n does not divide T.
    """
    if inputs.steps % n:
        raise ValueError(f"{inputs.steps} steps are not a whole number of windows of {n}")
    dtype = inputs.compute_dtype
    rows, heads, key_heads = inputs.n_rows, inputs.heads, inputs.k.shape[2]
    count = inputs.steps // n

    def windows(x: Tensor) -> Tensor:
        x = x.to(dtype).reshape(rows, count, n, *x.shape[2:]).movedim(0, 1).transpose(2, 3)
        return x.reshape(count, rows * heads, *x.shape[3:])

    group = heads // key_heads
    shape = (count, rows, key_heads, group, 2 * n, inputs.dk)
    keys_queries = torch.empty(shape, dtype=dtype, device=inputs.k.device)
    for x, where in ((inputs.k, slice(0, n)), (inputs.q, slice(n, 2 * n))):
        x = x.reshape(rows, count, n, key_heads, inputs.dk).permute(1, 0, 3, 2, 4)
        # Taken here: a view from before the first copy would be a leaf, and have no gradient.
        into = keys_queries[..., where, :]
        into.copy_(x.unsqueeze(3).expand_as(into))
    return Windows(
        keys_queries=keys_queries.view(count, rows * heads, 2 * n, inputs.dk),
        v=windows(inputs.v),
        log_decay=windows(inputs.log_decay),
        beta=None if inputs.beta is None else windows(inputs.beta),
        dt=None if inputs.dt is None else windows(inputs.dt),
    )


def uncut(o: Tensor, heads: int) -> Tensor:
    """Put outputs [W, B, dv, n] of windows, columns steps, back to [rows, W·n, H, dv]."""
    count, batch, dv, n = o.shape
    o = o.reshape(count, batch // heads, heads, dv, n)
    return o.permute(1, 0, 4, 2, 3).reshape(batch // heads, count * n, heads, dv)


def flat(state: Tensor) -> Tensor:
    """View a state [rows, H, dv, dk] as a batch of matrices [B, dv, dk]."""
    return state.flatten(0, 1)


def concatenate(parts: list[Tensor]) -> Tensor:
    """Join outputs [rows, T_i, H, dv] along the steps."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
