"""Documents of a `--data` value: packaged books, a pinned hub data set, or local text."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from quantlab.data.manifest import MANIFESTS, STREAMS_DIRECTORY, Manifest, load_manifest
from quantlab.errors import MissingAsset, RunError, UsageError

SUFFIXES = (".txt", ".jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text, a candidate for a stream.

    Attributes:
        name: short and unique within its source.
        source: where it comes from, for provenance.
        text: the text.
    """

    name: str
    source: str
    text: str

    @property
    def sha256(self) -> str:
        """Of the text in UTF-8."""
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()


def check_data(spec: str) -> None:
    """Check that `spec` names data, without reading them.

    Raises:
        UsageError: if it is neither a known name nor a .txt or .jsonl file, nor a folder of them.
    """
    if spec in MANIFESTS:
        return
    path = Path(spec)
    known = f"known: {', '.join(MANIFESTS)}, or a path to .txt or .jsonl (field `text`)"
    if path.is_dir():
        if not _files(path):
            raise UsageError(f"--data {spec}: the folder holds no .txt or .jsonl file")
    elif not path.exists():
        near = get_close_matches(spec, MANIFESTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"--data {spec!r}: no such data set or file ({known}){hint}")
    elif path.suffix not in SUFFIXES:
        raise UsageError(
            f"--data {spec!r}: {path.suffix or 'no suffix'} is not supported ({known})"
        )


def documents(spec: str) -> Iterator[Document]:
    """Yield the documents of `spec` in their fixed order.

    Raises:
        UsageError: as `check_data`, or if a line of a .jsonl is malformed.
        MissingAsset: if a hub data set is neither cached nor reachable.
        RunError: if a packaged file does not match its manifest.
    """
    check_data(spec)
    if spec in MANIFESTS:
        manifest = load_manifest(spec)
        yield from _packaged(manifest) if manifest.kind == "packaged" else _hub(manifest)
        return
    path = Path(spec)
    for file in _files(path) if path.is_dir() else [path]:
        yield from _local(file)


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_file() and p.suffix in SUFFIXES)


def _packaged(manifest: Manifest) -> Iterator[Document]:
    for entry in manifest.texts:
        path = STREAMS_DIRECTORY / entry.file
        try:
            data = lzma.decompress(path.read_bytes())
        except (OSError, lzma.LZMAError) as error:
            raise RunError(f"the packaged stream {path} cannot be read: {error}") from error
        found = hashlib.sha256(data).hexdigest()
        if found != entry.sha256:
            raise RunError(
                f"{path} is not the file of the manifest {manifest.name}: sha256 {found}, "
                f"expected {entry.sha256}; reinstall quantlab"
            )
        yield Document(name=entry.name, source=entry.source, text=data.decode("utf-8"))


def _hub(manifest: Manifest) -> Iterator[Document]:
    hub = manifest.hub
    path = download(hub["repository"], hub["revision"], hub["file"])
    import datasets

    table = datasets.load_dataset(
        "parquet", data_files={manifest.split: str(path)}, split=manifest.split
    )
    for row in table:
        title = str(row[hub["title_column"]])
        yield Document(
            name=title, source=f"{hub['repository']}@{hub['revision']}", text=row[hub["column"]]
        )


def download(
    repository: str,
    revision: str,
    file: str,
    *,
    otherwise: str = "or give --data a local .txt or .jsonl",
) -> Path:
    """Path of a hub data set's file in the cache, where a pinned one is found without a request.

    Args:
        repository: of the data set.
        revision: commit, or a branch.
        file: path in the repository.
        otherwise: what else can be done where it is not to be had.

    Raises:
        MissingAsset: if it is neither there nor to be had.
    """
    from huggingface_hub import (
        constants,
        dataset_info,
        hf_hub_download,
        try_to_load_from_cache,
    )

    cached = try_to_load_from_cache(repository, file, repo_type="dataset", revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    try:
        # without a network this fails at once, where the download tries for half a minute
        dataset_info(repository, revision=revision)
        return Path(hf_hub_download(repository, file, repo_type="dataset", revision=revision))
    except Exception as error:
        # its own errors, or those of the HTTP library, which differs by version; shown in the text
        raise MissingAsset(
            f"the data set {repository} at revision {revision} ({file}) is neither in the hub "
            f"cache ({constants.HF_HUB_CACHE}) nor reachable. Where the network is: hf download "
            f"{repository} {file} --repo-type dataset --revision {revision}; {otherwise} "
            f"({type(error).__name__}: {_first_line(error)})"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _local(path: Path) -> Iterator[Document]:
    try:
        if path.suffix == ".txt":
            yield Document(name=path.stem, source=str(path), text=path.read_text("utf-8"))
            return
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _json_line(path, number, line)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _json_line(path: Path, number: int, line: str) -> Document:
    try:
        text = json.loads(line)["text"]
        if not isinstance(text, str):
            raise TypeError(f"`text` is a {type(text).__name__}")
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}, line {number}: expected a JSON object with a string `text` "
            f"({type(error).__name__}: {error})"
        ) from error
    return Document(name=f"{path.stem}:{number}", source=f"{path}:{number}", text=text)
