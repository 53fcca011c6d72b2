"""Bins by FP32 length, and what the protocol's two FP32 runs are for."""

import math

import numpy as np
import pytest

from quantlab.metrics.bins import by_bin, log_bins, quantile_bins
from quantlab.metrics.paired import change


def test_quartiles_hold_equally_many():
    lengths = np.random.default_rng(0).permutation(np.arange(100, 500))
    bins = quantile_bins(lengths)
    assert [len(b.members) for b in bins] == [100] * 4
    assert [(b.low, b.high) for b in bins] == [(100, 199), (200, 299), (300, 399), (400, 499)]
    assert [b.median for b in bins] == [149.5, 249.5, 349.5, 449.5]
    for b in bins:
        assert lengths[b.members].min() == b.low and lengths[b.members].max() == b.high


def test_equal_lengths_share_a_bin():
    bins = quantile_bins([7] * 50 + [9] * 50)
    assert [(b.low, b.high, len(b.members)) for b in bins] == [(7, 7, 50), (9, 9, 50)]
    assert len(quantile_bins([5, 5, 5])) == 1


def test_log_bins_end_below_powers():
    lengths = [0, 1, 2, 3, 4, 7, 8, 1023, 1024, 2**29 - 1, 2**29]
    bins = log_bins(lengths)
    assert [(b.low, b.high) for b in bins] == [
        (0, 1), (2, 3), (4, 7), (8, 8), (1023, 1023), (1024, 1024),
        (2**29 - 1, 2**29 - 1), (2**29, 2**29),
    ]  # fmt: skip
    assert sorted(i for b in bins for i in b.members) == list(range(len(lengths)))


def test_bins_of_nothing_are_refused():
    for make in (quantile_bins, log_bins):
        with pytest.raises(ValueError, match="lengths"):
            make([])
    with pytest.raises(ValueError, match="base"):
        log_bins([1], base=1.0)


def test_by_bin_keeps_truncation_apart():
    bins = quantile_bins([1, 2, 10, 20], count=2)
    short, long = by_bin(bins, [1, 1, 1, 0], [0, 0, 1, 0], [0, 1, 2, 3])
    assert short.accuracy.strict.mean == 1 and short.high == 1 and 0.2 < short.low < 0.5
    assert long.accuracy.strict.mean == 0 and long.accuracy.as_graded.mean == 0.5
    assert long.accuracy.truncated.mean == 0.5


class World:
    """Questions of a benchmark: how hard they are, how long their answers, draw by draw.

    Within a question a long draw is more often wrong, as with real reasoning models.
    """

    def __init__(self, seed, questions=160, repetitions=3):
        self.generator = np.random.default_rng(seed)
        self.questions = np.repeat(np.arange(questions), repetitions)
        self.scale = np.repeat(self.generator.lognormal(6, 0.7, questions), repetitions)
        self.skill = np.repeat(self.generator.normal(1.2, 1.0, questions), repetitions)

    def run(self):
        luck = self.generator.normal(size=len(self.questions))
        lengths = np.maximum(1, self.scale * np.exp(0.5 * luck)).astype(int)
        p = 1 / (1 + np.exp(-(self.skill - 0.7 * np.log(self.scale / 400) - 0.8 * luck)))
        return lengths, self.generator.random(len(p)) < p


def covered(pick, trials=250):
    """How often the 95 % interval of run B minus run C covers zero in the longest quartile.

    All runs are of one law, so nothing has changed. `pick` says whose lengths define the bins.
    """
    held = total = 0
    for seed in range(trials):
        world = World(seed)
        runs = [world.run() for _ in range(3)]
        bins = quantile_bins(pick(runs))
        for b in (bins[0], bins[-1]):
            ids = world.questions[b.members]
            found = change(runs[1][1][b.members], runs[2][1][b.members], ids)
            held += abs(found.difference) <= 1.97 * found.se
            total += 1
    return held / total, math.sqrt(0.95 * 0.05 / total)


def test_two_fp32_runs_differ_by_nothing_in_every_bin():
    """Another run's lengths define the bins: the interval covers zero 95 % of the time."""
    rate, error = covered(lambda runs: runs[0][0])
    assert abs(rate - 0.95) < 4 * error


def test_bins_from_one_of_the_compared_runs_select_its_luck():
    """The mutant that the first FP32 run is there to avoid."""
    rate, error = covered(lambda runs: runs[1][0], trials=100)
    assert rate < 0.95 - 8 * error


def test_two_fp32_runs_overall():
    """Different seeds, all questions: interval and bootstrap cover zero 95 % of the time."""
    held, bootstrap, trials = 0, 0, 400
    for seed in range(trials):
        world = World(seed + 10_000)
        (_, a), (_, b) = world.run(), world.run()
        found = change(a, b, world.questions)
        held += abs(found.difference) <= 1.975 * found.se
        bootstrap += found.low <= 0 <= found.high
    error = math.sqrt(0.95 * 0.05 / trials)
    assert abs(held / trials - 0.95) < 4 * error
    # a percentile bootstrap of 160 questions is a little narrow
    assert abs(bootstrap / trials - 0.95) < 4 * error + 0.005
