"""Bins of FP32 output length, to see whether a policy loses more where the answer is long.

Two FP32 runs are needed. The first has sampling noise of its own and only defines the bins; the
second shares its noise with every policy and is the curve they are compared with. Binning by a
run's own length would compare different questions (a policy that loops moves its failures into the
longest bin), and binning by the second run's would select on the reference's luck alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantlab.metrics.accuracy import Accuracy, Ints, accuracy, clustered_wilson

QUARTILES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """A range of FP32 output lengths, both ends included.

    Attributes:
        low: shortest, tokens.
        high: longest, tokens.
        median: of the FP32 lengths that fall in it: where the bin is drawn.
        members: indices of those generations in the arrays the bins were made from.
    """

    low: int
    high: int
    median: float
    members: npt.NDArray[np.intp]


def quantile_bins(lengths: npt.ArrayLike, count: int = QUARTILES) -> list[Bin]:
    """Bins that hold equally many generations each, as far as ties allow.

    A length falls into the first bin whose upper quantile it does not exceed, so equal lengths
    share a bin and a bin that would be empty is left out.

    Args:
        lengths: [n] tokens, of the FP32 run that defines the bins.
        count: of bins.

    Raises:
        ValueError: no lengths, or a length below 0.
    """
    x = _lengths(lengths)
    edges = np.quantile(x, np.arange(1, count) / count, method="inverted_cdf")
    return _bins(x, np.searchsorted(edges, x, side="left"))


def log_bins(lengths: npt.ArrayLike, base: float = 2.0) -> list[Bin]:
    """Bins [base^k, base^(k + 1)); empty ones are left out.

    Args:
        lengths: [n] tokens; a length of 0 counts as 1.
        base: ratio of a bin's ends, at least 1.1.

    Raises:
        ValueError: no lengths, a length below 0, or too small a base.
    """
    if not base >= 1.1:
        raise ValueError(f"the base of log bins is at least 1.1, got {base}")
    x = np.maximum(_lengths(lengths), 1)
    which = np.floor(np.log(x) / math.log(base)).astype(np.int64)
    # a logarithm of a power of the base may come out a hair too small or large
    which += x >= base ** (which + 1.0)
    which -= x < base ** which.astype(np.float64)
    return _bins(_lengths(lengths), which)


def _lengths(lengths: npt.ArrayLike) -> Ints:
    x = np.asarray(lengths, np.int64)
    if x.ndim != 1 or not len(x) or x.min() < 0:
        raise ValueError("bins need output lengths [n], n ≥ 1, none below 0")
    return x


def _bins(x: Ints, which: npt.NDArray[np.integer]) -> list[Bin]:
    found = []
    for index in np.unique(which):
        members = np.flatnonzero(which == index)
        inside = x[members]
        found.append(
            Bin(
                low=int(inside.min()),
                high=int(inside.max()),
                median=float(np.median(inside)),
                members=members,
            )
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class BinAccuracy:
    """One policy in one bin.

    Attributes:
        bin: the bin.
        accuracy: of the policy's generations whose FP32 counterpart is in the bin.
        low: lower end of Wilson's interval of `accuracy.strict`, at its effective size.
        high: its upper end.
    """

    bin: Bin
    accuracy: Accuracy
    low: float
    high: float


def by_bin(
    bins: list[Bin], graded: npt.ArrayLike, truncated: npt.ArrayLike, questions: npt.ArrayLike
) -> list[BinAccuracy]:
    """Accuracy of one policy in every bin.

    Args:
        bins: from the lengths of the first FP32 run.
        graded: [n] bool; entry i is the counterpart (same question and repetition) of length i.
        truncated: [n] bool.
        questions: [n] ids.
    """
    right, cut = np.asarray(graded, bool), np.asarray(truncated, bool)
    ids = np.asarray(questions, np.int64)
    found = []
    for one in bins:
        inside = accuracy(right[one.members], cut[one.members], ids[one.members])
        low, high = clustered_wilson(inside.strict)
        found.append(BinAccuracy(bin=one, accuracy=inside, low=low, high=high))
    return found
