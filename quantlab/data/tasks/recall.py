"""Recall across a long derivation: values given once, used now and then, one asked for at the end.

The running sum needs a named value at every step, and the last line a value that no step has used:
it has to survive the whole derivation.

    sum mod 100 A52 B17 C33 D80 E21 F94 G66 H48 kxC kyA kz.F:
    kxC33+00=33
    kyA52+33=85
    kz.F94
    answer 85 94
"""

from __future__ import annotations

import numpy as np

from quantlab.data.tasks.labels import END_OF_LIST, labels
from quantlab.data.tasks.problem import Task

NAMES = "ABCDEFGH"
MODULUS = 100


def _draw(generator: np.random.Generator, steps: int) -> tuple[str, list[str], str]:
    values = generator.integers(10, 100, len(NAMES)).tolist()
    order = generator.permutation(len(NAMES)).tolist()
    asked, used = order[0], order[1:]
    marks = labels(generator, steps + 1)
    total, items, lines = 0, [], []
    for mark, pick in zip(marks, generator.integers(0, len(used), steps).tolist(), strict=False):
        name = used[pick]
        after = (total + values[name]) % MODULUS
        items.append(mark + NAMES[name])
        lines.append(f"{items[-1]}{values[name]}+{total:02d}={after:02d}")
        total = after
    table = " ".join(f"{NAMES[i]}{values[i]}" for i in range(len(NAMES)))
    end = marks[-1] + END_OF_LIST + NAMES[asked]
    prompt = f"sum mod {MODULUS} {table} {' '.join([*items, end])}"
    return prompt, [*lines, f"{end}{values[asked]}"], f"{total:02d} {values[asked]}"


RECALL = Task(
    name="recall",
    summary="sum named values, then recall one that no step has used",
    fewest=3,
    most=310,
    draw=_draw,
)
