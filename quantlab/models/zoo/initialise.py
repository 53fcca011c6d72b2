"""First weights of a zoo model by parameter name, and transformers checkpoints of such weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantlab.models.zoo.recipe import HalfLives, ZooModel


def hf_config(model: ZooModel) -> Any:
    """Build transformers' configuration of a zoo model."""
    from transformers import AutoConfig

    values = {k: (list(v) if isinstance(v, list) else v) for k, v in model.config.items()}
    return AutoConfig.for_model(model.model_type, **values)


def hf_model(model: ZooModel) -> Any:
    """Build transformers' model of a zoo model, weights undefined but for shape (FP32)."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(hf_config(model), dtype=torch.float32)


def half_lives(spec: HalfLives, layers: int, heads: int) -> Tensor:
    """Spread initial half-lives over a model.

    Returns:
        [layers, heads] FP64 — tokens; each layer holds every `layers`-th of the log-spaced values.
    """
    grid = torch.linspace(
        math.log(spec.fastest), math.log(spec.slowest), layers * heads, dtype=torch.float64
    )
    return grid.exp().view(heads, layers).T.contiguous()


def channel_factors(spec: HalfLives, channels: int) -> Tensor:
    """Factors of dt of a head's key channels, FP64 [channels], even in log and around 1.

    In the order of a golden-ratio sequence, so that any run of neighbours spans the whole range.
    """
    at = torch.arange(channels, dtype=torch.float64) * ((math.sqrt(5.0) - 1.0) / 2.0) % 1.0
    return torch.exp((at - 0.5) * math.log(spec.channels))


def decay_parameters(
    spec: HalfLives, lives: Tensor, channels: int | None = None
) -> tuple[Tensor, Tensor]:
    """Turn half-lives into (A_log, dt_bias), with softplus(dt_bias) = dt.

    Args:
        spec: gives dt of a half-life.
        lives: FP64 [heads] — half-lives in tokens.
        channels: key channels of a head that have a dt each; None for one a head.

    Returns:
        A_log [heads] and dt_bias [heads] or [heads · channels].
    """
    dt = spec.dt_fast * (lives / spec.fastest) ** -spec.slope
    a_log = torch.log(math.log(2.0) / (lives * dt))
    if channels is not None:
        dt = (dt[:, None] * channel_factors(spec, channels)).flatten()
    # Inverse of softplus, without the overflow of log(exp(dt) - 1).
    dt_bias = dt + torch.log(-torch.expm1(-dt))
    return a_log, dt_bias


def initial_weights(model: ZooModel, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Draw the first weights.

    Matrices are normal with variance 1 / fan-in; those that write to the residual stream are
    divided by sqrt(number of residual writes); embeddings and head have a standard deviation of
    0.02; the small projections that modulate decays a tenth of the ordinary one, so that training
    starts at the spread half-lives.

    Args:
        model: the entry.
        shapes: parameter name → shape, as in transformers' state dict.

    Returns:
        FP32 tensors on the CPU; the same for the same entry on any machine.
    """
    generator = torch.Generator().manual_seed(model.training.seed)
    names = sorted(shapes)
    recurrent = sorted(
        (n for n in names if n.endswith("A_log")),
        key=lambda n: int(n.split("layers.")[1].split(".")[0]),
    )
    heads = shapes[recurrent[0]].numel()
    lives = half_lives(model.half_lives, len(recurrent), heads)
    writes = sum(
        n.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")) for n in names
    )
    weights: dict[str, Tensor] = {}
    for name in names:
        shape = shapes[name]
        leaf = ".".join(name.split(".")[-2:])
        if name.endswith(("A_log", "dt_bias")):
            layer = recurrent.index(name.rsplit(".", 1)[0] + ".A_log")
            channels = model.config["linear_head_dim"] if model.kind == "kda" else None
            a_log, dt_bias = decay_parameters(model.half_lives, lives[layer], channels)
            chosen = a_log if name.endswith("A_log") else dt_bias
            weights[name] = chosen.float().view(shape)
        elif name.endswith(".D"):
            weights[name] = torch.ones(shape)
        elif "norm" in leaf:
            # Qwen3.5's ungated norms multiply by 1 + weight.
            centred = model.model_type.startswith("qwen3_5") and "linear_attn.norm" not in name
            weights[name] = torch.zeros(shape) if centred else torch.ones(shape)
        elif "conv1d" in leaf:
            if name.endswith("bias"):
                weights[name] = torch.zeros(shape)
            else:
                weights[name] = (torch.rand(shape, generator=generator) * 2 - 1) * shape[-1] ** -0.5
        elif "embed" in leaf or "lm_head" in leaf:
            weights[name] = torch.randn(shape, generator=generator) * 0.02
        else:
            std = shape[-1] ** -0.5
            if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                std /= math.sqrt(writes)
            weights[name] = torch.randn(shape, generator=generator) * std
            if name.endswith(
                ("in_proj_a.weight", "in_proj_b.weight", ".f_b_proj.weight", ".b_proj.weight")
            ):
                weights[name] *= 0.1
            if name.endswith("mixer.in_proj.weight"):
                weights[name][-heads:] *= 0.1  # Δ's rows, the last ones of the fused projection
    return weights


def save_checkpoint(model: ZooModel, weights: Mapping[str, Tensor], directory: Path) -> None:
    """Write a transformers checkpoint: config.json and model.safetensors, BF16.

    Args:
        model: the entry.
        weights: a full state dict of that architecture.
        directory: made if missing.
    """
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    config = hf_config(model)
    config.architectures = [type(hf_model(model)).__name__]
    # Written by hand: `save_pretrained` writes fields that depend on the version of transformers.
    values = {
        "architectures": config.architectures,
        "model_type": model.model_type,
        "dtype": "bfloat16",
        **model.config,
    }
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    stored = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in weights.items()}
    save_file(stored, str(directory / "model.safetensors"), metadata={"format": "pt"})
