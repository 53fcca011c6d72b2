"""Permutation tracking: five objects in a row, two of them swapped at every step.

A problem and its solution:

    swap BDACE kx12 ky35 kz.:
    kx12DBACE
    ky35DBECA
    kz.
    answer DBECA
"""

from __future__ import annotations

import numpy as np

from quantlab.data.tasks.labels import END_OF_LIST, labels
from quantlab.data.tasks.problem import Task

OBJECTS = "ABCDE"


def _draw(generator: np.random.Generator, steps: int) -> tuple[str, list[str], str]:
    count = len(OBJECTS)
    row = [OBJECTS[i] for i in generator.permutation(count).tolist()]
    start = "".join(row)
    marks = labels(generator, steps + 1)
    first = generator.integers(0, count, steps)
    # another place, each equally likely
    second = (first + generator.integers(1, count, steps)) % count
    items, lines = [], []
    for mark, i, j in zip(marks, first.tolist(), second.tolist(), strict=False):
        row[i], row[j] = row[j], row[i]
        items.append(f"{mark}{i + 1}{j + 1}")
        lines.append(items[-1] + "".join(row))
    end = marks[-1] + END_OF_LIST
    return f"swap {start} {' '.join([*items, end])}", [*lines, end], "".join(row)


PERMUTATION = Task(
    name="permutation",
    summary="track five objects under swaps of two places",
    fewest=4,
    most=335,
    draw=_draw,
)
