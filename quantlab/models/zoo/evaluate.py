"""What a zoo model's card states: bits per byte by context and position, half-lives of heads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantlab.models.zoo.corpus import Book, unwrap, windows
from quantlab.models.zoo.forward import Forward

CONTEXTS = (4_096, 16_384, 65_536, 131_072)
SCORED = 1_024
"""Bytes scored at the end of each window: the same bytes under every context length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Figures on one set of books.

    Args:
        bits: context length → mean bits per byte over the last `SCORED` bytes of windows of that
            length,
            all lengths ending at the same places of the same books.
        whole: context length → mean bits per byte over every byte of those windows.
        difference: context length → (mean, standard error) of bits minus bits at 16,384, paired by
            window.
        by_position: [upper end of the range of positions, bits per byte] within the longest
            windows.
        half_lives: [layers][heads] or, with a decay per key channel, [layers][heads][channels]
            tokens: ln 2 / mean(−log decay) over 16,384-byte windows.
        windows: number of windows scored at each length.
        unwrapped: mean bits per byte over the last `SCORED` bytes of 16,384-byte windows of the
            books unwrapped (`corpus.unwrap`); None for a model that was shown no such text.
    """

    bits: Mapping[int, float]
    whole: Mapping[int, float]
    difference: Mapping[int, tuple[float, float]]
    by_position: list[tuple[int, float]]
    half_lives: list[Any]
    windows: int
    unwrapped: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return {
            "bits": {str(k): v for k, v in self.bits.items()},
            "whole": {str(k): v for k, v in self.whole.items()},
            "difference_from_16384": {str(k): list(v) for k, v in self.difference.items()},
            "by_position": [list(p) for p in self.by_position],
            "half_lives": self.half_lives,
            "windows": self.windows,
            "unwrapped": self.unwrapped,
        }


def evaluate(
    forward: Forward,
    weights: Mapping[str, Tensor],
    books: tuple[Book, ...],
    *,
    contexts: tuple[int, ...] = CONTEXTS,
    scored: int = SCORED,
    stride: int | None = None,
    tokens: int = 131_072,
    unwrapped: bool = False,
) -> Evaluation:
    """Measure a model on books.

    Runs with gradients recorded and discarded, so that the compiled parts of training are used as
    they are instead of being compiled again.

    Args:
        forward: the model's forward.
        weights: by transformers' names.
        books: all longer than the longest context.
        contexts: window lengths, ascending.
        scored: bytes scored at the end of each window.
        stride: distance of window ends; the longest context if None.
        tokens: of one forward; rows are filled up with repeats to reach it exactly.
        unwrapped: whether to score the books unwrapped as well.
    """
    longest = max(contexts)
    stride = stride or longest
    ids = windows(books, longest=longest, stride=stride)
    middle = 16_384 if 16_384 in contexts else contexts[0]
    tails: dict[int, Tensor] = {}
    whole: dict[int, float] = {}
    for context in contexts:
        rows = max(1, tokens // context)
        table, decays = _score(forward, weights, ids[:, longest - context :], rows)
        tails[context] = table[:, -scored:].mean(1)
        whole[context] = table.mean().item()
        if context == middle:
            lives = math.log(2.0) / decays
        if context == longest:
            positions = table.mean(0)
    joined = None
    if unwrapped:
        # No byte is added or lost, so these are the same places of the books.
        ids = windows(unwrap(books), longest=longest, stride=stride)[:, longest - middle :]
        table, _ = _score(forward, weights, ids, max(1, tokens // middle))
        joined = table[:, -scored:].mean().item()
    difference = {}
    for context in contexts:
        d = tails[context] - tails[middle]
        difference[context] = (d.mean().item(), (d.std() / len(d) ** 0.5).item())
    edges = [0] + [e for e in (256 * 2**i for i in range(20)) if e < longest] + [longest]
    by_position = [(hi, positions[lo:hi].mean().item()) for lo, hi in itertools.pairwise(edges)]
    return Evaluation(
        bits={k: v.mean().item() for k, v in tails.items()},
        whole=whole,
        difference=difference,
        by_position=by_position,
        half_lives=lives.tolist(),
        windows=len(ids),
        unwrapped=joined,
    )


def _score(
    forward: Forward, weights: Mapping[str, Tensor], ids: Tensor, rows: int
) -> tuple[Tensor, Tensor]:
    """Bits of every byte of windows, FP64 [windows, T], and the mean −log decay by layer.

    Args:
        forward: the model's forward.
        weights: by transformers' names.
        ids: [windows, T + 1].
        rows: windows of one forward, filled up with repeats.
    """
    device = weights["lm_head.weight"].device
    losses, decays = [], []
    for first in range(0, len(ids), rows):
        batch = ids[torch.arange(first, first + rows) % len(ids)].to(device)
        means: list[Tensor] = []

        def record(log_decay: Tensor, into: list[Tensor] = means) -> None:
            into.append(-log_decay.detach().double().mean((0, 1)).cpu())

        loss = forward.losses(weights, batch[:, :-1], batch[:, 1:], record).detach()
        losses.append(loss[: len(ids) - first].cpu())
        decays.append(torch.stack(means))
    return torch.cat(losses).double() / math.log(2.0), torch.stack(decays).mean(0)
