"""Worked problems as a training corpus, made where it is needed: nothing to download or to ship."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch

from quantlab.data.tasks.corpus import book
from quantlab.models.zoo.corpus import Book, Corpus
from quantlab.models.zoo.recipe import Problems

HELD_OUT_SEED = 1 << 32
"""Books of this seed and later are for validation and test; training counts from seed 1."""
HELD_OUT_SIZE = 1 << 19
"""Bytes of a held-out book: more than the longest context that a card reports."""
HELD_OUT_BOOKS = 4


def problem_corpus(problems: Problems, workers: int | None = None) -> Corpus:
    """Make the books, one process a book.

    Args:
        problems: how many and how long.
        workers: processes; one a core if None. The books do not depend on it.
    """
    seeds = [*range(1, problems.books + 1), *range(HELD_OUT_SEED, HELD_OUT_SEED + HELD_OUT_BOOKS)]
    sizes = [problems.size] * problems.books + [HELD_OUT_SIZE] * HELD_OUT_BOOKS
    workers = os.cpu_count() or 1 if workers is None else workers
    if workers == 1:
        texts = [book(*pair) for pair in zip(seeds, sizes, strict=True)]
    else:
        # spawned, since torch's threads do not survive a fork
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            texts = list(pool.map(book, seeds, sizes))
    made = [
        Book(
            title=f"worked problems, seed {seed}",
            text=torch.from_numpy(np.frombuffer(text, np.uint8).copy()),
        )
        for seed, text in zip(seeds, texts, strict=True)
    ]
    held = made[problems.books :]
    half = HELD_OUT_BOOKS // 2
    return Corpus(
        train=tuple(made[: problems.books]), validation=tuple(held[:half]), test=tuple(held[half:])
    )
