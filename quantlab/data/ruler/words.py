"""Words, prose and noise that contexts are made of."""

from __future__ import annotations

import lzma
import re
from collections import Counter
from functools import cache
from itertools import pairwise

import numpy as np

from quantlab.data.manifest import STREAMS_DIRECTORY

NOISE = (
    "The field lies quiet.", "Clouds drift over the hill.", "The river runs on.",
    "Here we come again.", "There and back.",
)  # fmt: skip
"""Sentences that say nothing; a unit of noise is all of them."""
SHORTEST, LONGEST = 4, 10
"""Letters of a word that counts as one."""


@cache
def sentences() -> tuple[str, ...]:
    """Sentences of the packaged books, in order."""
    found: list[str] = []
    for path in sorted(STREAMS_DIRECTORY.glob("*.txt.xz")):
        text = " ".join(lzma.decompress(path.read_bytes()).decode("utf-8").split())
        found += [s for s in re.split(r"(?<=[.!?])\s+(?=[A-Z])", text) if 20 <= len(s) <= 400]
    return tuple(found)


@cache
def vocabulary() -> tuple[str, ...]:
    """Lower-case words of the books, the most frequent first."""
    words = re.findall(r"\b[a-z]+\b", " ".join(sentences()))
    counted = Counter(w for w in words if SHORTEST <= len(w) <= LONGEST)
    return tuple(sorted(counted, key=lambda w: (-counted[w], w)))


def names(generator: np.random.Generator, count: int) -> list[str]:
    """Draw names of two words each, all different."""
    known = vocabulary()
    found: dict[str, None] = {}
    while len(found) < count:
        one, two = generator.integers(0, len(known), 2)
        found.setdefault(f"{known[one]}-{known[two]}")
    return list(found)


def number(generator: np.random.Generator) -> str:
    """Draw a number of seven digits."""
    return str(generator.integers(1_000_000, 10_000_000))


def identifier(generator: np.random.Generator) -> str:
    """Draw 128 bits, written as identifiers are: 8-4-4-4-12 hexadecimal digits."""
    digits = generator.bytes(16).hex()
    cuts = (0, 8, 12, 16, 20, 32)
    return "-".join(digits[a:b] for a, b in pairwise(cuts))


def made_up(generator: np.random.Generator, count: int) -> list[str]:
    """Draw words that no language has, of three syllables, all different."""
    found: dict[str, None] = {}
    while len(found) < count:
        at = generator.integers(0, (17, 5) * 3)
        found.setdefault("".join("bcdfgjklmnprstvwz"[c] + "aeiou"[v] for c, v in at.reshape(3, 2)))
    return list(found)
