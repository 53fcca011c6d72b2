"""Kimi Linear's forward for training: Kimi delta attention, latent attention, dense MLPs.

As `forward`, which calls it: transformers' arithmetic and parameter names, tokens of all rows
flattened, parts that are compiled apart from what knows rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quantlab.models.zoo.ops import Conv, Scan
from quantlab.models.zoo.parts import rms_norm, swiglu

LATENT_EPS = 1e-6
"""Of the latent's norm, which ignores the config. Source: transformers, kimi_linear."""


def kda_in(
    x: Tensor, norm: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, fa: Tensor, fb: Tensor,
    a_log: Tensor, dt_bias: Tensor, b: Tensor, ga: Tensor, gb: Tensor, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Norm and projections: (qkv, output gate, log decay FP32 [tokens, H · dk], beta FP32)."""
    h = rms_norm(x, norm, eps)
    step = F.softplus(F.linear(F.linear(h, fa), fb).float() + dt_bias)
    log_decay = (-a_log.exp().view(-1, 1) * step.view(len(x), a_log.numel(), -1)).flatten(1)
    gate = F.linear(F.linear(h, ga), gb)
    return F.linear(h, torch.cat([wq, wk, wv])), gate, log_decay, F.linear(h, b).float().sigmoid()


def kda_out(
    x: Tensor, o: Tensor, gate: Tensor, norm: Tensor, out: Tensor,
    mlp_norm: Tensor, mlp_gate: Tensor, up: Tensor, down: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    """Gated norm per head, output projection, residual, MLP."""
    heads = o.float().view(len(o), -1, len(norm))
    heads = heads * (heads.square().mean(-1, keepdim=True) + eps).rsqrt() * norm
    y = (heads.flatten(1) * gate.float().sigmoid()).to(x.dtype)
    return swiglu(x + F.linear(y, out), mlp_norm, mlp_gate, up, down, eps)


def latent_in(
    x: Tensor, norm: Tensor, wq: Tensor, down: Tensor, latent_norm: Tensor, up: Tensor,
    heads: int, own: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Latent attention up to the scores: q, k, v per head; no positions.

    The first `own` dimensions of a head's key come from the latent, the rest are one key that all
    heads share.
    """
    h = rms_norm(x, norm, eps)
    rank = len(latent_norm)
    latent, shared = F.linear(h, down).tensor_split([rank], -1)
    kv = F.linear(rms_norm(latent, latent_norm, LATENT_EPS), up).view(len(x), heads, -1)
    keys, v = kv.tensor_split([own], -1)
    k = torch.cat([keys, shared[:, None].expand(-1, heads, -1)], -1)
    return F.linear(h, wq).view(len(x), heads, -1), k, v


def latent_out(
    x: Tensor, o: Tensor, out: Tensor,
    mlp_norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    """Latent attention from the scores on, residual, MLP."""
    return swiglu(x + F.linear(o, out), mlp_norm, gate, up, down, eps)


def hidden(
    w: Mapping[str, Tensor],
    ids: Tensor,
    decays: Callable[[Tensor], None] | None,
    *,
    config: Mapping[str, Any],
    scan: Scan,
    conv: Conv,
    attend: Callable[[Tensor, Tensor, Tensor, int, int], Tensor],
    part: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Tensor:
    """Run all layers: [tokens, hidden] before the last norm.

    Args:
        w: weights by transformers' names.
        ids: [rows, T] int64.
        decays: called per recurrent layer, in order, with log decays [rows, T, H, dk] FP32.
        config: of the model.
        scan: the recurrence.
        conv: the convolution.
        attend: causal attention of q, k, v [tokens, heads, d] in rows of given steps.
        part: compiles a part, or hands it back.
    """
    rows, steps = ids.shape
    h, d, eps = config["linear_num_heads"], config["linear_head_dim"], config["rms_norm_eps"]
    x = F.embedding(ids.flatten(), w["model.embed_tokens.weight"])
    for i, kind in enumerate(config["layer_types"]):
        p = f"model.layers.{i}."
        a = p + "self_attn."

        def own(*names: str, prefix: str = a) -> list[Tensor]:
            return [w[f"{prefix}{name}.weight"] for name in names]

        norm = w[p + "input_layernorm.weight"]
        mlp = own(
            "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", prefix=p
        )
        (out,) = own("o_proj")
        if kind == "full_attention":
            q, k, v = part(latent_in)(
                x, norm, *own("q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"),
                config["num_attention_heads"], config["qk_nope_head_dim"], eps,
            )  # fmt: skip
            x = part(latent_out)(x, attend(q, k, v, rows, steps), out, *mlp, eps)
            continue
        qkv, gate, g, beta = part(kda_in)(
            x, norm, *own("q_proj", "k_proj", "v_proj"),
            *own("forget_gate.f_a_proj", "forget_gate.f_b_proj"),
            w[a + "forget_gate.A_log"], w[a + "forget_gate.dt_bias"],
            *own("b_proj", "g_a_proj", "g_b_proj"), eps,
        )  # fmt: skip
        g = g.view(rows, steps, h, d)
        if decays is not None:
            decays(g)
        q, k, v = conv(
            qkv, w[a + "conv1d.weight"].squeeze(1), None, steps=steps, head=d,
            sizes=(h * d,) * 3, scales=(d**-0.5, 1.0, None),
        )  # fmt: skip
        shape = (rows, steps, h, d)
        o = scan(q.view(shape), k.view(shape), v.view(shape), g, beta.view(rows, steps, h))
        x = part(kda_out)(x, o.reshape(rows * steps, -1), gate, *own("o_norm"), out, *mlp, eps)
    return x
