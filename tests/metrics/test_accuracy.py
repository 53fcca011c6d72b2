"""Question-clustered means, Wilson intervals, and truncation as a class of its own."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from quantlab.metrics.accuracy import (
    accuracy,
    clustered,
    clustered_wilson,
    effective_size,
    question_means,
    wilson,
)


def test_equal_draws_of_a_question_add_nothing():
    once = clustered([1, 0, 1, 1], [0, 1, 2, 3])
    thrice = clustered([1, 0, 1, 1] * 3, [0, 1, 2, 3] * 3)
    assert thrice.mean == once.mean == 0.75
    assert thrice.se == pytest.approx(once.se, rel=1e-12)
    assert (thrice.questions, thrice.draws) == (4, 12)
    # the mutant: draws taken as a sample of 12
    assert np.std([1, 0, 1, 1] * 3, ddof=1) / math.sqrt(12) < 0.6 * thrice.se


def test_questions_weigh_the_same_whatever_their_draws():
    assert clustered([1, 1, 1, 0], [5, 5, 5, 9]).mean == 0.5
    ids, means = question_means([1, 0, 1], [9, 2, 9])
    assert ids.tolist() == [2, 9] and means.tolist() == [0.0, 1.0]


def test_without_a_sample_there_is_no_error_bar():
    assert math.isnan(clustered([], []).mean)
    assert math.isnan(clustered([1, 0], [3, 3]).se)
    assert all(math.isnan(x) for x in clustered_wilson(clustered([], [])))


@pytest.mark.parametrize("right, n", [(0, 1), (0, 30), (7, 10), (30, 30), (437, 512)])
def test_wilson_is_scipys(right, n):
    found = binomtest(right, n).proportion_ci(0.95, method="wilson")
    low, high = wilson(right / n, n)
    assert abs(low - found.low) < 1e-12 and abs(high - found.high) < 1e-12


def test_effective_size_lies_between_questions_and_draws():
    generator = np.random.default_rng(0)
    questions = np.repeat(np.arange(200), 4)
    same = np.repeat(generator.random(200) < 0.7, 4)
    free = generator.random(800) < 0.7
    assert effective_size(clustered(same, questions)) == pytest.approx(200, rel=0.01)
    assert effective_size(clustered(free, questions)) > 600
    assert effective_size(clustered(np.ones(800), questions)) == 200


def test_clustered_wilson_covers():
    """95 % of intervals hold the true accuracy, draws of a question being dependent."""
    generator = np.random.default_rng(1)
    questions = np.repeat(np.arange(120), 3)
    held = 0
    trials = 1000
    for _ in range(trials):
        # Beta(0.6, 0.3): most questions nearly always right or wrong; mean 2/3
        skill = np.repeat(generator.beta(0.6, 0.3, 120), 3)
        low, high = clustered_wilson(clustered(generator.random(360) < skill, questions))
        held += low <= 2 / 3 <= high
    # 0.95 ± 4 standard errors of 1,000 trials; an interval over draws would hold about 83 %
    assert abs(held / trials - 0.95) < 4 * math.sqrt(0.95 * 0.05 / trials)


def test_a_lucky_truncated_answer_is_wrong():
    found = accuracy([True, True, False], [False, True, False], [0, 1, 2])
    assert found.strict.mean == pytest.approx(1 / 3)
    assert found.as_graded.mean == pytest.approx(2 / 3)
    assert found.finished_only.mean == 0.5 and found.finished_only.questions == 2
    assert found.truncated.mean == pytest.approx(1 / 3)


def test_nothing_finished():
    found = accuracy([True, False], [True, True], [0, 1])
    assert found.strict.mean == 0 and found.truncated.mean == 1
    assert math.isnan(found.finished_only.mean)
