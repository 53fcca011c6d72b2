"""Data manifests: what a study reads, where it comes from, its licence, split and sha256.

They live in `data_manifests/` at the root of the repository and are installed as
`quantlab/data/manifests/`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from quantlab.errors import RunError

MANIFESTS = ("books", "pg19")
"""Streams that `--data` knows by name."""
TRAINING, TESTING = "books-train", "books-test"
"""Manifests that are no streams of a study: what the zoo is trained on, and its cards measure."""
_INSTALLED = Path(__file__).parent / "manifests"
_CHECKOUT = Path(__file__).parents[2] / "data_manifests"
STREAMS_DIRECTORY = Path(__file__).parent / "streams"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One text of a manifest.

    Attributes:
        title: title of the book.
        author: author, as catalogued.
        source: address of the original.
        bytes: length in UTF-8.
        sha256: of those bytes, decompressed.
        name: short name of the stream; empty where the text is none.
        file: its file, xz, among the packaged streams or in the user's directory; empty where the
            text has none of its own.
    """

    title: str
    author: str
    source: str
    bytes: int
    sha256: str
    name: str = ""
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A data set.

    Attributes:
        name: what `--data` calls it.
        summary: one line for lists.
        kind: "packaged" (files in the package), "hub" (a pinned file of a hub data set) or
            "local" (a file the user has).
        split: "train" or "test".
        licence: licence of texts and compilation.
        texts: the texts, where the manifest lists them.
        hub: `repository`, `revision`, `file`, `column` and `title_column` of a hub data set.
        sha256: of the whole, where it is one file; else empty.
        file: the file of the whole, where it is one of the user's; else empty.
    """

    name: str
    summary: str
    kind: Literal["packaged", "hub", "local"]
    split: str
    licence: str
    texts: tuple[Text, ...] = ()
    hub: dict[str, str] = field(default_factory=dict)
    sha256: str = ""
    file: str = ""


def manifest_path(name: str) -> Path:
    """Path of a manifest: the installed copy, else the one of the source tree."""
    for folder in (_INSTALLED, _CHECKOUT):
        path = folder / f"{name}.toml"
        if path.is_file():
            return path
    raise RunError(f"the manifest {name}.toml is in neither {_INSTALLED} nor {_CHECKOUT}")


def load_manifest(name: str) -> Manifest:
    """Read a manifest.

    Raises:
        RunError: if it is missing or malformed: the installation is broken.
    """
    path = manifest_path(name)
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
        texts = tuple(_text(entry) for entry in raw.get("text", ()))
        hub_keys = ("repository", "revision", "file", "column", "title_column")
        return Manifest(
            name=raw["name"],
            summary=raw["summary"],
            kind=raw["kind"],
            split=raw["split"],
            licence=raw["licence"],
            texts=texts,
            hub={key: raw[key] for key in hub_keys} if raw["kind"] == "hub" else {},
            sha256=raw.get("sha256", ""),
            file=raw["file"] if raw["kind"] == "local" and "sha256" in raw else "",
        )
    except (KeyError, tomllib.TOMLDecodeError) as error:
        raise RunError(f"{path} is not a manifest: {error}") from error


def _text(entry: dict[str, Any]) -> Text:
    return Text(
        title=entry["title"],
        author=entry["author"],
        source=entry["source"],
        bytes=entry["bytes"],
        sha256=entry["sha256"],
        name=entry.get("name", ""),
        file=entry.get("file", ""),
    )
