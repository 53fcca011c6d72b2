"""Permutation tracking: five objects in a row, two of them swapped at every step."""

from __future__ import annotations

import numpy as np

from quantlab.data.tasks.problem import Task

OBJECTS = 5


def _draw(generator: np.random.Generator, steps: int) -> tuple[str, list[str], str]:
    row = [chr(ord("a") + i) for i in generator.permutation(OBJECTS).tolist()]
    start = "".join(row)
    first = generator.integers(0, OBJECTS, steps)
    # another place, each equally likely
    second = (first + generator.integers(1, OBJECTS, steps)) % OBJECTS
    swaps, lines = [], []
    for i, j in zip(first.tolist(), second.tolist(), strict=True):
        row[i], row[j] = row[j], row[i]
        swaps.append(f"{i + 1}{j + 1}")
        lines.append(f"{swaps[-1]} {''.join(row)}")
    return f"swap {start} {' '.join(swaps)}", lines, "".join(row)


PERMUTATION = Task(
    name="permutation",
    summary="track five objects under swaps of two places",
    fewest=5,
    most=400,
    draw=_draw,
)
