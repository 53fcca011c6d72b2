"""Loops and collapses: found where they begin, never in clean text."""

import lzma
from pathlib import Path

import numpy as np
import pytest

from quantlab.data.manifest import STREAMS_DIRECTORY
from quantlab.metrics.collapse import collapse

TEXT = [
    np.frombuffer(lzma.decompress(path.read_bytes()), np.uint8)
    for path in sorted(Path(STREAMS_DIRECTORY).glob("*.xz"))
]


def test_no_false_alarm_on_a_thousand_clean_texts():
    generator = np.random.default_rng(0)
    for i in range(1000):
        book = TEXT[i % len(TEXT)]
        size = int(generator.integers(50, 4000))
        start = int(generator.integers(0, len(book) - size))
        assert collapse(book[start : start + size].tolist()) is None, (i, start, size)


@pytest.mark.parametrize("period", [1, 2, 7, 40, 300, 512])
def test_a_loop_is_found_where_it_begins(period):
    generator = np.random.default_rng(period)
    clean = TEXT[0][:700].tolist()
    block = generator.permutation(600)[:period].tolist()
    repeats = max(9, 200 // period)
    found = collapse(clean + block * repeats)
    assert found is not None and found.period == period
    assert found.kind == ("run" if period == 1 else "loop")
    # the text before may end in the block's last tokens by chance
    assert 700 - 2 <= found.start <= 700
    # a part of the block at the end changes nothing
    cut = collapse(clean + block * repeats + block[: period // 2])
    assert cut is not None and cut.period == period


def test_a_loop_that_ended_is_none():
    assert collapse([1, 2] * 200 + list(range(50))) is None


def test_tables_and_rules_are_text():
    rule = b"-" * 100
    table = b"\n".join([b"| 0 | 0 | 0 |"] * 7)
    assert collapse(list(b"a heading\n" + rule)) is None
    assert collapse(list(b"a heading\n" + table)) is None


def test_ids_without_text():
    found = collapse([5, 6, 7] + [2, 0] * 5, no_text=(0, 2))
    assert found is not None and (found.kind, found.start) == ("no text", 3)
    assert collapse([5, 2, 6, 2], no_text=(0, 2)) is None
    assert collapse([]) is None and collapse([3]) is None
