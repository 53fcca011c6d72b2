"""Every public report of CASES.md that this package answers has a test of its name."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LISTED = re.findall(r"^\| ([A-F]\d\d) \|", (TESTS / "CASES.md").read_text("utf-8"), re.MULTILINE)
SOURCES = "\n".join(path.read_text("utf-8") for path in TESTS.rglob("test_*.py"))
NAMED = re.findall(r"^def test_([A-F]\d\d)_", SOURCES, re.MULTILINE)


@pytest.mark.parametrize("case", [case for case in LISTED if case[0] in "ABCD"])
def test_report_has_a_test(case):
    assert case in NAMED


def test_ids_are_those_of_the_table():
    assert len(LISTED) == len(set(LISTED)) and len([c for c in LISTED if c[0] in "ABCD"]) == 47
    assert set(NAMED) <= set(LISTED)
