"""Accuracy of generations: a mean over questions with its error, and truncation as its own class.

Draws of one question are not independent, so the unit is the question: the mean is one of question
means, and its standard error comes from their spread (Miller 2024, arXiv 2411.00640, section 2.2).
With n draws of each of Q questions that is a sample of Q, not of n·Q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over questions.

    Attributes:
        mean: of question means; NaN without questions.
        se: its standard error, from the spread of question means; NaN below two questions.
        questions: Q.
        draws: of all questions together.
    """

    mean: float
    se: float
    questions: int
    draws: int


def question_means(values: npt.ArrayLike, questions: npt.ArrayLike) -> tuple[Ints, Floats]:
    """Average the draws of each question.

    Args:
        values: [n].
        questions: [n] ids.

    Returns:
        Question ids, ascending, and their means.
    """
    x = np.asarray(values, np.float64)
    ids, which = np.unique(np.asarray(questions, np.int64), return_inverse=True)
    counts = np.bincount(which, minlength=len(ids))
    return ids, np.bincount(which, weights=x, minlength=len(ids)) / counts


def clustered(values: npt.ArrayLike, questions: npt.ArrayLike) -> Estimate:
    """Mean and question-clustered standard error.

    Args:
        values: [n], one a draw.
        questions: [n] ids of their questions.
    """
    _, means = question_means(values, questions)
    count = len(means)
    return Estimate(
        mean=float(means.mean()) if count else math.nan,
        se=float(means.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan,
        questions=count,
        draws=int(np.size(values)),
    )


def wilson(share: float, n: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval of a share.

    Args:
        share: successes / n.
        n: sample size, not necessarily whole (see `effective_size`).
        confidence: of the two-sided interval.

    Returns:
        (low, high); (NaN, NaN) at n = 0.

    Source: Wilson 1927; equal to `scipy.stats.binomtest(...).proportion_ci("wilson")` at whole n.
    """
    from scipy.stats import norm

    if n <= 0:
        return math.nan, math.nan
    z2 = float(norm.ppf(0.5 + confidence / 2)) ** 2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def effective_size(estimate: Estimate) -> float:
    """Independent draws that a clustered share is worth: p(1 − p) / SE².

    Kept between the number of questions (draws of a question all equal) and that of draws
    (independent); where every draw is right, or every draw wrong, the questions.
    """
    p, se = estimate.mean, estimate.se
    if math.isnan(se) or se <= 0 or not 0 < p < 1:
        return float(estimate.questions)
    return min(float(estimate.draws), max(float(estimate.questions), p * (1 - p) / se**2))


def clustered_wilson(estimate: Estimate, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's interval at the effective size of a clustered share."""
    if estimate.questions == 0:
        return math.nan, math.nan
    return wilson(estimate.mean, effective_size(estimate), confidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Accuracy of a set of generations, with what truncation does to it.

    Attributes:
        strict: a truncated answer is wrong, whatever it says: the number to quote.
        as_graded: what grading the text alone gives; lucky truncated answers count.
        finished_only: over the generations that ended by themselves; NaN if none did. Not
            comparable between policies, since each chooses its own questions.
        truncated: share that hit the budget.
    """

    strict: Estimate
    as_graded: Estimate
    finished_only: Estimate
    truncated: Estimate


def accuracy(graded: npt.ArrayLike, truncated: npt.ArrayLike, questions: npt.ArrayLike) -> Accuracy:
    """Accuracy three ways, and the truncation rate.

    Args:
        graded: [n] bool, the text's answer is right.
        truncated: [n] bool, the output budget was hit.
        questions: [n] ids.
    """
    right, cut = np.asarray(graded, bool), np.asarray(truncated, bool)
    ids = np.asarray(questions, np.int64)
    return Accuracy(
        strict=clustered(right & ~cut, ids),
        as_graded=clustered(right, ids),
        finished_only=clustered(right[~cut], ids[~cut]),
        truncated=clustered(cut, ids),
    )
