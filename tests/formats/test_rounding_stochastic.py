"""Stochastic rounding: the exact threshold, exact counts, chi-square, saturation.

The rule under test: y between lo < y < hi goes up when draw < floor(f * 2^32), f = (y - lo) /
(hi - lo), as signed reals. Counting over structured draws has no sampling error, so it needs no
tolerance; the chi-square test is of the words together with the rule.
"""

from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from quantlab.formats import ELEMENTS, parse_format, quantize
from quantlab.formats.element import Element, FloatElement
from quantlab.formats.philox import sr_words
from quantlab.formats.rounding import round_clamped, round_unscaled
from tests.formats import oracle
from tests.tolerances import CHI_SQUARE_P

ELEMENT = [e for e in ELEMENTS.values() if e.name not in ("float64", "float32")]


def values_everywhere(element: Element, n: int) -> np.ndarray:
    """FP32 values of both signs in every binade: normal, subnormal, first gap, far below it."""
    rng = np.random.default_rng(3)
    limit = float(element.max_finite)
    top = int(np.floor(np.log2(limit)))
    floor = -149 if not (isinstance(element, FloatElement) and element.exp_bits == 8) else -140
    exponents = rng.integers(floor, top + 1, n)
    # half of them within the element's own range, where most states live
    own = int(np.log2(float(element.smallest_subnormal)))
    exponents[::2] = rng.integers(max(own - 3, floor), top + 1, len(exponents[::2]))
    y = np.ldexp(rng.uniform(1, 2, n), exponents) * rng.choice([-1.0, 1.0], n)
    return np.clip(y, -limit, limit).astype(np.float32)


def expected_threshold(y: np.float32, element: Element) -> tuple[int, Fraction, Fraction]:
    """The threshold and the two neighbours of y, in exact arithmetic."""
    step = Fraction(float(oracle.step_of(np.float64(y), element)))
    exact = Fraction(float(y))
    low = (exact / step).numerator // (exact / step).denominator * step
    return oracle.threshold(exact, step), low, low + step


@pytest.mark.parametrize("element", ELEMENT, ids=lambda e: e.name)
def test_the_threshold_is_exact(element: Element) -> None:
    """At draw = T - 1 the value goes up, at T down, with T from exact fractions; both ends too."""
    ys = values_everywhere(element, 3000)
    table = [expected_threshold(y, element) for y in ys]
    limit = np.array([t for t, _, _ in table], dtype=np.int64)
    low = np.array([float(v) for _, v, _ in table], dtype=np.float32)
    high = np.array([float(v) for _, _, v in table], dtype=np.float32)

    def rounded(draws: np.ndarray) -> np.ndarray:
        return round_clamped(torch.from_numpy(ys.copy()), element, torch.from_numpy(draws)).numpy()

    up, down = rounded(np.maximum(limit - 1, 0)), rounded(limit)
    assert (up == np.where(limit > 0, high, low)).all()
    assert (down == low).all()
    assert (rounded(np.full_like(limit, 2**32 - 1)) == low).all()
    assert (rounded(np.zeros_like(limit)) == np.where(limit > 0, high, low)).all()
    assert (limit > 0).mean() > 0.5 and (limit < 2**31).mean() > 0.2


@pytest.mark.parametrize("element", ELEMENT, ids=lambda e: e.name)
def test_exact_counts_over_structured_draws(element: Element) -> None:
    """Over the 2^12 draws i * 2^20 the up-count is ceil(T / 2^20): no statistics, no tolerance."""
    draws = torch.arange(1 << 12, dtype=torch.int64) << 20
    for y in values_everywhere(element, 60):
        limit, low, high = expected_threshold(y, element)
        out = round_clamped(torch.full((1 << 12,), float(y)), element, draws)
        ups = int((out == float(high)).sum())
        assert ups == -(-limit // (1 << 20)), (float(y), limit, ups)
        assert ups + int((out == float(low)).sum()) == 1 << 12


@pytest.mark.parametrize("element", ELEMENT, ids=lambda e: e.name)
def test_random_draws_against_the_oracle(element: Element) -> None:
    ys = values_everywhere(element, 200_000)
    draws = np.random.default_rng(4).integers(0, 1 << 32, len(ys))
    want = oracle.round_stochastic(ys.astype(np.float64), element, draws).astype(np.float32)
    got = round_clamped(torch.from_numpy(ys.copy()), element, torch.from_numpy(draws)).numpy()
    assert (got == want).all()
    if element.signed_zero:
        assert (np.signbit(got) == np.signbit(ys)).all()
    else:
        assert not np.signbit(got[got == 0]).any()


@pytest.mark.parametrize("element", ELEMENT, ids=lambda e: e.name)
def test_values_of_the_type_never_move(element: Element) -> None:
    ys = torch.from_numpy(values_everywhere(element, 4000))
    on_grid = round_clamped(ys, element, None)
    for draw in (0, 1, 2**31, 2**32 - 1):
        out = round_clamped(on_grid.clone(), element, torch.tensor([draw]))
        assert torch.equal(out.view(torch.int32), on_grid.view(torch.int32))


def test_int32_patterns_are_the_same_words() -> None:
    y = torch.from_numpy(values_everywhere(ELEMENTS["float8_e4m3fn"], 1000))
    words = torch.randint(0, 1 << 32, (1000,))
    one = round_clamped(y.clone(), ELEMENTS["float8_e4m3fn"], words)
    for dtype in (torch.int32, torch.uint32):
        pattern = words.to(torch.int32).view(dtype)
        assert torch.equal(one, round_clamped(y.clone(), ELEMENTS["float8_e4m3fn"], pattern))
    with pytest.raises(TypeError, match="random words"):
        round_clamped(y, ELEMENTS["float8_e4m3fn"], words.float())


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"])
@pytest.mark.parametrize("draw", [0, 2**32 - 1])
def test_stochastic_rounding_makes_no_infinity_below_the_threshold(name: str, draw: int) -> None:
    element = ELEMENTS[name]
    assert isinstance(element, FloatElement)
    largest, tie = float(element.max_finite), np.float32(float(element.overflow_threshold))
    x = torch.tensor([np.nextafter(np.float32(largest), np.float32(np.inf)),
                      np.nextafter(tie, np.float32(0)), np.nextafter(tie, np.float32(np.inf)),
                      float("inf"), float("nan")])  # fmt: skip
    out = round_unscaled(x, element, torch.tensor([draw]), "ieee")
    assert out[:2].tolist() == [largest, largest]
    over = float("inf") if element.has_inf else float("nan")
    np.testing.assert_array_equal(out[2:].tolist(), [over, over, float("nan")])
    kept = round_unscaled(-x, element, torch.tensor([draw]), "saturate")
    assert kept[:4].tolist() == [-largest] * 4 and kept[4].isnan()


def test_chi_square_of_words_and_rule() -> None:
    """Up-counts at 1,024 fractions of an INT8 step, 4,096 words each, against binomials."""
    fmt = parse_format("int8@row-sr")
    f = (torch.arange(1024) + 0.5) / 1024
    x = (f - 40.0)[:, None].repeat(1, 4097)
    x[:, 0] = 127.0  # pins the scale at exactly 1
    words = sr_words(
        seed=11, layer=0, copy=0, stream=torch.tensor([3]), flush=1, heads=1, dv=1024, dk=4097
    )[0, 0]
    out, _ = quantize(x, fmt, words)
    ups = (out[:, 1:] == -39).sum(1).double()
    assert int((out[:, 1:] == -40).sum()) + int(ups.sum()) == 1024 * 4096
    p = f.double()
    statistic = float((((ups - 4096 * p) ** 2) / (4096 * p * (1 - p))).sum())
    level = stats.chi2.sf(statistic, 1024)
    assert CHI_SQUARE_P < level < 1 - CHI_SQUARE_P
