"""Training text of worked problems: "books" of all tasks in random order, each of its own seed.

Seed 0 is for evaluation and never in a book.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quantlab.data.tasks import TASKS

MIXTURE: Mapping[str, float] = dict.fromkeys(TASKS, 1.0)
"""Bytes of each task, relative to the others."""


def book(seed: int, size: int, mixture: Mapping[str, float] = MIXTURE) -> bytes:
    """Make one book.

    Args:
        seed: of its problems.
        size: least bytes; the last problem is whole.
        mixture: shares of bytes by task.
    """
    if seed == 0:
        raise ValueError("seed 0 is for evaluation")
    names = list(mixture)
    wanted = np.array([mixture[name] for name in names])
    written = np.zeros(len(names))
    counts = [0] * len(names)
    parts, total = [], 0
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, 2**63], np.uint64)))
    while total < size:
        # the tasks that lag behind their share are likelier, by a random amount
        lag = (written + generator.exponential(2000.0, len(names))) / wanted
        pick = int(lag.argmin())
        text = TASKS[names[pick]].problem(seed, counts[pick]).text
        counts[pick] += 1
        written[pick] += len(text)
        parts.append(text)
        total += len(text)
    return "".join(parts).encode("ascii")
