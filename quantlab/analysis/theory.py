"""Closed forms for the deviation of a stored state under decay and repeated rounding.

A state that is rounded once a window of L steps deviates from the exact one by

    D_n = a D_{n−1} + e_n,    a = α^L,    e_n with bias b and variance σ²,

right after its n-th store, and by α^m D_n m steps later. Errors are taken as independent of each
other and of the decays. Without a delta rule these are equalities. A delta rule multiplies D by
(I − β k kᵀ) as well, whose norm is at most 1 for 0 ≤ β ≤ 2 and unit k: they become upper bounds.

Everything is per element of the state. Units: those of the state, or of the grid if `step` is 1.

Source: arXiv 2610.13778, appendix C.6; the window mean and the isotropic delta rule are ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Below a tenth of a step, moves of a whole one are ten deviations away; above it 20 waves are
# enough: the last is e^-78.
SMALL_MOVE = 0.1
MOST_WAVES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Mean and variance of an error, of one element.

    Attributes:
        mean: systematic part.
        variance: of the rest.
    """

    mean: float
    variance: float

    @property
    def rms(self) -> float:
        """Root mean square."""
        return math.sqrt(self.mean**2 + self.variance)


def stochastic_error(fraction: float, step: float = 1.0) -> Moments:
    """Error of stochastic rounding at a known place between two neighbours.

    Args:
        fraction: p, how far between them, in [0, 1].
        step: δ, their distance.

    Returns:
        No bias; variance p(1 − p)δ² ≤ δ²/4.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"a fraction of a gap lies in [0, 1] (got {fraction})")
    return Moments(mean=0.0, variance=fraction * (1 - fraction) * step**2)


def dense_error(rounding: str, step: float = 1.0) -> Moments:
    """Error of rounding a value that is equally likely anywhere between two neighbours.

    Args:
        rounding: "rtn" or "sr".
        step: δ, the neighbours' distance.

    Returns:
        No bias; δ²/12 to nearest (uniform on ±δ/2), δ²/6 stochastically (p(1 − p)δ² averaged
        over p): the √2 in RMS between them.
    """
    if rounding not in ("rtn", "sr"):
        raise ValueError(f"rounding is rtn or sr (got {rounding!r})")
    return Moments(mean=0.0, variance=step**2 / (12 if rounding == "rtn" else 6))


def moved_error(spread: float, step: float = 1.0) -> Moments:
    """Error of stochastic rounding of a value that was on the grid and has moved since.

    A state that was stored a moment ago has little to round: for a small move |x| the variance is
    |x|(δ − |x|), far below that of `dense_error`. A store per step therefore costs less each than a
    store per window does, and the error falls by less than the number of stores saved.

    Args:
        spread: standard deviation of the move, Gaussian without a mean.
        step: δ.

    Returns:
        No bias; variance E[p(1 − p)]δ², from p(1 − p) = 1/6 − Σ cos(2πnp)/(πn)². It tends to
        δ·spread·√(2/π) for small moves and to δ²/6 for large ones.
    """
    if spread < 0:
        raise ValueError(f"a standard deviation is not negative (got {spread})")
    s = spread / step
    if s < SMALL_MOVE:  # the series converges slowly there, and neighbours are out of reach
        return Moments(mean=0.0, variance=(s * math.sqrt(2 / math.pi) - s * s) * step**2)
    waves = (
        math.exp(-2 * (math.pi * n * s) ** 2) / (math.pi * n) ** 2 for n in range(1, MOST_WAVES)
    )
    return Moments(mean=0.0, variance=(1 / 6 - sum(waves)) * step**2)


def deviation(
    error: Moments, *, decay: float, window: int = 1, writes: float = math.inf, after: int = 0
) -> Moments:
    """Moments of the deviation m steps after the n-th store.

    Args:
        error: b and σ² of one write.
        decay: α of a step, in [0, 1].
        window: L, steps per store.
        writes: n; infinite for the limits b/(1 − α^L) and σ²/(1 − α^{2L}).
        after: m; 0 is right after a store, whose own error is then part of it.

    Returns:
        Mean α^m b (1 − a^n)/(1 − a) and variance α^{2m} σ² (1 − a^{2n})/(1 − a²), a = α^L. With
        α = 1 they grow as n, and infinite n is refused.

    Raises:
        ValueError: a decay outside [0, 1], or a limit that does not exist.
    """
    if not 0 <= decay <= 1 or window < 1 or writes < 0 or after < 0:
        raise ValueError(
            f"need 0 ≤ decay ≤ 1, window ≥ 1, writes ≥ 0 and after ≥ 0 (got {decay}, {window}, "
            f"{writes}, {after})"
        )
    if decay == 1 and math.isinf(writes):
        raise ValueError("without decay the deviation grows without limit: give the writes")
    a = decay**window
    return Moments(
        mean=decay**after * error.mean * _series(a, writes),
        variance=decay ** (2 * after) * error.variance * _series(a * a, writes),
    )


def window_mean_square(
    error: Moments, *, decay: float, window: int = 1, writes: float = math.inf
) -> float:
    """Mean square deviation over the L steps that follow the n-th store, before the next one.

    For a bias-free error it is σ² α²/(1 − α²)/L in the limit: the energy that stores inject per
    step falls as 1/L, whatever the decay. For a bias alone it falls by 1/L where the head forgets
    within a window and by 1/L² where it does not.
    """
    moments = [
        deviation(error, decay=decay, window=window, writes=writes, after=m)
        for m in range(1, window + 1)
    ]
    return sum(m.mean**2 + m.variance for m in moments) / window


def predicted_fall(window: int, *, base: int = 1, biased: bool = False) -> tuple[float, float]:
    """Bounds on how far the mean square output error falls from one window to a longer one.

    It holds for any linear recurrence, delta rules included: with independent errors of the same
    variance per write only the number of writes matters; biased ones add up in amplitude where
    they are remembered. KL follows it while it is small, that is quadratic in the error, and
    while the state's magnitude, and with it δ, stays as it was.

    Args:
        window: the longer one.
        base: the one compared with.
        biased: whether errors keep their sign over writes.

    Returns:
        (least, most): equal for independent errors.
    """
    ratio = window / base
    return ratio, ratio**2 if biased else ratio


def isotropic_transition(*, decay: float, beta: float, dk: int) -> float:
    """Factor of a deviation's mean square in one step of a delta rule with isotropic unit keys.

    E‖d (I − β k kᵀ)‖² = ‖d‖² (1 − β(2 − β)/dk) when k is uniform on the sphere and independent
    of d; times α². With β = 0.3, α = 0.999, L = 16 and dk = 32 the limit of the variance is 3.98 σ²
    against 31.7 σ² without the rule: the paper's simulation (4.0 against 31.7).
    """
    return decay**2 * (1 - beta * (2 - beta) / dk)


def half_life(log_decay: float) -> float:
    """Count the steps after which a mean log decay (natural, ≤ 0) has halved a state; inf at 0."""
    return math.inf if log_decay == 0 else math.log(2) / -log_decay


def dead_band(decay: float, *, window: int = 1, step: float = 1.0) -> float:
    """Half width around its fixed point in which a state rounded to nearest never moves again.

    Under constant input a store moves x by (1 − α^L)(x* − x); below δ/2 it rounds back to x. With
    α = 0.99, L = 1 and δ = 1 that is 50: from 0, a fixed point at 30 is never approached (F02).
    Infinite without decay.
    """
    a = decay**window
    return math.inf if a == 1 else step / 2 / (1 - a)


def _series(ratio: float, terms: float) -> float:
    """Sum of ratio^i for i < terms."""
    if ratio == 1:
        return terms
    # expm1 keeps the digits that 1 − a loses for a near 1
    log = math.log(ratio) if ratio > 0 else -math.inf
    return math.expm1(terms * log) / math.expm1(log) if terms else 0.0
