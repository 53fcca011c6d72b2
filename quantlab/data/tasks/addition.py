"""Long addition: two numbers digit by digit with the carry, least significant digit first."""

from __future__ import annotations

import numpy as np

from quantlab.data.tasks.problem import Task


def _draw(generator: np.random.Generator, steps: int) -> tuple[str, list[str], str]:
    one, two = generator.integers(0, 10, (2, steps)).tolist()
    carry, digits, lines = 0, [], []
    for a, b in zip(one, two, strict=True):
        total = a + b + carry
        lines.append(f"{a}+{b}+{carry}={total}")
        digits.append(total % 10)
        carry = total // 10
    if carry:
        digits.append(carry)

    def written(number: list[int]) -> str:
        return "".join(map(str, number))

    # all numbers least significant digit first, the answer too
    return f"add {written(one)} {written(two)}", lines, written(digits)


ADDITION = Task(
    name="addition",
    summary="add two long numbers with carries, least significant digit first",
    fewest=5,
    most=300,
    draw=_draw,
)
