"""Load a checkpoint of an adapted family, and say exactly what was loaded.

Everything that can be wrong with a name, a directory, a file or the device is found before a
weight is read. Loading itself is transformers' own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from quantlab.errors import MissingAsset, RunError, UsageError
from quantlab.models.checkpoint import (
    Checkpoint,
    adapted_family,
    free_host_bytes,
    indexed_bytes,
    read_checkpoint,
    read_config,
)
from quantlab.models.device import parse_device
from quantlab.models.identity import set_time_step_limit, source_identity
from quantlab.models.loaded import LoadedModel, adapt
from quantlab.models.source import Source, fetch, missing, resolve

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# Memory that loading needs beside the weights, bytes: the allocator and one layer in flight.
_LOAD_MARGIN = 256 * 2**20


def parse_dtype(
    dtype: str | torch.dtype | None, source: Source, checkpoint: Checkpoint, device: torch.device
) -> torch.dtype:
    """Choose the dtype of weights and activations.

    None means the checkpoint's own, except that the zoo runs in FP32 on a CPU, where 16-bit
    products are slow and BF16 activations would only add noise.

    Raises:
        UsageError: for an unknown name.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is not None:
        if dtype not in DTYPES:
            raise UsageError(f"unknown dtype {dtype!r}: use {', '.join(DTYPES)}")
        return DTYPES[dtype]
    if source.origin == "zoo" and device.type == "cpu":
        return torch.float32
    return _SAFETENSORS_DTYPES.get(checkpoint.main_type, torch.bfloat16)


def _require_memory(name: str, need: int, device: torch.device) -> None:
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()
    if need + _LOAD_MARGIN > free:
        raise RunError(
            f"{name} does not fit: its weights take {need / 2**30:.1f} GiB, {device} has "
            f"{free / 2**30:.1f} GiB free"
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and its notes on missing kernels.

    Which implementation runs is recorded in the identity instead.
    """
    from transformers.utils import logging as hf_logging

    bars, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def _tokenizer(source: Source, path: Path, vocab_size: int) -> Any:
    import transformers

    has_files = any(path.glob("tokenizer*")) or any(path.glob("vocab.*"))
    if has_files:
        try:
            return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise RunError(f"{path}: its tokenizer cannot be loaded: {error}") from error
    # Bytes need no files: id = byte + 3, 256 bytes, 125 sentinels.
    if source.origin == "zoo" or vocab_size == 384:
        return transformers.ByT5Tokenizer()
    return None


def load_model(
    name: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    time_step_limit: tuple[float, float] | None = None,
) -> LoadedModel:
    """Load a model of an adapted family.

    Args:
        name: zoo name, preset, directory or hub id.
        device: "cpu", "cuda" or "cuda:i".
        dtype: of weights and activations ("fp32", "bf16", "fp16"); see `parse_dtype`.
        time_step_limit: Mamba-2 only: the limits of Δ in prefill and decode, instead of the
            checkpoint's own as transformers reads it. (0.0, inf) is what serving engines use.

    Raises:
        UsageError: unknown name, device or dtype; no config.json; family not adapted.
        MissingAsset: the checkpoint, or part of it, is not here and cannot be fetched.
        RunError: a weight file is corrupt, the model does not fit, or weights are missing in it.
    """
    place = parse_device(device)
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}: use {', '.join(DTYPES)}")
    source = resolve(name)
    if source.hub_id is not None:
        # The description alone tells whether the weights are worth fetching.
        source = fetch(source, weights=False)
        assert source.path is not None
        adapted_family(source.path, read_config(source.path))
        promised = indexed_bytes(source.path)
        if promised is not None:
            _require_memory(name, promised, place)
        source = fetch(source, weights=True)
    assert source.path is not None
    try:
        checkpoint = read_checkpoint(source.path)
    except MissingAsset as error:
        raise (missing(source, str(error)) if source.hub_id else error) from error
    chosen = parse_dtype(dtype, source, checkpoint, place)
    _require_memory(name, checkpoint.bytes_in(chosen.itemsize), place)
    with quiet_transformers():
        model = _load(checkpoint, chosen, place)
        tokenizer = _tokenizer(source, source.path, model.get_output_embeddings().weight.shape[0])
    loaded = adapt(model, tokenizer=tokenizer, identity=source_identity(source, checkpoint))
    if time_step_limit is not None:
        set_time_step_limit(loaded, time_step_limit)
    return loaded


def _load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        checkpoint.path,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    wrong = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if wrong:
        raise RunError(
            f"{checkpoint.path}: {len(wrong)} weights of {type(model).__name__} are missing or "
            f"of another shape and would be random (the first is {wrong[0]})"
        )
    return model.to(device).eval()
