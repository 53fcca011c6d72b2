"""Modular-arithmetic chain: one running value, one operation a step.

A problem and its solution:

    chain mod 97 from 05 kx+3 ky*7 kz.:
    kx05+3=08
    ky08*7=56
    kz.
    answer 56
"""

from __future__ import annotations

import numpy as np

from quantlab.data.tasks.labels import END_OF_LIST, labels
from quantlab.data.tasks.problem import Task

MODULUS = 97
"""A prime of two digits: every operation is invertible and a value never gets stuck at 0."""
OPERATIONS = "+-*"


def _draw(generator: np.random.Generator, steps: int) -> tuple[str, list[str], str]:
    start = value = int(generator.integers(1, MODULUS))
    marks = labels(generator, steps + 1)
    signs = generator.integers(0, len(OPERATIONS), steps).tolist()
    operands = generator.integers(2, 10, steps).tolist()
    items, lines = [], []
    for mark, sign, operand in zip(marks, signs, operands, strict=False):
        operation = f"{OPERATIONS[sign]}{operand}"
        after = (value + operand, value - operand, value * operand)[sign] % MODULUS
        items.append(mark + operation)
        lines.append(f"{mark}{value:02d}{operation}={after:02d}")
        value = after
    end = marks[-1] + END_OF_LIST
    prompt = f"chain mod {MODULUS} from {start:02d} {' '.join([*items, end])}"
    return prompt, [*lines, end], f"{value:02d}"


CHAIN = Task(
    name="chain",
    summary="modular-arithmetic chain: start, then +, - or * a digit, mod 97",
    fewest=4,
    most=335,
    draw=_draw,
)
