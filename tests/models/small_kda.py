"""A random tiny-kda of the recipe at a hidden size of 32 and dk = 16, as a checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import MappingProxyType

from quantlab.models.zoo import TRAINABLE, ZooModel
from quantlab.models.zoo.initialise import hf_model, initial_weights, save_checkpoint

CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense"] * 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "linear_num_heads": 2,
    "linear_head_dim": 16,
}


def small_kda() -> ZooModel:
    """The recipe's entry, smaller."""
    entry = TRAINABLE["tiny-kda"]
    return dataclasses.replace(entry, config=MappingProxyType(dict(entry.config) | CONFIG))


def save_small_kda(directory: Path) -> ZooModel:
    """Write its first weights, with outputs large enough for the recurrence to matter."""
    model = small_kda()
    weights = initial_weights(model, {k: v.shape for k, v in hf_model(model).state_dict().items()})
    for name, w in weights.items():
        if name.endswith(("o_proj.weight", "lm_head.weight")):
            w *= 4.0
    save_checkpoint(model, weights, directory)
    return model
