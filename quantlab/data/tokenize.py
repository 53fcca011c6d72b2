"""Text to token ids, with an explicit rule for the beginning-of-sequence token.

A stream is text only: no end-of-sequence token, at most one BOS, first. A BOS is put there when
the tokenizer does so by itself (`bos="auto"`); a tokenizer without one gets none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from quantlab.errors import UsageError

Bos = Literal["auto", "never"]
# ByT5 (Xue et al. 2022, arXiv 2105.13626, section 3.1): ids 0, 1, 2 are pad, end and unknown.
BYTE_OFFSET = 3


class ByteTokenizer:
    """ByT5's tokenizer without its end token: id = byte + 3. Needs no files."""

    name = "byt5 (byte + 3)"

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Ids of the UTF-8 bytes of `text`, [bytes] int64."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64) + BYTE_OFFSET

    def decode(self, ids: npt.NDArray[np.int64]) -> str:
        """Text of ids; special ids are left out, and cut characters become U+FFFD."""
        kept = ids[(ids >= BYTE_OFFSET) & (ids < BYTE_OFFSET + 256)] - BYTE_OFFSET
        return kept.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """A tokenizer with its BOS rule applied.

    Attributes:
        name: of the tokenizer, for provenance.
        bos_id: the id every stream starts with, None for none.
        encode: text → [tokens] int64, the BOS included.
    """

    name: str
    bos_id: int | None
    encode: Callable[[str], npt.NDArray[np.int64]]


def encoder_of(tokenizer: Any, *, bos: Bos = "auto") -> Encoder:
    """Wrap a tokenizer.

    Args:
        tokenizer: a transformers tokenizer, or anything with `encode(text) -> ids` that adds no
            special tokens (`ByteTokenizer`).
        bos: "auto" keeps the one BOS that the tokenizer adds by itself; "never" adds none.

    Raises:
        UsageError: when encoding, if the text itself holds the BOS.
    """
    if isinstance(tokenizer, ByteTokenizer) or type(tokenizer).__name__.startswith("ByT5"):
        byte = ByteTokenizer()
        return Encoder(name=byte.name, bos_id=None, encode=byte.encode)
    name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
    bos_id: int | None = getattr(tokenizer, "bos_token_id", None)
    if bos_id is not None and (bos == "never" or not _adds_bos(tokenizer, bos_id)):
        bos_id = None
    declared = getattr(tokenizer, "bos_token_id", None)

    def encode(text: str) -> npt.NDArray[np.int64]:
        # A text that spells out a special token must not become that token.
        encoded = tokenizer(
            text, add_special_tokens=False, split_special_tokens=True, verbose=False
        )
        ids = np.asarray(encoded["input_ids"], dtype=np.int64)
        if declared is not None and (ids == declared).any():
            raise UsageError(
                f"the text holds {name}'s beginning-of-sequence token (id {declared}) at token "
                f"{int(np.argmax(ids == declared))}; remove it from the text"
            )
        return ids if bos_id is None else np.concatenate([np.array([bos_id], np.int64), ids])

    return Encoder(name=name, bos_id=bos_id, encode=encode)


def _adds_bos(tokenizer: Any, bos_id: int) -> bool:
    """Whether the tokenizer puts its BOS in front when left to itself."""
    ids = tokenizer("a")["input_ids"]
    return bool(len(ids)) and ids[0] == bos_id
