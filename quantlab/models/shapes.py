"""State shapes of a checkpoint's recurrent layers, from its config alone: no weight is read."""

from __future__ import annotations

import torch

from quantlab.models.checkpoint import adapted_family, read_config
from quantlab.models.load import quiet_transformers
from quantlab.models.loaded import state_shape
from quantlab.models.source import fetch, resolve


def recurrent_shapes(name: str) -> list[tuple[int, int, int]]:
    """Find (H, dv, dk) of every recurrent layer, in the order they run.

    Args:
        name: zoo name, preset, directory or hub id.

    Raises:
        UsageError: unknown name, no config.json, or a family that is not adapted.
        MissingAsset: the config is not here and cannot be fetched.
    """
    source = resolve(name)
    if source.path is None:
        source = fetch(source, weights=False)
    assert source.path is not None
    family = adapted_family(source.path, read_config(source.path))
    from transformers import AutoConfig, AutoModelForCausalLM

    with quiet_transformers(), torch.device("meta"):
        config = AutoConfig.from_pretrained(source.path, local_files_only=True)
        model = AutoModelForCausalLM.from_config(config)
    mixers = (m for m in model.modules() if type(m).__name__ == family.mixer)
    return [state_shape(family, mixer) for mixer in mixers]
