"""A loaded model: transformers' own, with its recurrent layers found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quantlab.errors import UsageError
from quantlab.models.identity import describe
from quantlab.models.registry import FAMILIES, Family


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A transformers causal language model in eval mode, with its recurrent layers found.

    Attributes:
        model: the transformers model; text only, for multimodal checkpoints.
        family: its entry in the registry.
        tokenizer: transformers tokenizer, or None if the checkpoint brings none.
        identity: what was loaded and what runs it, for provenance; plain JSON values.
        recurrent_modules: the recurrent modules in the order they run.
    """

    model: Any
    family: Family
    tokenizer: Any = None
    identity: dict[str, Any] = field(default_factory=dict)
    recurrent_modules: tuple[nn.Module, ...] = ()

    @property
    def layers(self) -> int:
        """Number of recurrent layers."""
        return len(self.recurrent_modules)

    @property
    def vocab_size(self) -> int:
        """Number of logits of a position."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def activation_dtype(self) -> torch.dtype:
        """Dtype of the model's activations, that of its embeddings."""
        dtype: torch.dtype = self.model.get_input_embeddings().weight.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Device the model lives on."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    @property
    def recurrent_shapes(self) -> list[tuple[int, int, int]]:
        """(H, dv, dk) of every recurrent layer's state."""
        return [state_shape(self.family, mixer) for mixer in self.recurrent_modules]


def state_shape(family: Family, mixer: Any) -> tuple[int, int, int]:
    """(H, dv, dk) of a recurrent module's state."""
    if family.op == "gdn":
        return mixer.num_v_heads, mixer.head_v_dim, mixer.head_k_dim
    if family.op == "kda":
        return mixer.num_heads, mixer.head_dim, mixer.head_dim
    return mixer.num_heads, mixer.head_dim, mixer.ssm_state_size


def adapt(
    model: Any, *, tokenizer: Any = None, identity: dict[str, Any] | None = None
) -> LoadedModel:
    """Wrap a transformers causal model that is in memory already, and put it in eval mode.

    Args:
        model: a `…ForCausalLM` of an adapted family.
        tokenizer: kept beside it.
        identity: provenance to which versions, dtype and op implementation are added.

    Raises:
        UsageError: if its family is not adapted, or it has no recurrent layer.
    """
    model_type = model.config.model_type
    families = {t: f for f in FAMILIES.values() for t in (f.model_type, *f.config_types)}
    family = families.get(model_type)
    if family is None:
        raise UsageError(
            f"model type {model_type!r} is not an adapted family; adapted are {', '.join(FAMILIES)}"
        )
    mixers = tuple(m for m in model.modules() if type(m).__name__ == family.mixer)
    if not mixers:
        raise UsageError(f"this {model_type} model has no recurrent layer: nothing to study")
    model.eval()
    loaded = LoadedModel(
        model=model,
        family=family,
        tokenizer=tokenizer,
        identity=dict(identity or {"name": "in memory", "origin": "memory"}),
        recurrent_modules=mixers,
    )
    loaded.identity.update(describe(loaded))
    return loaded
