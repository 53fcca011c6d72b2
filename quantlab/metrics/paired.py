"""What a policy changes, on the questions and draws it shares with the reference.

Both runs answer the same questions with the same sampling noise, so the change is taken pair by
pair: its error is that of the differences, often a third of an unpaired one. "No significant
difference" is not "no difference": the verdict comes from two one-sided tests against a margin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from quantlab.metrics.accuracy import CONFIDENCE, Bools, Floats, Ints, question_means

RESAMPLES = 10_000
BOOTSTRAP_SEED = 0x5EED
MARGIN = 0.01
"""Equivalence margin unless said: one point of accuracy."""

Verdict = Literal["equivalent", "worse", "better", "inconclusive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A policy's accuracy minus the reference's, as shares (0.01 is a point).

    Attributes:
        difference: mean over questions.
        se: question-clustered standard error of it; NaN below two questions.
        low: lower end of the paired bootstrap interval over questions.
        high: its upper end.
        lost: draws that only the reference gets right.
        gained: draws that only the policy gets right.
        p: exact two-sided p of no change. One draw a question: McNemar's. Several: the same
            binomial test on the signs of the questions' changes, since their draws are not
            independent.
        equivalence_p: larger p of the two one-sided tests against ±margin.
        margin: of equivalence.
        verdict: "equivalent" where both one-sided tests reject at 1 − confidence (even if some
            smaller change is significant); else "worse" or "better" where the exact test rejects;
            else "inconclusive".
        questions: shared by both.
        pairs: shared draws.
    """

    difference: float
    se: float
    low: float
    high: float
    lost: int
    gained: int
    p: float
    equivalence_p: float
    margin: float
    verdict: Verdict
    questions: int
    pairs: int


def mcnemar(lost: int, gained: int) -> float:
    """Exact two-sided p that discordant pairs fall either way with probability 1/2.

    Source: McNemar 1947 in its exact, binomial form; `scipy.stats.binomtest`.
    """
    from scipy.stats import binomtest

    return float(binomtest(lost, lost + gained, 0.5).pvalue) if lost + gained else 1.0


def change(
    reference: npt.ArrayLike,
    policy: npt.ArrayLike,
    questions: npt.ArrayLike,
    *,
    margin: float = MARGIN,
    confidence: float = CONFIDENCE,
) -> Change:
    """Compare two runs over the same draws.

    Args:
        reference: [n] bool, right under the reference.
        policy: [n] bool, right under the policy; entry i is the same question and repetition.
        questions: [n] ids.
        margin: of equivalence, as a share.
        confidence: of intervals and verdict.

    Raises:
        ValueError: the arrays differ in length, or the margin is not positive.
    """
    a, b, ids = np.asarray(reference, bool), np.asarray(policy, bool), np.asarray(questions)
    if not a.shape == b.shape == ids.shape or a.ndim != 1:
        raise ValueError(
            f"pairs need equal lengths, got {a.shape}, {b.shape} and {ids.shape} questions"
        )
    if not margin > 0:
        raise ValueError(f"an equivalence margin is positive, got {margin}")
    found, differences = question_means(b.astype(np.float64) - a, ids)
    count = len(found)
    lost, gained = int((a & ~b).sum()), int((b & ~a).sum())
    signs = np.sign(differences)
    p = mcnemar(int((signs < 0).sum()), int((signs > 0).sum()))
    difference = float(differences.mean()) if count else math.nan
    equivalence_p = equivalence(differences, margin=margin)
    verdict: Verdict = "inconclusive"
    if equivalence_p < 1 - confidence:
        verdict = "equivalent"
    elif p < 1 - confidence:
        verdict = "worse" if difference < 0 else "better"
    low, high = bootstrap_mean(differences, confidence=confidence)
    return Change(
        difference=difference,
        se=float(differences.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan,
        low=low,
        high=high,
        lost=lost,
        gained=gained,
        p=p,
        equivalence_p=equivalence_p,
        margin=margin,
        verdict=verdict,
        questions=count,
        pairs=len(a),
    )


def equivalence(differences: Floats, *, margin: float) -> float:
    """Larger p of two one-sided tests that the mean change lies beyond −margin, or +margin.

    Half a question that gains all and half a question that loses all are added (Agresti and Min
    2005 add 1/2 to every cell of the 2 × 2 table): without them a handful of questions without a
    discordant pair would have no variance and pass any margin.

    Args:
        differences: [questions] mean changes, each in −1 … 1.
        margin: as a share.
    """
    from scipy.stats import t

    count = len(differences)
    if count < 2:
        return 1.0
    n = count + 2
    mean = float(differences.sum()) / n
    variance = (float((differences**2).sum()) + 1.0) / n - mean**2
    se = math.sqrt(variance / n)
    return float(max(t.sf((mean + margin) / se, n - 1), t.sf((margin - mean) / se, n - 1)))


def bootstrap_mean(
    values: Floats,
    *,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = BOOTSTRAP_SEED,
) -> tuple[float, float]:
    """Percentile interval of a mean, resampling its entries (questions).

    Equal values are drawn together: how often each distinct change occurs in a resample is one
    multinomial draw, which is the same law and needs no [resamples, questions] array.

    Returns:
        (low, high); NaN below two entries.
    """
    if len(values) < 2:
        return math.nan, math.nan
    distinct, counts = np.unique(values, return_counts=True)
    generator = np.random.Generator(np.random.Philox(seed))
    drawn = generator.multinomial(len(values), counts / len(values), size=resamples)
    means = drawn @ distinct / len(values)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def shared(
    first: tuple[Ints, Ints], second: tuple[Ints, Ints]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Match draws of two runs by (question, repetition).

    Args:
        first: question and repetition of every draw of one run.
        second: the same of the other.

    Returns:
        Indices into either run of the draws that both have, in ascending order of the key.

    Raises:
        ValueError: a run holds a draw twice.
    """
    one, other = (
        np.asarray(question, np.int64) << 32 | np.asarray(repetition, np.int64)
        for question, repetition in (first, second)
    )
    for key in (one, other):
        if len(np.unique(key)) != len(key):
            raise ValueError("a run holds the same question and repetition twice")
    _, left, right = np.intersect1d(one, other, assume_unique=True, return_indices=True)
    return left, right


def flips(reference: npt.ArrayLike, policy: npt.ArrayLike) -> float:
    """Share of pairs whose grade differs, in either direction."""
    a: Bools = np.asarray(reference, bool)
    b: Bools = np.asarray(policy, bool)
    return float((a != b).mean()) if len(a) else math.nan
