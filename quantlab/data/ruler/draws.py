"""Draws of RULER's tasks, keyed by task and index alone, and places of needles."""

from __future__ import annotations

import zlib

import numpy as np


def generator_of(task: str, index: int, part: int) -> np.random.Generator:
    """Return the generator of one part of a question."""
    key = np.array([zlib.crc32(task.encode()), index << 8 | part], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def among(generator: np.random.Generator, hay: list[str], needles: list[str]) -> list[str]:
    """Put needles into a haystack at places even over it, in their order."""
    places = np.sort(generator.random(len(needles))) * (len(hay) + 1)
    parts: list[str] = []
    at = 0
    for place, needle in zip(places.astype(int).tolist(), needles, strict=True):
        parts += [*hay[at:place], needle]
        at = place
    return [*parts, *hay[at:]]
