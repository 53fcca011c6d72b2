"""Long addition: two numbers digit by digit with the carry, then the digits of the sum read back.

Least significant digits first. A digit of the sum stands behind its label in capitals, so that the
answer, written at the very end, asks for every one of them once more:

    add kx57 ky30 kz.:
    kx5+7+0=1KX2
    ky3+0+1=0KY4
    kz.KZ.0
    answer KX2KY4KZ.0
"""

from __future__ import annotations

import numpy as np

from quantlab.data.tasks.labels import END_OF_LIST, labels
from quantlab.data.tasks.problem import Task


def _draw(generator: np.random.Generator, steps: int) -> tuple[str, list[str], str]:
    marks = labels(generator, steps + 1)
    one, two = generator.integers(0, 10, (2, steps)).tolist()
    carry, items, digits, lines = 0, [], [], []
    for mark, a, b in zip(marks, one, two, strict=False):
        total = a + b + carry
        items.append(f"{mark}{a}{b}")
        digits.append(f"{mark.upper()}{total % 10}")
        lines.append(f"{mark}{a}+{b}+{carry}={total // 10}{digits[-1]}")
        carry = total // 10
    end = marks[-1] + END_OF_LIST
    digits.append(f"{end.upper()}{carry}")
    return f"add {' '.join([*items, end])}", [*lines, end + digits[-1]], "".join(digits)


ADDITION = Task(
    name="addition",
    summary="add two long numbers with carries, then read the sum back",
    fewest=3,
    most=240,
    draw=_draw,
)
