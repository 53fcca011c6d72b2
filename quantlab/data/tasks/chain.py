"""Modular-arithmetic chain: one running value, one operation a step."""

from __future__ import annotations

import numpy as np

from quantlab.data.tasks.problem import Task

MODULUS = 97
"""A prime of two digits: every operation is invertible and a value never gets stuck at 0."""
OPERATIONS = "+-*"


def _draw(generator: np.random.Generator, steps: int) -> tuple[str, list[str], str]:
    value = int(generator.integers(1, MODULUS))
    signs = generator.integers(0, len(OPERATIONS), steps)
    operands = generator.integers(2, 10, steps)
    listed, lines = [], []
    for sign, operand in zip(signs.tolist(), operands.tolist(), strict=True):
        operation = f"{OPERATIONS[sign]}{operand}"
        after = (value + operand, value - operand, value * operand)[sign] % MODULUS
        listed.append(operation)
        lines.append(f"{value}{operation}={after}")
        value = after
    start = lines[0].split(OPERATIONS[int(signs[0])])[0]
    return f"chain mod {MODULUS} from {start} {''.join(listed)}", lines, str(value)


CHAIN = Task(
    name="chain",
    summary="modular-arithmetic chain: start, then +, - or * a digit, mod 97",
    fewest=6,
    most=400,
    draw=_draw,
)
