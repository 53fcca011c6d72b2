"""The token streams of a study."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quantlab.data.documents import check_data, documents
from quantlab.data.tokenize import Bos, encoder_of
from quantlab.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Stream", "Streams", "check_data", "load_streams", "tokens_needed"]

DEFAULT_STREAMS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Provenance of one stream.

    Attributes:
        name: of its document.
        source: where the document comes from.
        text_sha256: of the whole document in UTF-8.
        tokens_sha256: of the ids that are fed, little-endian int64.
        first_ids: the first eight of them, to see at a glance what a stream starts with.
    """

    name: str
    source: str
    text_sha256: str
    tokens_sha256: str
    first_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Equal-length token streams.

    Attributes:
        tokens: [streams, length] int64.
        streams: provenance of each.
        data: the `--data` value.
        tokenizer: its name.
        bos_id: the id every stream starts with, None for none.
    """

    tokens: Tensor
    streams: tuple[Stream, ...]
    data: str
    tokenizer: str
    bos_id: int | None

    def provenance(self) -> dict[str, Any]:
        """For spec.json: hashes of texts and ids, tokenizer and BOS rule."""
        return {
            "data": self.data,
            "tokenizer": self.tokenizer,
            "bos_id": self.bos_id,
            "length": int(self.tokens.shape[1]),
            "streams": [asdict(s) | {"first_ids": list(s.first_ids)} for s in self.streams],
        }


def tokens_needed(*, prompt: int, tokens: int) -> int:
    """Length of a stream that measures `tokens` positions: the last one needs a target."""
    return prompt + tokens + 1


def load_streams(
    data: str,
    *,
    tokenizer: Any,
    streams: int | None,
    tokens: int,
    prompt: int,
    bos: Bos = "auto",
) -> Streams:
    """Tokenize the first documents that are long enough, in their source's order.

    Args:
        data: "books", "pg19", or a path to .txt, .jsonl (field `text`) or a folder of them.
        tokenizer: see `encoder_of`.
        streams: how many; None takes four, or all where there are fewer.
        tokens: positions measured, N.
        prompt: tokens before them.
        bos: see `encoder_of`.

    Returns:
        The streams, cut to prompt + N + 1 tokens.

    Raises:
        UsageError: if the data are unknown, or too few documents are long enough.
        MissingAsset, RunError: as `documents`.
    """
    import torch

    length = tokens_needed(prompt=prompt, tokens=tokens)
    encoder = encoder_of(tokenizer, bos=bos)
    wanted = DEFAULT_STREAMS if streams is None else streams
    rows: list[npt.NDArray[np.int64]] = []
    found: list[Stream] = []
    lengths: list[int] = []
    for document in documents(data):
        ids = encoder.encode(document.text)
        lengths.append(len(ids))
        if len(ids) < length:
            continue
        cut = ids[:length]
        rows.append(cut)
        found.append(
            Stream(
                name=document.name,
                source=document.source,
                text_sha256=document.sha256,
                tokens_sha256=token_hash(cut),
                first_ids=tuple(int(i) for i in cut[:8]),
            )
        )
        if len(rows) == wanted:
            break
    if not rows or (streams is not None and len(rows) < streams):
        wanted = 1 if streams is None else streams
        raise UsageError(_too_short(data, wanted, lengths, prompt=prompt, tokens=tokens))
    return Streams(
        tokens=torch.from_numpy(np.stack(rows)),
        streams=tuple(found),
        data=data,
        tokenizer=encoder.name,
        bos_id=encoder.bos_id,
    )


def token_hash(ids: npt.NDArray[np.int64]) -> str:
    """sha256 of ids as little-endian int64."""
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()


def _too_short(data: str, streams: int, lengths: list[int], *, prompt: int, tokens: int) -> str:
    length = tokens_needed(prompt=prompt, tokens=tokens)
    enough = sum(n >= length for n in lengths)
    if len(lengths) < streams:
        return (
            f"--streams {streams}: {data} has {len(lengths)} "
            f"document{'s' if len(lengths) != 1 else ''}, and each stream takes one"
        )
    longest = sorted(lengths, reverse=True)[streams - 1] - prompt - 1
    possible = (
        f"the longest N possible with {streams} stream{'s' if streams != 1 else ''} is {longest:,}"
        if longest > 0
        else f"that is not even the prompt of {prompt}"
    )
    return (
        f"--tokens {tokens:,}: a stream of N tokens needs prompt + N + 1 = {length:,} tokens, and "
        f"{enough} of {len(lengths)} documents of {data} have them; {possible}"
    )
