"""Training forward of the zoo's architectures, in transformers' arithmetic and parameter names.

A model is its state dict: tensors by transformers' names. The forward works on tokens of all rows
flattened, [tokens, hidden], so that the compiled parts see one shape whatever the sequence length;
only the convolution, the recurrence and attention, which are not compiled, know rows. Each
compiled part is a pure function of activations and weights, compiled once and used by every layer.

Matrices arrive in the activations' dtype (BF16 in training), vectors (norms, convolutions, decays)
in FP32. Parity with transformers' own logits is tested in tests/models/test_zoo.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quantlab.models.zoo import kimi
from quantlab.models.zoo.ops import Conv, Scan
from quantlab.models.zoo.parts import rms_norm, swiglu
from quantlab.models.zoo.recipe import ZooModel

Weights = Mapping[str, Tensor]
Part = Callable[..., Any]
DecayHook = Callable[[Tensor], None]


def relu2(x: Tensor, norm: Tensor, up: Tensor, down: Tensor, eps: float) -> Tensor:
    """Nemotron-H's MLP block with its norm and residual."""
    h = rms_norm(x, norm, eps)
    return x + F.linear(F.relu(F.linear(h, up)).square(), down)


def gdn_in(
    x: Tensor, norm: Tensor, qkv: Tensor, z: Tensor, a: Tensor, b: Tensor,
    a_log: Tensor, dt_bias: Tensor, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Norm and projections: (qkv, z, log decay FP32, beta FP32)."""
    h = rms_norm(x, 1.0 + norm, eps)
    ab = F.linear(h, torch.cat([a, b])).float()
    heads = len(a)
    log_decay = -a_log.exp() * F.softplus(ab[:, :heads] + dt_bias)
    return F.linear(h, qkv), F.linear(h, z), log_decay, ab[:, heads:].sigmoid()


def gdn_out(
    x: Tensor, o: Tensor, z: Tensor, norm: Tensor, out: Tensor,
    mlp_norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    """Gated norm per head, output projection, residual, MLP."""
    heads = o.float().view(len(o), -1, len(norm))
    heads = heads * (heads.square().mean(-1, keepdim=True) + eps).rsqrt() * norm
    y = (heads.flatten(1) * F.silu(z.float())).to(x.dtype)
    return swiglu(x + F.linear(y, out), 1.0 + mlp_norm, gate, up, down, eps)


def gated_attention_in(
    x: Tensor, norm: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, q_norm: Tensor, k_norm: Tensor,
    cos: Tensor, sin: Tensor, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Qwen3.5's attention up to the scores: q, k, v per head, gate. cos, sin: [tokens, rotary]."""
    h = rms_norm(x, 1.0 + norm, eps)
    d = len(q_norm)
    q, gate = F.linear(h, wq).view(len(x), -1, 2 * d).chunk(2, -1)
    q = _rotate(rms_norm(q, 1.0 + q_norm, eps), cos, sin)
    k = _rotate(rms_norm(F.linear(h, wk).view(len(x), -1, d), 1.0 + k_norm, eps), cos, sin)
    return q, k, F.linear(h, wv).view(len(x), -1, d), gate.reshape(len(x), -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first cos.shape[-1] dimensions of every head, halves against each other."""
    rotary, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    a, b = rotary.chunk(2, -1)
    c, s = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat([rotary * c + torch.cat([-b, a], -1) * s, rest], -1)


def gated_attention_out(
    x: Tensor, o: Tensor, attention_gate: Tensor, out: Tensor,
    mlp_norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    """Qwen3.5's attention from the scores on, residual, MLP."""
    x = x + F.linear(o * attention_gate.sigmoid(), out)
    return swiglu(x, 1.0 + mlp_norm, gate, up, down, eps)


def attention_in(
    x: Tensor, norm: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, d: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Nemotron-H's attention up to the scores: q, k, v per head; no positions."""
    h = rms_norm(x, norm, eps)
    q, k, v = (F.linear(h, w).view(len(x), -1, d) for w in (wq, wk, wv))
    return q, k, v


def attention_out(
    x: Tensor, o: Tensor, out: Tensor, mlp_norm: Tensor, up: Tensor, down: Tensor, eps: float
) -> Tensor:
    """Nemotron-H's attention from the scores on, residual, and the MLP block after it."""
    return relu2(x + F.linear(o, out), mlp_norm, up, down, eps)


def mamba2_in(
    x: Tensor, norm: Tensor, w: Tensor, a_log: Tensor, dt_bias: Tensor, inner: int,
    dt_min: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Norm and projection: (z, xBC, Δ FP32, log decay FP32)."""
    h = rms_norm(x, norm, eps)
    heads = len(a_log)
    dt = F.softplus(F.linear(h, w[-heads:]).float() + dt_bias).clamp(min=dt_min)
    return F.linear(h, w[:inner]), F.linear(h, w[inner:-heads]), dt, -a_log.exp() * dt


def mamba2_value(x: Tensor, dt: Tensor) -> Tensor:
    """Δ · x per head, formed in FP32."""
    return (x.float().view(*dt.shape, -1) * dt[..., None]).flatten(1).to(x.dtype)


def mamba2_out(
    res: Tensor, y: Tensor, x: Tensor, z: Tensor, d: Tensor, norm: Tensor, out: Tensor,
    groups: int, mlp_norm: Tensor, up: Tensor, down: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    """D skip, gated norm per group, output projection, residual, and the MLP block after it."""
    skip = x.float().view(len(x), len(d), -1) * d[:, None]
    h = (y.float() + skip.flatten(1)) * F.silu(z.float())
    h = h.view(len(x), groups, -1)
    h = (h * (h.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(1) * norm
    return relu2(res + F.linear(h.to(x.dtype), out), mlp_norm, up, down, eps)


def head_loss(x: Tensor, norm: Tensor, head: Tensor, targets: Tensor, eps: float) -> Tensor:
    """Cross-entropy of every token in nats, FP32 [tokens]."""
    logits = F.linear(rms_norm(x, norm, eps), head).float()
    return F.cross_entropy(logits, targets, reduction="none")


def rope_tables(
    config: Mapping[str, Any], tokens: int, steps: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every token's position in its row, FP32 [tokens, rotary dimensions]."""
    rope = config["rope_parameters"]
    dim = int(config["head_dim"] * rope["partial_rotary_factor"])
    inverse = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    angles = torch.arange(steps, dtype=torch.float32)[:, None] * inverse
    angles = torch.cat([angles, angles], -1).repeat(tokens // steps, 1).to(device)
    return angles.cos(), angles.sin()


class Forward:
    """The forward of one zoo model.

    Args:
        model: the entry.
        scan: the recurrence (see `ops.training_ops`).
        conv: the convolution.
        compiled: whether torch.compile takes the parts between them.
    """

    def __init__(self, model: ZooModel, scan: Scan, conv: Conv, *, compiled: bool) -> None:
        self.model = model
        self.config = model.config
        self.scan = scan
        self.conv = conv
        self._compiled = compiled
        self._parts: dict[Part, Part] = {}
        self._rope: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def _part(self, fn: Part) -> Part:
        if not self._compiled:
            return fn
        if fn not in self._parts:
            self._parts[fn] = torch.compile(fn, dynamic=False, fullgraph=True)
        return self._parts[fn]

    def losses(
        self, weights: Weights, ids: Tensor, targets: Tensor, decays: DecayHook | None = None
    ) -> Tensor:
        """Compute the loss of every token.

        Args:
            weights: by transformers' names.
            ids: [rows, T] int64.
            targets: [rows, T] int64.
            decays: called per recurrent layer, in order, with log decays [rows, T, H] FP32,
                of Kimi delta attention [rows, T, H, dk].

        Returns:
            [rows, T] FP32 — nats.
        """
        x, norm, eps = self._trunk(weights, ids, decays)
        head = weights["lm_head.weight"]
        loss: Tensor = self._part(head_loss)(x, norm, head, targets.flatten(), eps)
        return loss.view(ids.shape)

    def logits(self, weights: Weights, ids: Tensor, decays: DecayHook | None = None) -> Tensor:
        """Compute the logits of every token, [rows, T, V] FP32 (see `losses`)."""
        x, norm, eps = self._trunk(weights, ids, decays)
        logits = F.linear(rms_norm(x, norm, eps), weights["lm_head.weight"]).float()
        return logits.view(*ids.shape, -1)

    def _trunk(
        self, weights: Weights, ids: Tensor, decays: DecayHook | None
    ) -> tuple[Tensor, Tensor, float]:
        """Hidden [tokens, hidden], and the last norm's factor and epsilon."""
        if self.model.kind == "gdn":
            return self._gdn(weights, ids, decays), 1.0 + weights["model.norm.weight"], 1e-6
        if self.model.kind == "kda":
            x = kimi.hidden(
                weights, ids, decays, config=self.config, scan=self.scan, conv=self.conv,
                attend=self._attend, part=self._part,
            )  # fmt: skip
            return x, weights["model.norm.weight"], self.config["rms_norm_eps"]
        return self._mamba2(weights, ids, decays), weights["model.norm_f.weight"], 1e-5

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, rows: int, steps: int) -> Tensor:
        group = q.shape[1] // k.shape[1]
        q, k, v = (x.view(rows, steps, -1, x.shape[-1]).transpose(1, 2) for x in (q, k, v))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return o.transpose(1, 2).reshape(rows * steps, -1)

    def _gdn(self, w: Weights, ids: Tensor, decays: DecayHook | None) -> Tensor:
        c = self.config
        rows, steps = ids.shape
        hk, h = c["linear_num_key_heads"], c["linear_num_value_heads"]
        dk, dv = c["linear_key_head_dim"], c["linear_value_head_dim"]
        x = F.embedding(ids.flatten(), w["model.embed_tokens.weight"])
        eps = 1e-6
        for i, kind in enumerate(c["layer_types"]):
            p = f"model.layers.{i}."
            mlp = [
                w[p + n + ".weight"]
                for n in (
                    "post_attention_layernorm",
                    "mlp.gate_proj",
                    "mlp.up_proj",
                    "mlp.down_proj",
                )
            ]
            norm = w[p + "input_layernorm.weight"]
            if kind == "full_attention":
                a = p + "self_attn."
                if (rows, steps) not in self._rope:
                    tables = rope_tables(c, rows * steps, steps, ids.device)
                    self._rope[rows, steps] = tables
                q, k, v, gate = self._part(gated_attention_in)(
                    x, norm, *(w[f"{a}{n}_proj.weight"] for n in "qkv"),
                    w[a + "q_norm.weight"], w[a + "k_norm.weight"], *self._rope[rows, steps], eps,
                )  # fmt: skip
                o = self._attend(q, k, v, rows, steps)
                x = self._part(gated_attention_out)(x, o, gate, w[a + "o_proj.weight"], *mlp, eps)
                continue
            a = p + "linear_attn."
            qkv, z, g, beta = self._part(gdn_in)(
                x, norm, *(w[f"{a}in_proj_{n}.weight"] for n in ("qkv", "z", "a", "b")),
                w[a + "A_log"], w[a + "dt_bias"], eps,
            )  # fmt: skip
            g, beta = g.view(rows, steps, h), beta.view(rows, steps, h)
            if decays is not None:
                decays(g)
            q, k, v = self.conv(
                qkv, w[a + "conv1d.weight"].squeeze(1), None, steps=steps, head=dk,
                sizes=(hk * dk, hk * dk, h * dv), scales=(dk**-0.5, 1.0, None),
            )  # fmt: skip
            o = self.scan(
                q.view(rows, steps, hk, dk),
                k.view(rows, steps, hk, dk),
                v.view(rows, steps, h, dv),
                g,
                beta,
            )
            x = self._part(gdn_out)(
                x,
                o.reshape(rows * steps, -1),
                z,
                w[a + "norm.weight"],
                w[a + "out_proj.weight"],
                *mlp,
                eps,
            )
        return x

    def _mamba2(self, w: Weights, ids: Tensor, decays: DecayHook | None) -> Tensor:
        c = self.config
        rows, steps = ids.shape
        h, p_dim, n, groups = (
            c["mamba_num_heads"],
            c["mamba_head_dim"],
            c["ssm_state_size"],
            c["n_groups"],
        )
        inner = h * p_dim
        x = F.embedding(ids.flatten(), w["model.embeddings.weight"])
        eps = 1e-5
        kinds = c["layers_block_type"]
        for i in range(0, len(kinds), 2):
            a = f"model.layers.{i}.mixer."
            norm = w[f"model.layers.{i}.norm.weight"]
            mlp = [
                w[f"model.layers.{i + 1}.{m}.weight"]
                for m in ("norm", "mixer.up_proj", "mixer.down_proj")
            ]
            if kinds[i] == "full_attention":
                q, k, v = self._part(attention_in)(
                    x,
                    norm,
                    *(w[f"{a}{m}.weight"] for m in ("q_proj", "k_proj", "v_proj")),
                    c["head_dim"],
                    eps,
                )
                o = self._attend(q, k, v, rows, steps)
                x = self._part(attention_out)(x, o, w[a + "o_proj.weight"], *mlp, eps)
                continue
            z, xbc, dt, g = self._part(mamba2_in)(
                x,
                norm,
                w[a + "in_proj.weight"],
                w[a + "A_log"],
                w[a + "dt_bias"],
                inner,
                c["time_step_min"],
                eps,
            )
            g = g.view(rows, steps, h)
            if decays is not None:
                decays(g)
            xs, b, cc = self.conv(
                xbc, w[a + "conv1d.weight"].squeeze(1), w[a + "conv1d.bias"], steps=steps, head=n,
                sizes=(inner, groups * n, groups * n), scales=(None, None, None),
            )  # fmt: skip
            v = self._part(mamba2_value)(xs, dt)
            y = self.scan(
                cc.view(rows, steps, groups, n),
                b.view(rows, steps, groups, n),
                v.view(rows, steps, h, p_dim),
                g,
                None,
            )
            x = self._part(mamba2_out)(
                x, y.reshape(rows * steps, -1), xs, z, w[a + "D"], w[a + "norm.weight"],
                w[a + "out_proj.weight"], groups, *mlp, eps,
            )  # fmt: skip
        return x
