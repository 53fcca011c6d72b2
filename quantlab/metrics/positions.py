"""Which positions a KL curve is measured at.

KL at N is a mean over the min(N, 256) positions that end at N (ReplaySSM, arXiv 2610.13778,
App. E.4.3), so only the union of those windows needs logits.
"""

from __future__ import annotations

from quantlab.errors import UsageError

# Positions averaged for one point of the curve. Source: ReplaySSM, App. E.4.3.
WINDOW = 256
FIRST_LENGTH = 16


def lengths(tokens: int) -> tuple[int, ...]:
    """Grid of N: 16, 32, 64, … doubling, and the last position itself.

    Args:
        tokens: positions of the study, N's largest value.

    Raises:
        UsageError: if `tokens` is not positive.
    """
    if tokens < 1:
        raise UsageError(f"--tokens must be positive (got {tokens})")
    grid = []
    n = FIRST_LENGTH
    while n < tokens:
        grid.append(n)
        n *= 2
    return (*grid, tokens)


def window(n: int) -> range:
    """Positions averaged for KL at `n`: the min(n, 256) that end there, 1-based."""
    return range(n - min(n, WINDOW) + 1, n + 1)


def measured_positions(tokens: int) -> tuple[int, ...]:
    """Union of the windows of `lengths(tokens)`, ascending."""
    return tuple(sorted({p for n in lengths(tokens) for p in window(n)}))
