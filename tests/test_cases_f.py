"""Public requests that shape the tool (group F): the regimes of rounding, by their closed forms.

Scans and formats are the real ones (`quantlab.analysis.synthetic`). Intervals are four standard
errors of the sample at hand: one false alarm in 16,000, and seeds are fixed. F01 and F05 are with
the formats (test_cases_a); F04 and the step-by-step half of F07 in tests/replay.
"""

import math

import numpy as np
import pytest

from quantlab.analysis.growth import fit_growth
from quantlab.analysis.synthetic import delta_sample, scalar_sample
from quantlab.analysis.theory import (
    Moments,
    dead_band,
    dense_error,
    deviation,
    isotropic_transition,
    moved_error,
)

SIGMAS = 4
WRITES = {1: 400, 16: 40}  # 0.99^800 and 0.99^1280: at the limit to 3e-4


@pytest.mark.parametrize("grid", ["integers", "binade"])
@pytest.mark.parametrize("window", [1, 16])
@pytest.mark.parametrize("rounding", ["rtn", "sr"])
def test_F03_F07_deviation_by_rounding_and_window(rounding, window, grid):
    published = {
        ("rtn", 1): 2.05,
        ("sr", 1): 2.89,
        ("rtn", 16): 0.550,
        ("sr", 16): 0.778,
    }
    error = dense_error(rounding)
    predicted = deviation(error, decay=0.99, window=window, writes=WRITES[window])
    limit = deviation(error, decay=0.99, window=window)
    assert limit.rms == pytest.approx(published[rounding, window], rel=0.003)
    sample = scalar_sample(
        decay=0.99, window=window, rounding=rounding, grid=grid, writes=WRITES[window]
    )
    mean, mean_error = sample.mean()
    variance, variance_error = sample.variance()
    assert abs(mean) < SIGMAS * mean_error
    assert abs(variance - predicted.variance) < SIGMAS * variance_error
    # the interval tells the roundings and the windows apart
    assert variance_error < 0.03 * variance
    assert float(sample.write.var()) == pytest.approx(error.variance, rel=0.1)


@pytest.mark.parametrize("window", [1, 16])
def test_F03_stochastic_over_nearest_is_root_two_under_dense_updates(window):
    (rtn, rtn_error), (sr, sr_error) = (
        scalar_sample(decay=0.99, window=window, rounding=r, writes=WRITES[window]).variance()
        for r in ("rtn", "sr")
    )
    ratio = math.sqrt(sr / rtn)
    # standard error of a square root of a ratio
    half = ratio / 2 * math.hypot(rtn_error / rtn, sr_error / sr)
    assert abs(ratio - math.sqrt(2)) < SIGMAS * half
    assert half < 0.03


@pytest.mark.parametrize("window", [1, 16])
def test_F02_nearest_stays_in_its_dead_band_and_stochastic_does_not(window):
    """s = 0.99 s + 0.3 on integers from 0, fixed point 30."""
    options = {"decay": 0.99, "window": window, "constant": 0.3, "elements": 1024}
    writes = 900 // window
    rtn = scalar_sample(rounding="rtn", writes=writes, **options)
    bias = float(rtn.write.mean())
    assert float(rtn.write.std()) == 0
    assert (rtn.deviation == rtn.deviation[0, 0]).all()
    stuck = 30 * (1 - 0.99 ** (writes * window)) + float(rtn.deviation[0, 0])
    assert stuck == pytest.approx(0 if window == 1 else 27)
    assert 30 - stuck < dead_band(0.99, window=window)
    # the same bias at every write: its limit is what the state lacks
    limit = deviation(Moments(mean=bias, variance=0), decay=0.99, window=window)
    assert limit.mean == pytest.approx(stuck - 30, rel=1e-9)
    sr = scalar_sample(rounding="sr", writes=writes, **options)
    mean, mean_error = sr.mean()
    assert abs(mean) < SIGMAS * mean_error and mean_error < 0.02
    worst = deviation(Moments(mean=0, variance=0.25), decay=0.99, window=window).variance
    assert 0 < sr.variance()[0] < worst


def test_C6_a_delta_rule_stays_below_the_bound_and_at_the_isotropic_form():
    """β = 0.3, α = 0.999, L = 16: the paper's simulation has a variance of 4.0 against 31.7."""
    bound = deviation(Moments(mean=0, variance=1), decay=0.999, window=16).variance
    assert bound == pytest.approx(31.7, abs=0.05)
    factor = isotropic_transition(decay=0.999, beta=0.3, dk=32) ** 16
    expected = 1 / (1 - factor)
    assert expected == pytest.approx(4.0, abs=0.05)
    ratio, error = delta_sample(decay=0.999, beta=0.3, window=16, rounding="sr", dk=32).by_head()
    assert abs(ratio - expected) < SIGMAS * error
    assert error < 0.02 * expected and ratio < bound / 7
    # without the rule's feedback the same run sits at the bound
    slow = scalar_sample(decay=0.999, window=16, rounding="sr", writes=250)
    variance, variance_error = slow.variance()
    assert abs(variance - bound / 6) < SIGMAS * variance_error


def test_C6_a_state_stored_a_step_ago_has_less_to_round():
    """Slow moves: stores per step err less each, so fewer stores gain less than their number."""
    decay, drive = 0.9999, 0.01  # a step moves by a tenth of the grid
    variances = {}
    for window, writes in ((1, 600), (16, 60)):
        sample = scalar_sample(
            decay=decay, window=window, rounding="sr", writes=writes, drive=drive
        )
        squares = sample.write.square()
        spread = math.sqrt(drive * window)  # what (1 − α) x adds is below a hundredth of it
        expected = moved_error(spread).variance
        error = float(squares.std()) / math.sqrt(squares.numel())
        assert abs(float(squares.mean()) - expected) < SIGMAS * error
        variances[window] = expected
    assert variances[1] < 0.45 * dense_error("sr").variance
    assert variances[16] > 0.95 * dense_error("sr").variance


@pytest.mark.parametrize(
    ("exponent", "law"), [(0.5, "sublinear"), (1.0, "linear"), (1.5, "superlinear")]
)
def test_F06_growth_law(exponent, law):
    generator = np.random.default_rng(6)
    n = 2.0 ** np.arange(4, 12, 0.5)
    labels, inside = [], 0
    for _ in range(40):
        kl = 1e-3 * n**exponent * np.exp(0.05 * generator.normal(size=16))
        fit = fit_growth(n.tolist(), kl.tolist())
        assert abs(fit.exponent - exponent) < 0.1
        inside += fit.low < exponent < fit.high
        labels.append(fit.law)
    # a 95 % interval: 38 of 40 expected, fewer than 33 with a probability of 0.1 %
    assert inside >= 33
    assert labels.count(law) == 40 if exponent != 1.0 else labels.count(law) >= 33
