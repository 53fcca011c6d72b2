"""Tiny random models of every adapted family, for tests: `tiny("qwen3_5")`.

Weights are redrawn so that the recurrence matters: read-outs of the size of the residual, step
sizes and decays spread over two decades (half-lives of about 1 to 300 tokens). dk and dv differ
wherever the family allows it, and value heads share keys in groups, so that a transposed state or
a tiled expansion cannot pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from quantlab.models.load import quiet_transformers
from quantlab.models.loaded import LoadedModel, adapt

VOCAB = 96
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_ATTENTION: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_GDN: dict[str, Any] = {
    **_ATTENTION,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA: dict[str, Any] = {
    **_ATTENTION,
    "intermediate_size": 96,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_chunk_size": 16,
}
# (config class, model class, its arguments)
_CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {**_GDN, "head_dim": 16, "intermediate_size": 96},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {**_GDN, **_EXPERTS, "head_dim": 16},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**_GDN, **_EXPERTS, "head_dim": 16, "intermediate_size": 96},
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        {**_GDN, "intermediate_size": 96, "linear_allow_neg_eigval": True},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **_ATTENTION,
            "hybrid_override_pattern": "M*M-M",
            "head_dim": 16,
            "intermediate_size": 96,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 24,
            "chunk_size": 16,
            "time_step_min": 0.001,
        },
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            "num_hidden_layers": 3,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "state_size": 24,
            "chunk_size": 16,
        },
    ),
    "bamba": (
        "BambaConfig",
        "BambaForCausalLM",
        {**_MAMBA, "num_hidden_layers": 4, "attn_layer_indices": [1]},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **_MAMBA,
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "position_embedding_type": "rope",
            "logits_scaling": 4.0,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.7,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            **_MAMBA,
            "num_hidden_layers": 3,
            "mamba_d_ssm": 128,
            "lm_head_multiplier": 0.3,
            "embedding_multiplier": 1.5,
            "ssm_in_multiplier": 0.8,
            "ssm_out_multiplier": 1.2,
            "key_multiplier": 0.7,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
        },
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "max_position_embeddings": 512,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "layer_types": [
                "linear_attention",
                "linear_attention",
                "full_attention",
                "linear_attention",
            ],
        },
    ),
}
FAMILY_NAMES = tuple(_CONFIGS)
# Families without experts: routing is discontinuous, so a bound on noise holds for these alone.
DENSE = ("qwen3_5", "olmo_hybrid", "nemotron_h", "mamba2", "bamba", "falcon_h1")


def _redraw(model: Any, generator: torch.Generator) -> None:
    def normal(p: torch.Tensor) -> torch.Tensor:
        return torch.randn(p.shape, generator=generator)

    def uniform(p: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(p.shape, generator=generator)

    for name, p in model.named_parameters():
        if name.endswith("A_log"):
            p.copy_(torch.log(uniform(p, 0.2, 4.0)))
        elif name.endswith("dt_bias"):
            step = torch.exp(uniform(p, math.log(3e-3), math.log(0.3)))
            p.copy_(torch.log(torch.expm1(step)))
        elif name.endswith("bias"):
            p.copy_(0.1 * normal(p))
        elif p.ndim == 1:
            # Norm weights and skips keep their centre, 0 or 1 by family.
            p.add_(0.1 * normal(p))
        elif "conv1d" in name:
            p.copy_(normal(p) * 0.5)
        elif "embed" in name:
            p.copy_(normal(p))
        else:
            p.copy_(normal(p) * p.shape[-1] ** -0.5)


def tiny_hf(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A transformers model in FP32 and eval mode; `overrides` go into its config."""
    import transformers

    config_name, model_name, arguments = _CONFIGS[family]
    config = getattr(transformers, config_name)(**{**_COMMON, **arguments, **overrides})
    with quiet_transformers(), torch.no_grad():
        model = getattr(transformers, model_name)(config)
        _redraw(model, torch.Generator().manual_seed(seed))
    return model.eval()


def tiny(
    family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> LoadedModel:
    """The same, loaded: hooks, shapes and identity as for a checkpoint."""
    return adapt(tiny_hf(family, seed=seed, **overrides).to(dtype))


def tokens(rows: int, steps: int, *, seed: int = 1) -> torch.Tensor:
    """[rows, steps] random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (rows, steps), generator=generator)
