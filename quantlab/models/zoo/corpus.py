"""The books as token streams: training crops, held-out books, test windows; all deterministic."""

from __future__ import annotations

import hashlib
import lzma
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quantlab.data.manifest import TESTING, TRAINING, Text, load_manifest
from quantlab.data.tokenize import BYTE_OFFSET
from quantlab.errors import MissingAsset, RunError

VALIDATION_SHARE = 0.05
"""Least share of the training text's bytes that is held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """One book: its title and its bytes, uint8 [n]."""

    title: str
    text: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Books for training, for validation (never trained on) and for the test.

    The validation books are whole books: those of least sha256, until they
    hold `VALIDATION_SHARE` of the training text. Hashes order books regardless of author, size and
    place.
    """

    train: tuple[Book, ...]
    validation: tuple[Book, ...]
    test: tuple[Book, ...]


def load_corpus(directory: Path) -> Corpus:
    """Read the books of data_manifests/books-train.toml and books-test.toml, and check them.

    Args:
        directory: holds books-train.txt.xz and books-test/.

    Raises:
        MissingAsset: a file is not there.
        RunError: a file is damaged, or a book has another sha256 than its manifest says.
    """
    training, testing = load_manifest(TRAINING), load_manifest(TESTING)
    whole = _read(directory / training.file, TRAINING)
    quota = VALIDATION_SHARE * sum(text.bytes for text in training.texts)
    held: set[str] = set()
    for text in sorted(training.texts, key=lambda text: text.sha256):
        if quota <= 0:
            break
        held.add(text.sha256)
        quota -= text.bytes
    train: list[Book] = []
    validation: list[Book] = []
    offset = 0
    for text in training.texts:
        book = _book(text, whole[offset : offset + text.bytes], directory / training.file)
        (validation if text.sha256 in held else train).append(book)
        offset += text.bytes
    test = [
        _book(text, _read(directory / text.file, TESTING), directory / text.file)
        for text in testing.texts
    ]
    return Corpus(train=tuple(train), validation=tuple(validation), test=tuple(test))


def _read(path: Path, manifest: str) -> bytes:
    if not path.is_file():
        raise MissingAsset(
            f"{path} does not exist: data_manifests/{manifest}.toml lists the books with their "
            "sources and hashes"
        )
    try:
        return lzma.decompress(path.read_bytes())
    except lzma.LZMAError as error:
        raise RunError(f"{path} is damaged: {error}") from error


def _book(text: Text, raw: bytes, path: Path) -> Book:
    if hashlib.sha256(raw).hexdigest() != text.sha256:
        raise RunError(f"{text.title!r} in {path} has another sha256 than its manifest says")
    return Book(title=text.title, text=torch.from_numpy(np.frombuffer(raw, np.uint8).copy()))


_WRAP = re.compile(rb"\n(?<=[^\n]{50}\n)(?=\S)")
"""A line break that wrapping made: after a line of 50 bytes or more, and with text right after it.
Verse, headings and lists have shorter lines; paragraphs end in an empty one.
"""


def unwrap(books: tuple[Book, ...]) -> tuple[Book, ...]:
    """Join the lines of paragraphs by spaces; no byte is added or lost."""
    return tuple(
        Book(
            title=b.title,
            text=torch.frombuffer(
                bytearray(_WRAP.sub(b" ", b.text.numpy().tobytes())), dtype=torch.uint8
            ),
        )
        for b in books
    )


class Crops:
    """Random crops of books, drawn by (seed, step): a resumed run sees what an unbroken one would.

    Every start position of every book that is long enough is equally likely; no crop spans two
    books. Each crop is unwrapped (`unwrap`) with a chance of `unwrapped`.
    """

    def __init__(
        self, books: tuple[Book, ...], device: torch.device, *, unwrapped: float = 0.0
    ) -> None:
        self._sizes = np.array([len(b.text) for b in books], np.int64)
        self._offsets = np.concatenate([[0], np.cumsum(self._sizes)[:-1]])
        self._unwrapped = unwrapped
        banks = [books] if unwrapped == 0.0 else [books, unwrap(books)]
        # Both banks have the same sizes, so the same positions.
        self._text = torch.cat([b.text for bank in banks for b in bank]).to(device)

    def draw(self, *, seed: int, step: int, rows: int, length: int) -> Tensor:
        """Draw ids [rows, length + 1] int64: a step's inputs and, one later, its targets.

        Raises:
            ValueError: no book is longer than `length`.
        """
        starts = np.maximum(self._sizes - length, 0)
        ends = np.cumsum(starts)
        if ends[-1] == 0:
            raise ValueError(f"no book is longer than {length} bytes")
        generator = np.random.Generator(np.random.Philox(key=[seed, step]))
        draws = generator.integers(0, ends[-1], rows)
        book = np.searchsorted(ends, draws, side="right")
        first = self._offsets[book] + draws - (ends[book] - starts[book])
        if self._unwrapped > 0.0:
            first += self._sizes.sum() * (generator.random(rows) < self._unwrapped)
        at = torch.from_numpy(first)
        if self._text.is_cuda:
            # Pinned, so that the copy does not wait for the step before.
            at = at.pin_memory().to(self._text.device, non_blocking=True)
        index = at[:, None] + torch.arange(length + 1, device=self._text.device)
        return self._text[index].long() + BYTE_OFFSET


def windows(books: tuple[Book, ...], *, longest: int, stride: int) -> Tensor:
    """Cut books into overlapping windows that all lengths can share ends with.

    Returns:
        [windows, longest + 1] int64 ids; window i of a book ends `longest + i · stride` bytes into
        it.
    """
    cut = [
        b.text[i : i + longest + 1].long() + BYTE_OFFSET
        for b in books
        for i in range(0, len(b.text) - longest, stride)
    ]
    if not cut:
        raise ValueError(f"no book is longer than {longest} bytes")
    return torch.stack(cut)
