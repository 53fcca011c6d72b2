"""The adapted model families: one entry each, and the three operations they share.

A family is a `transformers` model type whose recurrence runs through two module-global functions:
one for many tokens (or no state), one for a single token with a state. Within a release the bodies
of these functions are the same in every family of a kind, so there are three operations, not ten.
Adding a family is adding an entry here (and a tiny model in tests/models/tiny.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

OpKind = Literal["gdn", "kda", "mamba2"]

# The functions an operation goes through: (many tokens or no state, one token with a state).
OP_FUNCTIONS: dict[OpKind, tuple[str, str]] = {
    "gdn": ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    "kda": ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
    "mamba2": ("mamba2_chunk_scan", "mamba2_selective_state_update"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Where one model family keeps its recurrence.

    Attributes:
        model_type: `model_type` of its config, also the name of its module in transformers.
        op: which of the three operations it performs.
        mixer: class name of the recurrent module.
        norm: attribute of the recurrent module that first reads the op's output, or None where
            the module itself casts after it (all Mamba-2 mixers do).
        write_projection: attribute whose output becomes beta by a sigmoid; None without a delta
            rule.
        config_types: further model types (of a nested text config) that mean this family.
        notes: what differs from the others, for the reader of `quantlab check`.
    """

    model_type: str
    op: OpKind
    mixer: str
    norm: str | None = None
    write_projection: str | None = None
    config_types: tuple[str, ...] = ()
    notes: str = ""

    @property
    def module(self) -> str:
        """Import path of the modeling module."""
        return f"transformers.models.{self.model_type}.modeling_{self.model_type}"

    @property
    def functions(self) -> tuple[str, str]:
        """Names of the module-global op functions: (many tokens, one token)."""
        return OP_FUNCTIONS[self.op]


_ENTRIES = (
    Family(
        model_type="qwen3_5",
        op="gdn",
        mixer="Qwen3_5GatedDeltaNet",
        norm="norm",
        write_projection="in_proj_b",
        config_types=("qwen3_5_text",),
        notes="hub checkpoints are multimodal: the text model is loaded",
    ),
    Family(
        model_type="qwen3_5_moe",
        op="gdn",
        mixer="Qwen3_5MoeGatedDeltaNet",
        norm="norm",
        write_projection="in_proj_b",
        config_types=("qwen3_5_moe_text",),
        notes="hub checkpoints are multimodal: the text model is loaded",
    ),
    Family(
        model_type="qwen3_next",
        op="gdn",
        mixer="Qwen3NextGatedDeltaNet",
        norm="norm",
        write_projection="in_proj_ba",
    ),
    Family(
        model_type="olmo_hybrid",
        op="gdn",
        mixer="OlmoHybridGatedDeltaNet",
        norm="o_norm",
        write_projection="b_proj",
        notes="linear_allow_neg_eigval puts beta in (0, 2); dk and dv differ",
    ),
    Family(
        model_type="nemotron_h",
        op="mamba2",
        mixer="NemotronHMamba2Mixer",
        notes="transformers clamps Δ in prefill, not in decode: one limit is applied to both",
    ),
    Family(
        model_type="mamba2",
        op="mamba2",
        mixer="Mamba2Mixer",
        notes="no attention, no positions",
    ),
    Family(
        model_type="bamba",
        op="mamba2",
        mixer="BambaMixer",
        notes="without explicit positions a continued forward restarts at 0",
    ),
    Family(model_type="granitemoehybrid", op="mamba2", mixer="GraniteMoeHybridMambaLayer"),
    Family(
        model_type="falcon_h1",
        op="mamba2",
        mixer="FalconH1Mixer",
        notes="beside attention in every layer; mamba_rms_norm=True needs transformers that keep "
        "one-token steps right at batch 2 (5.17 does not)",
    ),
    Family(
        model_type="kimi_linear",
        op="kda",
        mixer="KimiLinearDeltaAttention",
        norm="o_norm",
        write_projection="b_proj",
    ),
)


def _table(entries: tuple[Family, ...]) -> dict[str, Family]:
    table: dict[str, Family] = {}
    for family in entries:
        for name in (family.model_type, *family.config_types):
            if name in table:
                raise ValueError(f"model type {name} is registered twice")
            table[name] = family
    return table


_BY_CONFIG_TYPE = _table(_ENTRIES)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ENTRIES}


def family_of(config: Mapping[str, Any]) -> Family | None:
    """Return the family of a config.json, or None if it is not an adapted one.

    Args:
        config: the parsed config.json; a multimodal one counts by its own model type or by that
            of its `text_config`.
    """
    nested = config.get("text_config")
    candidates = [config.get("model_type")]
    if isinstance(nested, Mapping):
        candidates.append(nested.get("model_type"))
    for name in candidates:
        if isinstance(name, str) and name in _BY_CONFIG_TYPE:
            return _BY_CONFIG_TYPE[name]
    return None
