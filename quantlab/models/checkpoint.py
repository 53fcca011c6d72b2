"""Read what a checkpoint directory claims, before any weight is loaded.

A safetensors file opens with the length of a JSON header and the header, which gives every
tensor's type, shape and byte range: enough to find truncated files and to know the memory needed.
Source: safetensors format, github.com/huggingface/safetensors, README "Format".
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantlab.errors import MissingAsset, RunError, UsageError
from quantlab.models.registry import FAMILIES, Family, family_of

INDEX = "model.safetensors.index.json"
# Bytes of the floating types that loading converts to the model's dtype; others keep their size.
_CONVERTED = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# A header larger than this is not one (the format's own limit is 100 MB).
_HEADER_LIMIT = 100_000_000
# Part of a multimodal or multi-token-prediction checkpoint that the text model does not load.
_NOT_LOADED = re.compile(r"^(mtp\.|model\.visual\.|visual\.)")
# Above this, hashing every byte takes minutes: the headers and sizes are hashed instead.
HASH_LIMIT = 16 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint directory whose files are whole.

    Attributes:
        path: the directory.
        config: its config.json.
        family: the adapted family it belongs to.
        shards: its safetensors files, sorted.
        elements: number of elements to be loaded, by safetensors type name.
    """

    path: Path
    config: Mapping[str, Any]
    family: Family
    shards: tuple[Path, ...]
    elements: Mapping[str, int]

    @property
    def main_type(self) -> str:
        """Safetensors type name that most elements have."""
        return max(self.elements, key=lambda name: self.elements[name], default="F32")

    @property
    def parameters(self) -> int:
        """Number of elements to be loaded."""
        return sum(self.elements.values())

    def bytes_in(self, itemsize: int) -> int:
        """Bytes of the loaded weights when floating types become `itemsize` bytes each."""
        return sum(
            count * (itemsize if name in _CONVERTED else 1) for name, count in self.elements.items()
        )


def read_config(path: Path) -> Mapping[str, Any]:
    """Parse config.json of a checkpoint directory.

    Raises:
        UsageError: if it is missing or not a JSON object.
    """
    file = path / "config.json"
    if not file.is_file():
        raise UsageError(f"{path} is not a checkpoint: it has no config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UsageError(f"{file} is not readable as JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{file} is not a JSON object")
    return config


def adapted_family(path: Path, config: Mapping[str, Any]) -> Family:
    """Return the family of a config.

    Raises:
        UsageError: if it is not an adapted one; the message lists those that are.
    """
    family = family_of(config)
    if family is None:
        raise UsageError(
            f"{path}: model type {config.get('model_type')!r} is not an adapted family; adapted "
            f"are {', '.join(FAMILIES)}"
        )
    return family


def _header(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        if head.startswith(b"version "):
            raise RunError(f"{file} is a Git LFS pointer, not the weights: run `git lfs pull`")
        length = int.from_bytes(head, "little")
        if len(head) < 8 or not 2 <= length <= min(_HEADER_LIMIT, size - 8):
            raise RunError(f"{file} is not a whole safetensors file ({size} bytes): fetch it again")
        try:
            header = json.loads(stream.read(length))
            end = max((v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"{file} has a corrupt safetensors header: fetch it again") from error
    if size != 8 + length + end:
        raise RunError(
            f"{file} is truncated or padded: its header asks for {8 + length + end} bytes, it has "
            f"{size}: fetch it again"
        )
    header.pop("__metadata__", None)
    return dict(header)


def _shards(path: Path) -> tuple[Path, ...]:
    index = path / INDEX
    if not index.is_file():
        single = path / "model.safetensors"
        if single.is_file():
            return (single,)
        raise MissingAsset(
            f"{path} holds no weights: neither model.safetensors nor {INDEX} is there (pickled "
            "weights are not read: convert them to safetensors)"
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise RunError(f"{index} is not a readable index of weights: {error}") from error
    absent = [name for name in names if not (path / name).is_file()]
    if absent:
        raise MissingAsset(
            f"{path} lacks {len(absent)} of {len(names)} weight files that {INDEX} names "
            f"(the first is {absent[0]}): download them"
        )
    return tuple(path / name for name in names)


def read_checkpoint(path: Path) -> Checkpoint:
    """Check a checkpoint directory without loading weights.

    Raises:
        UsageError: if there is no usable config.json, or its family is not adapted.
        MissingAsset: if weight files are missing.
        RunError: if a weight file is corrupt or truncated (the message names it).
    """
    config = read_config(path)
    family = adapted_family(path, config)
    shards = _shards(path)
    elements: dict[str, int] = {}
    for shard in shards:
        for name, entry in _header(shard).items():
            if not _NOT_LOADED.match(name):
                dtype = str(entry["dtype"])
                elements[dtype] = elements.get(dtype, 0) + math.prod(entry["shape"])
    return Checkpoint(path=path, config=config, family=family, shards=shards, elements=elements)


def indexed_bytes(path: Path) -> int | None:
    """Total bytes of the weights by the index file's metadata, None where it does not say."""
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        return int(index["metadata"]["total_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def weights_digest(checkpoint: Checkpoint) -> str:
    """Identify the weights: `sha256:…` over all files' bytes.

    Above `HASH_LIMIT` bytes in all, `sha256-headers:…` over each file's name, size and header.
    """
    whole = sum(shard.stat().st_size for shard in checkpoint.shards) <= HASH_LIMIT
    digest = hashlib.sha256()
    for shard in checkpoint.shards:
        if whole:
            with shard.open("rb") as stream:
                while block := stream.read(1 << 22):
                    digest.update(block)
        else:
            digest.update(f"{shard.name} {shard.stat().st_size}\n".encode())
            digest.update(json.dumps(_header(shard), sort_keys=True).encode())
    return f"{'sha256' if whole else 'sha256-headers'}:{digest.hexdigest()}"


def free_host_bytes() -> int:
    """Memory of this machine that can be taken without swapping, bytes."""
    try:
        with open("/proc/meminfo", encoding="ascii") as stream:
            for line in stream:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
