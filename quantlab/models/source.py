"""What a model name means: the embedded zoo, a preset, a directory, or a hub repository."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from quantlab.errors import MissingAsset, UsageError
from quantlab.models.checkpoint import read_checkpoint
from quantlab.models.presets import PRESETS
from quantlab.models.registry import FAMILIES

Origin = Literal["zoo", "preset", "path", "hub"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Small files first: they decide whether the weights are worth fetching.
_DESCRIPTION = ("*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.*")
_WEIGHTS = ("*.safetensors",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a model comes from.

    Attributes:
        name: as it was asked for.
        origin: what the name turned out to be.
        path: directory of the checkpoint, None until located.
        hub_id: hub repository, None for local ones.
        revision: commit of the hub repository, None for local ones or until located.
    """

    name: str
    origin: Origin
    path: Path | None = None
    hub_id: str | None = None
    revision: str | None = None


def _zoo() -> Mapping[str, Any]:
    from quantlab.models import zoo

    entries: Mapping[str, Any] = zoo.SHIPPED
    return entries


def known_names() -> list[str]:
    """Names that need no path: the zoo's, then the presets'."""
    return [*_zoo(), *PRESETS]


def public_name(name: str) -> str:
    """Name a model without saying where it lies on this machine.

    A directory that is the zoo's is named as packaged, another one by its last part; what it holds
    is known by the hash that is recorded beside it.
    """
    path = Path(name).expanduser()
    if name in known_names() or not path.is_dir():
        return name
    path = path.resolve()
    packaged = (own for own, entry in _zoo().items() if Path(entry.path).resolve() == path)
    return next(packaged, path.name)


def resolve(name: str) -> Source:
    """Say what a model name means, without touching the network or importing torch.

    A directory's config and the headers of its weight files are read, so that what is wrong with
    them is known before data are fetched or anything else starts.

    Args:
        name: zoo name, preset, directory, or hub id (`organisation/name`).

    Raises:
        UsageError: for a name that is none of these (with the nearest match and the known names),
            a directory without a usable config.json, or one of a family that is not adapted.
        MissingAsset: for a zoo name whose checkpoint was not installed, or missing weight files.
        RunError: for a corrupt or truncated weight file, by name.
    """
    zoo = _zoo()
    if name in zoo:
        home = Path(zoo[name].path)
        if not (home / "config.json").is_file():
            raise MissingAsset(
                f"{name} belongs to the embedded zoo but is not in this installation (looked in "
                f"{home}): install quantlab from a complete source tree or wheel"
            )
        read_checkpoint(home)
        return Source(name=name, origin="zoo", path=home)
    if name in PRESETS:
        return Source(name=name, origin="preset", hub_id=PRESETS[name].hub_id)
    path = Path(name).expanduser()
    if path.is_dir():
        read_checkpoint(path.resolve())
        return Source(name=name, origin="path", path=path.resolve())
    if path.exists():
        raise UsageError(f"{name} is a file: give the directory that holds config.json")
    if _HUB_ID.fullmatch(name):
        return Source(name=name, origin="hub", hub_id=name)
    if "/" in name or "\\" in name or name.startswith((".", "~")):
        raise UsageError(f"no such directory: {name}")
    names = known_names()
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UsageError(
        f"unknown model {name!r}: {hint}known names are {', '.join(names)}; or give a directory "
        f"or hub id of an adapted family ({', '.join(FAMILIES)})"
    )


def offline() -> bool:
    """Whether the user asked Hugging Face libraries to stay off the network."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def missing(source: Source, reason: str) -> MissingAsset:
    """Build the error for a checkpoint that is not here: what to download, where we looked."""
    from huggingface_hub import constants

    where = f"the hub cache {constants.HF_HUB_CACHE}"
    local = "" if source.origin == "preset" else f" and a directory named {source.name}"
    return MissingAsset(
        f"{source.name}: {reason}. Looked in {where}{local}. To fetch it, on a machine with "
        f"network access: hf download {source.hub_id}  (then copy the cache, or give the "
        "downloaded directory instead of the name)"
    )


def fetch(source: Source, *, weights: bool) -> Source:
    """Return the source with its directory: as given, cached, or downloaded.

    Args:
        source: from `resolve`.
        weights: whether the weights are needed too, or config and tokenizer only.

    Raises:
        MissingAsset: if a hub checkpoint is not cached and cannot be downloaded.
    """
    if source.hub_id is None:
        return source
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    patterns = [*_DESCRIPTION, *(_WEIGHTS if weights else ())]
    try:
        path = snapshot_download(source.hub_id, allow_patterns=patterns, local_files_only=offline())
    except GatedRepoError as error:
        raise missing(source, "access is gated: accept its licence and log in") from error
    except RepositoryNotFoundError as error:
        raise missing(source, "no such repository on the hub, or a private one") from error
    except LocalEntryNotFoundError as error:
        why = "offline (HF_HUB_OFFLINE is set)" if offline() else "the hub cannot be reached"
        raise missing(source, f"not downloaded, and {why}") from error
    except (HfHubHTTPError, OSError) as error:
        raise missing(source, f"the download failed ({error})") from error
    # A snapshot directory is named by its commit.
    return replace(source, path=Path(path), revision=Path(path).name)
