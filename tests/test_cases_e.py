"""Public reports on long-generation evaluation, by id: each test is the right behaviour."""

import math

import numpy as np
import pytest

from quantlab.data.benchmarks.extraction import Thinking, final_text, last_box
from quantlab.metrics.accuracy import accuracy, clustered
from quantlab.metrics.paired import change


def test_E01_truncated_answers_are_a_class_of_their_own():
    """Ten items: four truncated, one of them luckily right, six finished and right."""
    truncated = [True] * 4 + [False] * 6
    graded = [True] + [False] * 3 + [True] * 6
    found = accuracy(graded, truncated, range(10))
    assert found.strict.mean == pytest.approx(0.60)
    assert found.finished_only.mean == 1.00
    assert found.truncated.mean == pytest.approx(0.40)
    assert found.as_graded.mean == pytest.approx(0.70)


@pytest.mark.parametrize("opened", [False, True])
def test_E02_unfinished_reasoning_has_no_answer(opened):
    """Cut at the limit before the closing tag: 42 on the way is not the answer 42."""
    thinking = Thinking(open="<think>", close="</think>", opened=opened)
    output = "so \\boxed{42} maybe" if opened else "<think> so \\boxed{42} maybe"
    assert final_text(output, thinking) is None
    finished = final_text(output + "</think> it is \\boxed{42}", thinking)
    assert finished is not None and last_box(finished) == "42"


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"\boxed{2} wait \boxed{3}", "3"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{840} and again \boxed{840}", "840"),
        (r"\boxed{12", None),
        (r"\boxed{7} then \boxed{12", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a \} b}", r"a \} b"),
        ("no box", None),
    ],
)
def test_E04_last_complete_balanced_box(text, answer):
    assert last_box(text) == answer


def test_E07_paired_test_and_an_honest_verdict():
    """b = 12, c = 5 of 512: p = 0.1435, 1.37 points, paired SE 0.80, inconclusive at a point."""
    n = 512
    reference = np.arange(n) < 437
    policy = (np.arange(n) >= 12) & (np.arange(n) < 442)
    found = change(reference, policy, np.arange(n), margin=0.01)
    assert (found.lost, found.gained) == (12, 5)
    assert round(found.p, 4) == 0.1435
    assert round(-100 * found.difference, 2) == 1.37
    assert round(100 * found.se, 2) == 0.80
    assert found.verdict == "inconclusive"
    assert found.low < 0 < found.high
    # the report's unpaired error of 2.2 points would have hidden even more
    unpaired = math.hypot(reference.std(), policy.std()) / math.sqrt(n)
    assert 2.2 < 100 * unpaired < 2.3


def test_E08_many_draws_of_few_questions():
    """30 questions × 16 draws: the error comes from 30 means, not from 480 draws."""
    generator = np.random.default_rng(8)
    questions = np.repeat(np.arange(30), 16)
    skill = np.repeat(generator.beta(0.5, 0.9, 30), 16)
    right = generator.random(480) < skill
    found = clustered(right, questions)
    means = right.reshape(30, 16).mean(1)
    assert found.se == pytest.approx(means.std(ddof=1) / math.sqrt(30), rel=1e-12)
    assert (found.questions, found.draws) == (30, 480)
    assert found.se > 2 * right.std() / math.sqrt(480)
