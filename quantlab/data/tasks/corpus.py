"""Problems of all tasks sorted by length: shelves, each of rows of one width, to train and test on.

A row is one problem from its beginning, as generation sees it, and zeros behind it. Problems of a
shelf have a seed of its own; seed 0 is for evaluation and on no shelf.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantlab.data.tasks import TASKS, Task

WIDTHS = (
    128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120,
)  # fmt: skip
"""Bytes of a row. The longest problem of every task fits the last; about a seventh of a row stays
empty. All divide 122,880, so that a batch of any width can have that many bytes."""
INDICES = 1 << 26
"""Indices of a seed's problems that a width has to itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """Problems of one width.

    Attributes:
        text: [n, width] uint8, zeros behind a problem's END.
        begins: [n] int64, first byte of the solution.
        ends: [n] int64, one past END.
        tasks: [n] int64, index in `TASKS`.
    """

    text: NDArray[np.uint8]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    tasks: NDArray[np.int64]


def steps_between(task: Task, shortest: int, longest: int) -> range:
    """Find the steps of a task's problems whose text has `shortest` to `longest` bytes."""
    one = task.text_length(1)
    width = task.text_length(2) - one
    least = 1 + max(0, -((one - shortest) // width))
    most = 1 + (longest - one) // width
    return range(max(task.fewest, least), min(task.most, most) + 1)


def shelf(seed: int, width: int, count: int) -> Shelf:
    """Make problems that fit a width and not the next smaller one, tasks in turn.

    Args:
        seed: of the problems, not 0.
        width: one of `WIDTHS`.
        count: how many problems.

    Raises:
        ValueError: seed 0.
    """
    if seed == 0:
        raise ValueError("seed 0 is for evaluation")
    place = WIDTHS.index(width)
    shortest = WIDTHS[place - 1] + 1 if place else 0
    ranges = [steps_between(task, shortest, width) for task in TASKS.values()]
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, width], np.uint64)))
    shares = generator.random(count)
    text = np.zeros((count, width), np.uint8)
    begins, ends, tasks = np.zeros((3, count), np.int64)
    in_turn = list(TASKS.values())
    for i, share in enumerate(shares.tolist()):
        which = i % len(in_turn)
        steps = ranges[which][int(share * len(ranges[which]))]
        problem = in_turn[which].problem(seed, place * INDICES + i, steps=steps)
        raw = problem.text.encode("ascii")
        text[i, : len(raw)] = np.frombuffer(raw, np.uint8)
        begins[i], ends[i], tasks[i] = len(problem.prompt), len(raw), which
    return Shelf(text=text, begins=begins, ends=ends, tasks=tasks)
