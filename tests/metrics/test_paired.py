"""Paired changes: exact tests, intervals that cover, verdicts that do not overclaim."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from quantlab.metrics.paired import bootstrap_mean, change, flips, mcnemar, shared


def discordant(lost, gained, n):
    """A reference and a policy with given discordant counts, one draw a question."""
    reference = np.arange(n) < n - gained
    policy = ~(np.arange(n) < lost)
    return reference, policy, np.arange(n)


@pytest.mark.parametrize("lost, gained", [(0, 0), (1, 0), (12, 5), (40, 41), (0, 9)])
def test_mcnemar_is_the_binomial_test(lost, gained):
    total = lost + gained
    want = binomtest(lost, total, 0.5).pvalue if total else 1.0
    assert mcnemar(lost, gained) == pytest.approx(want, abs=1e-12)
    found = change(*discordant(lost, gained, 200))
    assert (found.lost, found.gained) == (lost, gained)
    assert found.p == pytest.approx(want, abs=1e-12)


def test_repetitions_do_not_multiply_the_evidence():
    a, b, ids = discordant(12, 5, 200)
    once = change(a, b, ids)
    thrice = change(np.tile(a, 3), np.tile(b, 3), np.tile(ids, 3))
    assert thrice.p == once.p and thrice.difference == once.difference
    assert thrice.se == pytest.approx(once.se, rel=1e-12)
    assert (thrice.lost, thrice.pairs) == (36, 600)
    # the mutant: McNemar over draws
    assert mcnemar(36, 15) < 0.01 < once.p


def test_identical_runs_change_nothing():
    a = np.arange(600) % 5 > 0
    found = change(a, a, np.arange(600))
    assert found.difference == found.se == found.low == found.high == 0
    assert found.p == 1 and found.verdict == "equivalent"


def test_few_questions_prove_no_equivalence():
    a = np.ones(20, bool)
    assert change(a, a, np.arange(20)).verdict == "inconclusive"


def test_verdicts():
    def verdict(lost, gained, n=2000):
        return change(*discordant(lost, gained, n)).verdict

    assert verdict(60, 10) == "worse"
    assert verdict(10, 60) == "better"
    assert verdict(1, 0) == "equivalent"
    # significant and within a point: the change is real and too small to matter
    small = change(*discordant(9, 0, 2000))
    assert small.p < 0.05 and small.verdict == "equivalent"
    assert verdict(60, 50) == "inconclusive"


def test_equivalence_errs_at_its_rate():
    """Of policies that are a whole margin worse at most 5 % are called equivalent."""
    generator = np.random.default_rng(2)
    n, trials, called = 1000, 600, 0
    for _ in range(trials):
        draw = generator.random(n)
        a = draw >= 0.02  # wrong, right for the policy: gained 2 %
        b = (draw < 0.02) | (draw >= 0.05)  # lost 3 %
        called += change(a, b, np.arange(n), margin=0.01).verdict == "equivalent"
    assert called / trials < 0.05 + 4 * math.sqrt(0.05 * 0.95 / trials)
    # a margin without power would pass as well: equal policies must be recognised
    passed = sum(
        change(*discordant(*generator.multinomial(4000, [0.01, 0.01, 0.98])[:2], 4000)).verdict
        == "equivalent"
        for _ in range(100)
    )
    assert passed > 90


def test_bootstrap_agrees_with_resampling_entries():
    values = np.random.default_rng(3).choice([-1.0, -1 / 3, 0.0, 1 / 3, 1.0], 90)
    low, high = bootstrap_mean(values)
    generator = np.random.default_rng(4)
    means = generator.choice(values, (10_000, 90)).mean(1)
    # Monte-Carlo error of a 2.5 % point of 10,000 means is about 0.03 standard errors
    tolerance = 0.15 * values.std() / math.sqrt(90)
    assert abs(low - np.quantile(means, 0.025)) < tolerance
    assert abs(high - np.quantile(means, 0.975)) < tolerance
    assert bootstrap_mean(values) == (low, high)
    assert all(math.isnan(x) for x in bootstrap_mean(values[:1]))


def test_only_shared_draws_are_paired():
    first = (np.array([3, 1, 1, 2]), np.array([0, 0, 1, 0]))
    second = (np.array([1, 2, 1, 9]), np.array([1, 0, 0, 0]))
    left, right = shared(first, second)
    assert left.tolist() == [1, 2, 3] and right.tolist() == [2, 0, 1]
    with pytest.raises(ValueError, match="twice"):
        shared((np.array([1, 1]), np.array([0, 0])), second)


def test_flips_count_both_ways():
    assert flips([1, 0, 1, 0], [0, 1, 1, 0]) == 0.5


def test_refuses_what_is_no_pairing():
    with pytest.raises(ValueError, match="equal lengths"):
        change([True], [True, False], [0, 1])
    with pytest.raises(ValueError, match="positive"):
        change([True], [True], [0], margin=0.0)
