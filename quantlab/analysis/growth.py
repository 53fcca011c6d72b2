"""How a divergence grows with generation length: the exponent of a power law, with an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Law = Literal["sublinear", "linear", "superlinear", "undecided"]
# An exponent counts as 1 when it is known to this much and 1 is inside its interval.
RESOLUTION = 0.25
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A fit of KL = c · N^exponent.

    Attributes:
        exponent: slope of log KL on log N by least squares.
        low: lower end of its 95 % interval (Student's t on the residuals).
        high: upper end.
        law: "sublinear" or "superlinear" where the interval excludes 1, "linear" where it holds 1
            and is narrower than ± 0.25, "undecided" otherwise.
    """

    exponent: float
    low: float
    high: float
    law: Law


def fit_growth(lengths: Sequence[float], values: Sequence[float]) -> Growth:
    """Fit a power law; points that are not positive and finite are left out.

    The interval takes residuals as independent. Neighbouring N of one curve share their streams,
    so it says how straight the curve is, not how another set of books would turn out.

    Args:
        lengths: N.
        values: KL at N, or another positive quantity.

    Raises:
        ValueError: fewer than three points are left.
    """
    pairs = [
        (math.log(n), math.log(v))
        for n, v in zip(lengths, values, strict=True)
        if n > 0 and v > 0 and math.isfinite(v)
    ]
    if len(pairs) < 3:
        raise ValueError(f"a growth law needs three positive points, got {len(pairs)}")
    from scipy import stats

    x, y = np.array(pairs).T
    fit = stats.linregress(x, y)
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(pairs) - 2) * fit.stderr)
    slope = float(fit.slope)
    return Growth(exponent=slope, low=slope - half, high=slope + half, law=_law(slope, half))


def _law(slope: float, half: float) -> Law:
    if slope + half < 1:
        return "sublinear"
    if slope - half > 1:
        return "superlinear"
    return "linear" if half <= RESOLUTION else "undecided"
