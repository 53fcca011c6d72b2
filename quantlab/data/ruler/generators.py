"""How RULER's synthetic tasks are made: what a context of so many units says, and what is asked.

A question's draws are keyed by task and index alone, and a longer haystack keeps what a shorter one
has: names, values and their order do not depend on the length.

Source of the tasks and their settings: Hsieh et al. 2024, "RULER: What's the Real Context Size of
Your Long-Context Language Models?", arXiv 2404.06654, sections 3 and B.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from quantlab.data.ruler import words
from quantlab.data.ruler.draws import among, generator_of
from quantlab.data.ruler.item import Builder, Built


def _hay(kind: str, index: int, units: int) -> list[str]:
    if kind == "noise":
        return list(words.NOISE) * units
    prose = words.sentences()
    # another piece of the books for every question
    first = int(generator_of("prose", index, 0).integers(len(prose)))
    return [prose[(first + i) % len(prose)] for i in range(units)]


def needle(task: str, index: int, settings: Mapping[str, Any]) -> Builder:
    """Hide values by name in a haystack; some are asked for."""
    what = settings.get("values", "number")
    draw = {"number": words.number, "identifier": words.identifier}[what]
    keys, each = settings.get("keys", 1), settings.get("values_each", 1)
    asked = settings.get("asked", 1)

    def say(name: str, value: str) -> str:
        return f"A secret {what} of {name} is {value}."

    def build(units: int) -> Built:
        generator = generator_of(task, index, 0)
        crowd = settings["haystack"] == "needles"
        wanted = [_name(settings, generator) for _ in range(keys)]
        values = [[draw(generator) for _ in range(each)] for _ in wanted]
        said = [say(n, v) for n, own in zip(wanted, values, strict=True) for v in own]
        order = generator.permutation(len(said)).tolist()
        if crowd:
            others = generator_of(task, index, 1)
            hay = [say(_name(settings, others), draw(others)) for _ in range(units)]
        else:
            hay = _hay(settings["haystack"], index, units)
        # the place of a needle is drawn apart, so that it does not move with the others' draws
        text = " ".join(among(generator_of(task, index, 2), hay, [said[i] for i in order]))
        names = ", ".join(wanted[:asked])
        question = f"Which secret {what}s of {names} does the text state? Answer with them alone."
        prompt = f"Remember the secret {what}s in this text.\n\n{text}\n\n{question}"
        return prompt, tuple(v for own in values[:asked] for v in own)

    return build


def _name(settings: Mapping[str, Any], generator: np.random.Generator) -> str:
    if settings.get("names") == "identifier":
        return words.identifier(generator)
    return words.names(generator, 1)[0]


def variables(task: str, index: int, settings: Mapping[str, Any]) -> Builder:
    """Assign a value from variable to variable; asked is which ones have it in the end."""

    def build(units: int) -> Built:
        generator = generator_of(task, index, 0)
        letters = generator.integers(0, 26, (settings["hops"] + 1, 5))
        named = ["".join(chr(ord("A") + c) for c in row) for row in letters.tolist()]
        value = str(generator.integers(10_000, 100_000))
        said = [f"VAR {named[0]} = {value}."]
        said += [f"VAR {b} = VAR {a}." for a, b in pairwise(named)]
        hay = _hay(settings["haystack"], index, units)
        text = " ".join(among(generator_of(task, index, 2), hay, said))
        prompt = (
            f"Follow the assignments of variables in this text.\n\n{text}\n\n"
            f"Which variables have the value {value}? Answer with their names alone."
        )
        return prompt, tuple(named)

    return build


def common_words(task: str, index: int, settings: Mapping[str, Any]) -> Builder:
    """List words, some often and most of them seldom; a unit is one seldom word."""

    def build(units: int) -> Built:
        known = words.vocabulary()
        order = generator_of(task, index, 0).permutation(len(known))
        common = [known[i] for i in order[: settings["common"]].tolist()]
        seldom = [known[order[(settings["common"] + i) % len(known)]] for i in range(units)]
        listed = common * settings["often"] + seldom * settings["seldom"]
        mixed = [listed[i] for i in generator_of(task, index, 1).permutation(len(listed)).tolist()]
        text = " ".join(f"{i}. {word}" for i, word in enumerate(mixed, 1))
        prompt = (
            f"Remember how often words are in this list.\n\n{text}\n\n"
            f"Which {settings['common']} words are there most often? Answer with them alone."
        )
        return prompt, tuple(common)

    return build


def frequent_words(task: str, index: int, settings: Mapping[str, Any]) -> Builder:
    """List made-up words whose frequencies fall by a power law; a unit is ten of them."""

    def build(units: int) -> Built:
        generator = generator_of(task, index, 0)
        known = words.made_up(generator, 500)
        weight = np.arange(1, len(known) + 1, dtype=np.float64) ** -settings["alpha"]
        asked = settings["asked"]
        shares = 10 * units * weight / weight.sum()
        # not drawn, and rounded apart, so that at any length the words asked for are the first
        counts = np.where(np.arange(len(known)) < asked, np.ceil(shares), np.floor(shares))
        listed = [w for w, n in zip(known, counts.astype(int), strict=True) for _ in range(n)]
        mixed = [listed[i] for i in generator_of(task, index, 1).permutation(len(listed)).tolist()]
        prompt = (
            f"Remember how often each coded word is in this text.\n\n{' '.join(mixed)}\n\n"
            f"Which {asked} coded words are there most often? Answer with them alone."
        )
        return prompt, tuple(known[:asked])

    return build


KINDS: Mapping[str, Callable[[str, int, Mapping[str, Any]], Builder]] = {
    "needle": needle,
    "variables": variables,
    "common words": common_words,
    "frequent words": frequent_words,
}
"""Generators by the `kind` of the manifest."""
