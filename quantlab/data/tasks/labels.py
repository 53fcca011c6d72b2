"""Labels of listed items: pairs of letters in alphabetical order from a random first one.

A prompt lists its items as `ab+3 ac*7 ad.`: a label, what is to be done, and behind the last item a
label with a full stop. A solution takes the items in order and writes each one's label first. So
which item is next is told by the text alone, without counting: the label after the last one, and
what the prompt says behind it. That is what a model without absolute positions can do at any
length, and every step asks its state, or its attention, for one of up to hundreds of items.
"""

from __future__ import annotations

import numpy as np

LETTERS = "abcdefghijklmnopqrstuvwxyz"
DISTINCT = len(LETTERS) ** 2
END_OF_LIST = "."


def labels(generator: np.random.Generator, count: int) -> list[str]:
    """Draw `count` labels that follow one another, `zz` before `aa`.

    Raises:
        ValueError: more labels than there are.
    """
    if count > DISTINCT:
        raise ValueError(f"there are {DISTINCT} labels, asked for {count}")
    first = int(generator.integers(DISTINCT))
    numbers = [(first + i) % DISTINCT for i in range(count)]
    return [LETTERS[n // len(LETTERS)] + LETTERS[n % len(LETTERS)] for n in numbers]
