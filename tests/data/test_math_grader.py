"""Grading in killable workers: right where it should be, never hanging, gone when closed."""

import math
import multiprocessing
import time

import pytest

from quantlab.data.benchmarks.math_grader import LONGEST, MathGrader
from quantlab.errors import MissingAsset

pytest.importorskip("math_verify")

WORKERS, TIMEOUT = 2, 3.0


@pytest.fixture(scope="module")
def grader():
    with MathGrader(workers=WORKERS, timeout=TIMEOUT) as found:
        found.grade([("1", "2"), ("1", "2")])  # both started
        yield found


def hostile():
    """A hundred answers that break parsers: unbalanced, endless, astronomically large, deep."""
    bad = [
        "9" * 1_000_000, "9" * (LONGEST - 1), "1." + "3" * (LONGEST - 3), "-" * 1900, "(" * 1900,
        "{" * 1900, "\\frac{" * 300, "\\sqrt{" * 300, "\\frac{1}{" * 200 + "2" + "}" * 199,
        "\\left(" * 250, "x^{" * 500, "10^{10^{10}}", "9^{9^{9^{9}}}", "2^{2^{2^{2^{2^{2}}}}}",
        "7^{7^{7^{7}}} - 1", "99999999!", "(10^{9})!", "((100!)!)!", "\\binom{10^9}{10^8}",
        "\\sum_{n=1}^{10^{12}} \\frac{1}{n^n}", "\\prod_{k=1}^{10^8} k",
        "\\int_0^1 x^{x^{x^{x}}} dx", "\\int e^{\\sin(x^2)} \\log(\\tan(x)) dx",
        "\\lim_{n \\to \\infty} n^{n^n}", "(x+y+z+w)^{500}", "(1+x)^{10^6}",
        "\\sqrt[10^9]{2}", "\\sin(10^{10^{5}})", "\\log_{10^{-300}}(10^{10^4})",
        "1" + "+1" * 900, "x" + "\\cdot x" * 250, "\\frac{0}{0}", "\\infty - \\infty", "nan", "",
        " ", "\x00\x01\x02", "\\", "$" * 50, "\\boxed{" * 50, "}" * 100, "\\end{matrix}",
        "\\begin{pmatrix}" + "1 & " * 400, "\\text{" * 100, "\u202e12\u202c",
        "١٢٣", "１２", "😀" * 300,
        "lambda: 0", "__import__('os').system('true')",
    ]  # fmt: skip
    return bad + [f"{{{text[: LONGEST - 10]}}}^{{{text[:40]}}}" for text in bad]


@pytest.mark.parametrize(
    "few", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_hostile_answers_do_not_hang(grader, few):
    answers = hostile()
    assert len(answers) == 100
    answers = answers[:12:2] if few else answers
    begun = time.monotonic()
    found = grader.grade([("12", answer) for answer in answers])
    seconds = time.monotonic() - begun
    print({v: found.count(v) for v in set(found)}, f"{seconds:.0f} s")  # noqa: T201
    assert len(found) == len(answers) and set(found) <= {"right", "wrong", "timeout", "error"}
    # replacing a killed worker takes seconds too: at most as many as answers that timed out
    assert seconds < TIMEOUT * math.ceil(len(answers) / WORKERS) + 5
    # 12 written in other scripts' digits may be read as 12; nothing else here is
    assert found.count("right") <= 4
    # and the pool still works
    assert grader.grade([("\\frac12", "0.5")]) == ["right"]


@pytest.mark.parametrize(
    "gold, answer, verdict",
    [
        ("\\frac{1}{2}", "\\frac12", "right"),
        ("\\frac{1}{2}", "0.5", "right"),
        ("2\\sqrt{3}", "\\sqrt{12}", "right"),
        ("1200", "1,200", "right"),
        ("(1,2)", "(1, 2)", "right"),
        ("(1,2)", "(2,1)", "wrong"),
        ("x+1", "1+x", "right"),
        ("7", "8", "wrong"),
        ("840", "840840", "wrong"),
        ("42", "", "wrong"),
        ("3", " 3 ", "right"),
    ],
)
def test_verdicts(grader, gold, answer, verdict):
    assert grader.grade([(gold, answer)]) == [verdict]


def test_order_is_kept(grader):
    pairs = [(str(i), str(i if i % 3 else i + 1) + ".0") for i in range(30)]
    assert grader.grade(pairs) == ["right" if i % 3 else "wrong" for i in range(30)]


def test_closed_pools_leave_no_process():
    before = set(multiprocessing.active_children())
    with MathGrader(workers=1, timeout=1.0) as pool:
        assert pool.grade([("1", "1.0")]) == ["right"]
    assert set(multiprocessing.active_children()) <= before


def test_without_math_verify(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingAsset, match=r"quantlab\[eval\]"):
        MathGrader()
