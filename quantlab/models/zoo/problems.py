"""Worked problems as batches, made where they are needed: nothing to download or to ship.

Every batch is of one width, and every row one problem from its beginning, as generation will see
it. Only the solution counts: a prompt is random, and learning it would take all the capacity. The
phases of a recipe are a curriculum: `Phase.length` is the widest row of the phase, and a step's
width is drawn evenly from those up to it, with as many rows as give the phase's tokens.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quantlab.data.tasks.corpus import WIDTHS, Shelf, shelf
from quantlab.data.tokenize import BYTE_OFFSET
from quantlab.models.zoo.recipe import Phase, Problems, Training
from quantlab.models.zoo.source import Batch

HELD_OUT_SEED = 1 << 32
"""Problems of this seed are for validation and test; training counts from seed 1."""
BOOK = 1 << 20
"""Bytes that a process makes at a time, of one width and seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemCorpus:
    """Problems by width.

    Attributes:
        train: shelves to train on.
        held_out: shelves of other problems; of each task and width `Problems.held_out` of them.
    """

    train: Mapping[int, Shelf]
    held_out: Mapping[int, Shelf]


def problem_corpus(
    problems: Problems, *, widths: Sequence[int] = WIDTHS, workers: int | None = None
) -> ProblemCorpus:
    """Make all problems of a recipe.

    Args:
        problems: how many.
        widths: of rows.
        workers: processes; one a core if None. The problems do not depend on it.
    """
    jobs = [
        (seed, width, max(1, min(BOOK, problems.size) // width))
        for width in widths
        for seed in range(1, 1 + max(1, problems.size // BOOK))
    ]
    tests = [(HELD_OUT_SEED, width, 4 * problems.held_out) for width in widths]
    workers = os.cpu_count() or 1 if workers is None else workers
    if workers == 1:
        made = [shelf(*job) for job in [*jobs, *tests]]
    else:
        # spawned, since torch's threads do not survive a fork
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            made = list(pool.map(shelf, *zip(*jobs, *tests, strict=True)))
    found: dict[int, list[Shelf]] = {}
    for (_, width, _), one in zip(jobs, made, strict=False):
        found.setdefault(width, []).append(one)
    return ProblemCorpus(
        train={width: _joined(shelves) for width, shelves in found.items()},
        held_out=dict(zip(widths, made[len(jobs) :], strict=True)),
    )


def _joined(shelves: Sequence[Shelf]) -> Shelf:
    return Shelf(
        text=np.concatenate([s.text for s in shelves]),
        begins=np.concatenate([s.begins for s in shelves]),
        ends=np.concatenate([s.ends for s in shelves]),
        tasks=np.concatenate([s.tasks for s in shelves]),
    )


class Rows:
    """The problems of one width on a device, as batches.

    Args:
        source: the shelf.
        device: where it goes.
    """

    def __init__(self, source: Shelf, device: torch.device) -> None:
        self.text = torch.from_numpy(source.text).to(device)
        self.begins = torch.from_numpy(source.begins).to(device)
        self.ends = torch.from_numpy(source.ends).to(device)

    def __len__(self) -> int:
        return len(self.text)

    def batch(self, pick: Tensor) -> Batch:
        """Rows by index [n]: ids, targets a byte later, and the bytes of solutions, END too."""
        if self.text.is_cuda:
            # pinned, so that the copy does not wait for the step before
            pick = pick.pin_memory().to(self.text.device, non_blocking=True)
        text, begins, ends = self.text[pick], self.begins[pick, None], self.ends[pick, None]
        at = torch.arange(text.shape[1], device=text.device)
        ids = torch.where(at < ends, text.long() + BYTE_OFFSET, 0)
        after = at + 1
        targets = torch.cat([ids[:, 1:], ids.new_zeros(len(ids), 1)], 1)
        return Batch(ids, targets, (after >= begins) & (after < ends))


class ProblemSource:
    """Whole problems, of one width a step; the solutions count.

    Args:
        corpus: the problems.
        hyper: gives seed and phases.
        device: where batches live.
    """

    def __init__(self, corpus: ProblemCorpus, hyper: Training, device: torch.device) -> None:
        self._train = {width: Rows(s, device) for width, s in corpus.train.items()}
        self.held_out = {width: Rows(s, device) for width, s in corpus.held_out.items()}
        self.corpus, self._hyper = corpus, hyper
        first = hyper.phases[0]
        self.tokens = first.rows * first.length

    def batch(self, step: int, phase: Phase) -> Batch:
        """Problems of a width up to the phase's."""
        widths = [width for width in self._train if width <= phase.length]
        generator = np.random.Generator(np.random.Philox(key=[self._hyper.seed, step]))
        rows = self._train[widths[int(generator.integers(len(widths)))]]
        count = phase.rows * phase.length // rows.text.shape[1]
        return rows.batch(torch.from_numpy(generator.integers(0, len(rows), count)))

    def validation(self) -> Iterator[Batch]:
        """Yield a batch of every fourth width down from the last, of as many tokens as a step."""
        for width in list(self.held_out)[-1::-4]:
            rows = self.held_out[width]
            yield rows.batch(torch.arange(self.tokens // width) % len(rows))
