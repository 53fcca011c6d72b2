"""Translate the three ops' arguments into canonical inputs, and results back.

One adapter per op function of transformers (see `registry.OP_FUNCTIONS`); each takes the site of
the layer, then exactly what the mixer passes. Stray keywords are dropped, as the originals do.
Whatever transformers forms inside an op in the activations' dtype (the L2 norm's inputs, Δ, the
write gate) is formed here in FP32, so that a 16-bit model's state decays and writes are not
rounded before the study begins; FP64 inputs stay FP64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantlab.errors import UsageError
from quantlab.models.dispatch import OpCall, Site
from quantlab.recurrence.gates import MIN_LOG_DECAY, l2norm, mamba2_dt, mamba2_log_decay
from quantlab.recurrence.inputs import OpInputs


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _run(
    site: Site, inputs: OpInputs, initial_state: Tensor | None, wants_state: bool
) -> tuple[Tensor, Tensor | None]:
    """Call the handler and check what it returns; o in FP32 or FP64."""
    assert site.handler is not None
    call = OpCall(
        layer=site.layer, inputs=inputs, initial_state=initial_state, wants_state=wants_state
    )
    o, state = site.handler(call)
    if o.shape != inputs.v.shape:
        raise ValueError(
            f"the handler of recurrent layer {site.layer} must return o of shape "
            f"{tuple(inputs.v.shape)} (got {tuple(o.shape)})"
        )
    if inputs.activation_dtype == torch.float16:
        beyond = (o.abs() > torch.finfo(torch.float16).max).sum()
        site.overflows = beyond if site.overflows is None else site.overflows + beyond
    return _wide(o), state


def _slot(inputs: OpInputs, initial_state: Tensor | None) -> Tensor:
    """Fill a wanted cache slot when the handler keeps its own state: what it held, or zeros."""
    if initial_state is not None:
        return initial_state
    rows, _, heads, dv = inputs.v.shape
    return inputs.log_decay.new_zeros(()).expand(rows, heads, dv, inputs.k.shape[-1])


def _beta(site: Site, beta: Tensor) -> Tensor:
    """Form beta from the projection's output in FP32; transformers rounds it to 16 bits.

    Source: the projection's logits as the hook on it kept them. Where the family has no entry
    for it, beta is used as given.
    """
    logits, site.given_beta = site.write_logits, beta
    if logits is None or site.write_gate == "activation" or _wide(beta) is beta:
        return _wide(beta)
    mixer: Any = site.mixer
    if site.family.write_projection == "in_proj_ba":
        # Qwen3-Next interleaves b and a per key head: [.., Hk, 2 · H / Hk], b first.
        per_key_head = mixer.num_v_heads // mixer.num_k_heads
        logits = logits.reshape(*logits.shape[:-1], mixer.num_k_heads, 2 * per_key_head)
        logits = logits[..., :per_key_head].flatten(-2)
    wide = torch.sigmoid(_wide(logits))
    return wide * 2 if getattr(mixer, "allow_neg_eigval", False) else wide


def gated_delta_rule(
    site: Site,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet and Kimi delta attention, one token or many.

    Args:
        site: the recurrent layer.
        query: [rows, T, Hk or H, dk], neither normalised nor scaled.
        key: like query. transformers 5.17 expands both to H heads before the call.
        value: [rows, T, H, dv].
        g: [rows, T, H] or, per key channel, [rows, T, H, dk]: natural log of the decay, FP32.
        beta: [rows, T, H], already through the sigmoid.
        initial_state: [rows, H, dk, dv].
        output_final_state: whether the final state is wanted.
        use_qk_l2norm_in_kernel: whether q and k are to be normalised (all families say True).
        cu_seqlens: must be None; packed sequences are not supported.
        _: stray keywords.

    Returns:
        o [rows, T, H, dv] in FP32 and the final state [rows, H, dk, dv] or None. The cast to the
        activations' dtype follows the family's norm (`dispatch`).
    """
    if cu_seqlens is not None:
        raise UsageError("packed sequences (cu_seqlens) are not supported: run rows apart")
    key_heads = getattr(site.mixer, "num_k_heads", key.shape[2])
    if key.shape[2] != key_heads:
        # Undo the expansion: equal neighbours need be normalised and recorded once only.
        repeat = key.shape[2] // key_heads
        query, key = query[:, :, ::repeat], key[:, :, ::repeat]
    q, k = _wide(query), _wide(key)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    site.output_dtype = query.dtype
    inputs = OpInputs(
        q=q * q.shape[-1] ** -0.5,
        k=k,
        v=value,
        log_decay=_wide(g).clamp(min=MIN_LOG_DECAY),
        beta=_beta(site, beta),
        dt=None,
        activation_dtype=value.dtype,
    )
    start = None if initial_state is None else initial_state.transpose(-1, -2)
    o, state = _run(site, inputs, start, output_final_state)
    if not output_final_state:
        return o, None
    if state is None:
        state = _slot(inputs, start)
    return o, state.transpose(-1, -2)


def _mamba2_inputs(
    site: Site,
    x: Tensor,
    raw_dt: Tensor,
    bias: Tensor | None,
    apply_softplus: bool,
    a: Tensor,
    b: Tensor,
    c: Tensor,
) -> OpInputs:
    dt = mamba2_dt(raw_dt, bias, limit=time_step_limit(site.mixer), apply_softplus=apply_softplus)
    log_decay = mamba2_log_decay(dt, a)
    return OpInputs(q=c, k=b, v=x, log_decay=log_decay, beta=None, dt=dt, activation_dtype=x.dtype)


def _finish(o: Tensor, x: Tensor, d: Tensor | None, z: Tensor | None) -> Tensor:
    """Add the D skip and apply the gate, both in FP32."""
    if d is not None:
        o = o + _wide(x) * _wide(d)[:, None]
    if z is not None:
        o = o * torch.nn.functional.silu(_wide(z))
    return o


def time_step_limit(mixer: Any) -> tuple[float, float]:
    """Return the limit of Δ a Mamba-2 mixer is to obey, in prefill and decode alike."""
    if mixer.time_step_limit is None:
        return 0.0, float("inf")
    low, high = mixer.time_step_limit
    return float(low), float(high)


def mamba2_chunk_scan(
    site: Site,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    seq_idx: Tensor | None = None,
    return_final_states: bool = False,
    **_: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-2, many tokens or no state.

    Args:
        site: the recurrent layer.
        hidden_states: x [rows, T, H, dv].
        dt: [rows, T, H], before bias and softplus.
        A: [H], negative.
        B: [rows, T, groups, dk].
        C: [rows, T, groups, dk].
        chunk_size: unused, a matter of the original's order of operations.
        D: [H], the skip.
        z: [rows, T, H, dv], a gate inside the op; no family passes one here.
        dt_bias: [H].
        initial_states: [rows, H, dv, dk].
        dt_softplus: whether dt goes through a softplus.
        seq_idx: must be None.
        return_final_states: whether the final state is wanted.
        _: stray keywords, and dt_limit, which is read from the mixer instead.

    Returns:
        y [rows, T, H, dv] in FP32, as the original; with the final state if wanted.
    """
    if seq_idx is not None:
        raise UsageError("packed sequences (seq_idx) are not supported: run rows apart")
    inputs = _mamba2_inputs(site, hidden_states, dt, dt_bias, dt_softplus, A, B, C)
    o, state = _run(site, inputs, initial_states, return_final_states)
    y = _finish(o, hidden_states, D, z).contiguous()
    if not return_final_states:
        return y
    return y, _slot(inputs, initial_states) if state is None else state


def mamba2_selective_state_update(
    site: Site,
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    **_: Any,
) -> Tensor:
    """Mamba-2, one token with a state.

    Args:
        site: the recurrent layer.
        state: [rows, H, dv, dk], the live cache.
        hidden_states: x [rows, H, dv].
        dt: [rows, H, dv], expanded along dv.
        A: [H, dv, dk], expanded along dv and dk.
        B: [rows, groups, dk].
        C: [rows, groups, dk].
        D: [H, dv], expanded along dv.
        z: [rows, H, dv], a gate inside the op (Falcon-H1 without its norm).
        dt_bias: [H, dv], expanded along dv.
        dt_softplus: whether dt goes through a softplus.
        _: stray keywords.

    Returns:
        y [rows, H, dv] in FP32; the mixer casts it after its norm or gate.

    Mutates:
        state, unless the handler keeps its own (returns None).
    """
    x = hidden_states[:, None]
    bias = None if dt_bias is None else dt_bias[:, 0]
    inputs = _mamba2_inputs(
        site, x, dt[:, None, :, 0], bias, dt_softplus, A[:, 0, 0], B[:, None], C[:, None]
    )
    o, final = _run(site, inputs, state, True)
    if final is not None:
        state.copy_(final)
    gate = None if z is None else z[:, None]
    return _finish(o, x, None if D is None else D[:, 0], gate)[:, 0]


ADAPTERS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "torch_recurrent_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "recurrent_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": mamba2_chunk_scan,
    "mamba2_selective_state_update": mamba2_selective_state_update,
}
