"""Philox-4x32-10 against Random123's known answers."""

import json
from pathlib import Path

import pytest
import torch

from quantlab.formats.philox import philox4x32, sr_words

KNOWN = json.loads((Path(__file__).parents[1] / "reference" / "philox4x32.json").read_text())


@pytest.mark.parametrize("case", KNOWN["vectors"], ids=["zeros", "ones", "pi"])
def test_known_answers(case: dict[str, list[str]]) -> None:
    counter = tuple(torch.tensor([int(w, 16)]) for w in case["counter"])
    key = tuple(int(w, 16) for w in case["key"])
    words = philox4x32(counter, key, rounds=10)  # type: ignore[arg-type]
    assert [int(w) for w in words] == [int(w, 16) for w in case["words"]]


def test_counter_layout() -> None:
    """The word of an element is philox((element // 4, flush, stream, layer + 2^24 copy))[e % 4]."""
    words = sr_words(
        seed=-(1 << 40) + 3, layer=5, copy=1, stream=torch.tensor([9, 2]), flush=7,
        heads=2, dv=3, dk=5,
    )  # fmt: skip
    assert words.shape == (2, 2, 3, 5) and words.dtype == torch.int64
    key = ((-(1 << 40) + 3) & 0xFFFFFFFF, ((-(1 << 40) + 3) >> 32) & 0xFFFFFFFF)
    for row, stream in enumerate((9, 2)):
        for head, v, k in [(0, 0, 0), (0, 0, 1), (1, 2, 4), (1, 0, 3)]:
            element = (head * 3 + v) * 5 + k
            counter = tuple(torch.tensor([c]) for c in (element // 4, 7, stream, 5 + (1 << 24)))
            one = philox4x32(counter, key)[element % 4]  # type: ignore[arg-type]
            assert int(words[row, head, v, k]) == int(one)
