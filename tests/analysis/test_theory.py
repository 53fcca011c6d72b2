"""Closed forms against brute force, and their edges."""

import math

import numpy as np
import pytest

from quantlab.analysis.growth import fit_growth
from quantlab.analysis.theory import (
    Moments,
    dead_band,
    dense_error,
    deviation,
    half_life,
    isotropic_transition,
    moved_error,
    predicted_fall,
    stochastic_error,
    window_mean_square,
)

ERROR = Moments(mean=0.2, variance=0.7)


@pytest.mark.parametrize("window", [1, 4, 16])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("after", [0, 3])
def test_deviation_is_the_sum_over_writes(decay, window, after):
    writes = 25
    a = decay**window
    weights = [decay**after * a ** (writes - 1 - j) for j in range(writes)]
    found = deviation(ERROR, decay=decay, window=window, writes=writes, after=after)
    assert found.mean == pytest.approx(0.2 * sum(weights))
    assert found.variance == pytest.approx(0.7 * sum(w * w for w in weights))


def test_limits_of_the_paper():
    found = deviation(ERROR, decay=0.999, window=16)
    a = 0.999**16
    assert found.mean == pytest.approx(0.2 / (1 - a))
    assert found.variance == pytest.approx(0.7 / (1 - a * a))
    later = deviation(ERROR, decay=0.999, window=16, after=5)
    assert later.mean == pytest.approx(0.999**5 * found.mean)
    assert later.variance == pytest.approx(0.999**10 * found.variance)
    near = deviation(ERROR, decay=1 - 1e-9)  # 1 − a in full digits
    assert near.mean == pytest.approx(0.2e9, rel=1e-6)
    with pytest.raises(ValueError, match="without limit"):
        deviation(ERROR, decay=1.0)
    with pytest.raises(ValueError, match="need 0"):
        deviation(ERROR, decay=1.1)


def test_rounding_errors():
    assert stochastic_error(0.25, 2.0).variance == pytest.approx(0.25 * 0.75 * 4)
    assert stochastic_error(0.5).variance == 0.25
    places = np.linspace(0, 1, 200_001)
    average = np.mean([stochastic_error(p).variance for p in places[::1000]])
    assert dense_error("sr").variance == pytest.approx(average, rel=0.01)
    assert dense_error("rtn").variance == pytest.approx(
        np.mean(np.minimum(places, 1 - places) ** 2), rel=1e-4
    )
    with pytest.raises(ValueError, match="rtn or sr"):
        dense_error("up")
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        stochastic_error(1.5)


@pytest.mark.parametrize("decay", [0.3, 0.9, 0.9999])
@pytest.mark.parametrize("window", [4, 16, 64])
def test_independent_errors_fall_as_the_number_of_writes_whatever_the_decay(decay, window):
    noise = Moments(mean=0, variance=1)
    fall = window_mean_square(noise, decay=decay) / window_mean_square(
        noise, decay=decay, window=window
    )
    assert fall == pytest.approx(window, rel=1e-9)
    assert predicted_fall(window) == (window, window)


def test_biased_errors_fall_between_once_and_twice_the_number_of_writes():
    bias = Moments(mean=1, variance=0)
    least, most = predicted_fall(16, biased=True)
    assert (least, most) == (16, 256)
    for decay in (0.01, 0.5, 0.9, 0.99999):
        fall = window_mean_square(bias, decay=decay) / window_mean_square(
            bias, decay=decay, window=16
        )
        assert least * (1 - 1e-9) <= fall <= most * (1 + 1e-9)
    assert fall == pytest.approx(most, rel=1e-3)


@pytest.mark.parametrize("spread", [0.001, 0.05, 0.0999, 0.1001, 0.3, 1.0, 5.0])
def test_error_of_a_value_that_has_moved(spread):
    # by quadrature over the move, in units of a step of 2
    x = np.linspace(-8, 8, 2_000_001) * spread
    density = np.exp(-0.5 * (x / spread) ** 2)
    p = x / 2 - np.floor(x / 2)
    expected = 4 * (p * (1 - p) * density).sum() / density.sum()
    assert moved_error(spread, 2.0).variance == pytest.approx(expected, rel=1e-4)
    assert moved_error(5.0).variance == pytest.approx(dense_error("sr").variance)
    with pytest.raises(ValueError, match="not negative"):
        moved_error(-1.0)


def test_small_pieces():
    assert half_life(math.log(0.5) / 100) == pytest.approx(100) and half_life(0.0) == math.inf
    assert dead_band(0.99) == pytest.approx(50) and dead_band(1.0) == math.inf
    assert isotropic_transition(decay=1.0, beta=1.0, dk=1) == 0
    assert Moments(mean=3, variance=16).rms == 5
    with pytest.raises(ValueError, match="three positive points"):
        fit_growth([1, 2, 3], [1.0, 0.0, float("nan")])
    # four points that scatter decide nothing
    assert fit_growth([1, 2, 4, 8], [1.0, 4.0, 3.0, 9.0]).law == "undecided"
