"""RULER's tasks: what is asked is there, contexts are as long as asked for, nothing moves."""

import hashlib
import re
from collections import Counter

import pytest

from quantlab.data.ruler import RULER, SYNTHETIC, ruler_items, ruler_tasks
from quantlab.errors import UsageError


def words_of(text):
    """A tokenizer for tests: words and single signs."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def fitted(task, room=1400, count=3):
    return [item.fitted(room, words_of) for item in ruler_items(task, count)]


def context(item):
    return item.prompt.split("\n\n")[1]


def test_names():
    assert list(RULER) == list(ruler_tasks()) and len(RULER) == 13


@pytest.mark.parametrize("task", SYNTHETIC)
@pytest.mark.parametrize("room", [1400, 4000])
def test_contexts_fill_the_room(task, room):
    for item in fitted(task, room):
        length = words_of(item.prompt)
        assert length <= room
        # one unit of a haystack more would be too many; the longest is a long sentence
        assert length > room - 150
        assert len(set(item.references)) == len(item.references) > 0
        assert all(reference in context(item) for reference in item.references)


@pytest.mark.parametrize("task", SYNTHETIC)
def test_a_longer_context_asks_the_same(task):
    for short, long in zip(fitted(task, 1400), fitted(task, 4000), strict=True):
        assert short.references == long.references
        assert short.prompt.split("\n\n")[-1] == long.prompt.split("\n\n")[-1]
    questions = [item.prompt.split("\n\n")[-1] for item in fitted(task, 1400, 5)]
    texts = [context(item) for item in fitted(task, 1400, 5)]
    assert len(set(texts)) == 5 and (len(set(questions)) == 5 or "words are" in questions[0])


def test_needles_are_found_by_reading():
    """An answer by a reader that knows nothing of the generator."""
    for task in SYNTHETIC[:8]:
        for item in fitted(task):
            question = item.prompt.split("\n\n")[-1]
            names = re.search(r"s of (.*) does the text", question)[1].split(", ")
            said = re.findall(r"A secret \w+ of (\S+) is (\S+)\.", context(item))
            found = [value for name, value in said if name in names]
            assert sorted(found) == sorted(item.references)
    crowd = re.findall(r"A secret", context(fitted("ruler-multikey-2")[0]))
    assert len(crowd) > 50
    assert len(re.findall(r"A secret", context(fitted("ruler-multikey-1")[0]))) == 4


def test_variables_are_found_by_following():
    for item in fitted("ruler-variables"):
        value = re.search(r"value (\d+)", item.prompt.split("\n\n")[-1])[1]
        known = {}
        for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", context(item)):
            known[name] = known.get(source, source)
        assert sorted(n for n, v in known.items() if v == value) == sorted(item.references)
        assert len(item.references) == 5


@pytest.mark.parametrize("task, asked", [("ruler-common-words", 10), ("ruler-frequent-words", 3)])
@pytest.mark.parametrize("room", [1400, 4000])
def test_words_are_found_by_counting(task, asked, room):
    for item in fitted(task, room):
        counted = Counter(re.findall(r"[a-z]+", context(item))).most_common()
        assert {word for word, _ in counted[:asked]} == set(item.references)
        assert counted[asked - 1][1] > counted[asked][1]  # never in doubt


def test_draws_do_not_move():
    digest = hashlib.sha256()
    for task in SYNTHETIC:
        for item in fitted(task, 1400, 2):
            digest.update(item.prompt.encode())
    assert digest.hexdigest()[:16] == "43086f6d5cd5e792"


def test_scores_are_rulers():
    item = fitted("ruler-multiquery")[0]
    assert item.found(" and ".join(item.references[:3])) == item.references[:3]
    assert item.found("") == () and item.gold.count(", ") == 3
    upper = fitted("ruler-multikey-3")[0]
    assert upper.found(upper.gold.upper()) == upper.references


def test_no_room():
    with pytest.raises(UsageError, match="leaves 20 tokens"):
        ruler_items("ruler-single-1", 1)[0].fitted(20, words_of)
