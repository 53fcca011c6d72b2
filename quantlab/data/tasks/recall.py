"""Recall across a long derivation: values given once, used now and then, one asked for at the end.

The running sum needs a named value at every step, and the last line a value that no step has used:
it has to survive the whole derivation.
"""

from __future__ import annotations

import numpy as np

from quantlab.data.tasks.problem import Task

NAMES = "abcdefgh"
MODULUS = 100


def _draw(generator: np.random.Generator, steps: int) -> tuple[str, list[str], str]:
    values = generator.integers(10, 100, len(NAMES)).tolist()
    order = generator.permutation(len(NAMES)).tolist()
    asked, used = order[0], order[1:]
    total, lines, uses = 0, [], []
    for pick in generator.integers(0, len(used), steps).tolist():
        name = used[pick]
        after = (total + values[name]) % MODULUS
        uses.append(NAMES[name])
        lines.append(f"{NAMES[name]} {total}+{values[name]}={after}")
        total = after
    table = " ".join(f"{NAMES[i]}{values[i]}" for i in range(len(NAMES)))
    prompt = f"sum mod {MODULUS} {table} use {''.join(uses)} then {NAMES[asked]}"
    return prompt, lines, f"{total} {values[asked]}"


RECALL = Task(
    name="recall",
    summary="sum named values, then recall one that no step has used",
    fewest=4,
    most=300,
    draw=_draw,
)
