"""What a step of training reads: crops of books, or whole worked problems; drawn by the step alone.

A step's batch depends on (seed, step) and its phase, so a resumed run sees what an unbroken one
would.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quantlab.models.zoo.corpus import Corpus, Crops, windows
from quantlab.models.zoo.recipe import Phase, Training

VALIDATION_LENGTH = 16_384
VALIDATION_WINDOWS = 32


class Batch(NamedTuple):
    """A step's ids and targets, [rows, T] int64, and which targets count (all if None), bool."""

    ids: Tensor
    targets: Tensor
    counted: Tensor | None = None

    def mean(self, losses: Tensor) -> Tensor:
        """Mean of losses [rows, T] over the targets that count."""
        if self.counted is None:
            return losses.mean()
        return (losses * self.counted).sum() / self.counted.sum()


class Source(Protocol):
    """Where a run's batches come from."""

    def batch(self, step: int, phase: Phase) -> Batch:
        """Give the batch of a step: `phase.rows · phase.length` tokens."""
        ...

    def validation(self) -> Iterator[Batch]:
        """Yield batches of text that is never trained on, always the same."""
        ...


class BookSource:
    """Random crops of books; every byte counts.

    Args:
        corpus: the books.
        hyper: gives seed and phases.
        device: where batches live.
    """

    def __init__(self, corpus: Corpus, hyper: Training, device: torch.device) -> None:
        self._crops = Crops(corpus.train, device, unwrapped=hyper.unwrapped)
        self._held_out = corpus.validation
        self._hyper, self._device = hyper, device

    def batch(self, step: int, phase: Phase) -> Batch:
        """Draw crops of the phase's length."""
        ids = self._crops.draw(
            seed=self._hyper.seed, step=step, rows=phase.rows, length=phase.length
        )
        return Batch(ids[:, :-1], ids[:, 1:])

    def validation(self) -> Iterator[Batch]:
        """Yield the first windows of the held-out books."""
        phases = self._hyper.phases
        length = min(VALIDATION_LENGTH, max(p.length for p in phases))
        ids = windows(self._held_out, longest=length, stride=length)
        ids = ids[:: max(1, len(ids) // VALIDATION_WINDOWS)][:VALIDATION_WINDOWS]
        rows = max(1, min(len(ids), phases[0].rows * phases[0].length // length))
        for first in range(0, len(ids) - rows + 1, rows):
            batch = ids[first : first + rows].to(self._device)
            yield Batch(batch[:, :-1], batch[:, 1:])
