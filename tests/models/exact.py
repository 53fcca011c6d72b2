"""A recurrence written for these tests alone: token by token, in the inputs' own precision.

Independent of quantlab.recurrence on purpose, so that an error of layout in an adapter and one in
the library's scan cannot cancel.
"""

from __future__ import annotations

import torch

from quantlab.models import OpCall


def exact_handler(call: OpCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one op call exactly: o [rows, T, H, dv] and the state [rows, H, dv, dk]."""
    i = call.inputs
    repeat = i.heads // i.q.shape[2]
    q, k = (x.float().repeat_interleave(repeat, dim=2) for x in (i.q, i.k))
    v = i.v.float()
    state = torch.zeros(i.n_rows, i.heads, i.dv, i.dk)
    if call.initial_state is not None:
        state = call.initial_state.clone()
    o = torch.empty(i.v.shape)
    for t in range(i.steps):
        decay = i.log_decay[:, t].exp()
        state = state * (decay[..., None, :] if i.per_channel else decay[..., None, None])
        if i.beta is not None:
            predicted = torch.einsum("rhvk,rhk->rhv", state, k[:, t])
            written = (v[:, t] - predicted) * i.beta[:, t, :, None]
        else:
            assert i.dt is not None
            written = v[:, t] * i.dt[:, t, :, None]
        state = state + written[..., None] * k[:, t, :, None, :]
        o[:, t] = torch.einsum("rhvk,rhk->rhv", state, q[:, t])
    return o, state
