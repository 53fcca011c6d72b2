"""Where folding cached corrections hurts: a sweep of decay, write strength and key rank.

With two copies, corrections are cached from the read copy S + ε, ε its rounding error. Folding them
makes the recurrence copy

    S'  =  exact(S) + (A − γ) ε,        A = Π α(I − β k kᵀ),  γ = Π α over the window:

an error F' = A F + (A − γ) ε per window. (A − γ) vanishes in directions that no key of the window
touches, and A contracts those that one does: what folding injects, the rule itself wears off
again. Derived again, corrections leave F = 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from quantlab.recurrence import OpInputs
from quantlab.replay import WindowedScan, parse_policy

Outcome = Literal["harmless", "saturates", "grows", "diverges"]
# F below a hundredth of the state: the read copy's own error moves outputs more.
HARMLESS = 0.01
# Beyond the state's own size there is nothing left to preserve.
DIVERGED = 1.0
# Late over middle error: what a walk without return would reach is √2 or more.
STILL_GROWING = 1.25

HEADS, DV, DK = 8, 16, 32
WINDOW = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldPoint:
    """One setting of the sweep.

    Attributes:
        decay: α of a step.
        beta: write strength.
        rank: dimensions that the keys span, of 32.
        error: RMS of the recurrence copy's error over the RMS of the exact state, over the last
            quarter of the windows.
        middle: the same over the second quarter.
        rederived: the error of the last window when corrections are derived again.
        outcome: "harmless" (below 1 %), "saturates", "grows" (late error 1.25 times the middle
            one or more) or "diverges" (beyond the state itself).
    """

    decay: float
    beta: float
    rank: int
    error: float
    middle: float
    rederived: float
    outcome: Outcome


def fold_sweep(
    decays: Sequence[float] = (0.9, 0.99, 0.999, 1.0),
    betas: Sequence[float] = (0.1, 0.5, 0.9),
    ranks: Sequence[int] = (1, 4, 32),
    *,
    read: str = "nvfp4",
    windows: int = 128,
    seed: int = 0,
) -> Iterator[FoldPoint]:
    """Run every setting on Gaussian values and unit keys of a given rank, in FP64.

    Args:
        decays: α.
        betas: β.
        ranks: of the keys.
        read: format of the read copy; the recurrence copy is stored exactly.
        windows: of 16 steps, in quarters.
        seed: of keys and values.
    """
    policies = [
        parse_policy(f"{read} / fp64 L={WINDOW} records=exact corrections={way}")
        for way in ("fold", "rederive")
    ]
    exact = parse_policy(f"shared:fp64 L={WINDOW} records=exact")
    for decay, beta, rank in product(decays, betas, ranks):
        inputs = _inputs(decay, beta, rank, windows * WINDOW, seed)
        start = torch.zeros(len(policies) + 1, HEADS, DV, DK, dtype=torch.float64)
        scan = WindowedScan([exact, *policies], torch.zeros(1, dtype=torch.int64), layer=0, seed=0)
        scan.start(start, inputs)
        courses = []
        for w in range(windows):
            scan(inputs.slice(w * WINDOW, (w + 1) * WINDOW))
            courses.append(_relative(scan.state()))
        folded, rederived = torch.stack(courses, 1)
        quarter = windows // 4
        middle, late = (
            float(folded[begin : begin + quarter].square().mean().sqrt())
            for begin in (quarter, windows - quarter)
        )
        yield FoldPoint(
            decay=decay,
            beta=beta,
            rank=rank,
            error=late,
            middle=middle,
            rederived=float(rederived[-1]),
            outcome=_outcome(middle, late),
        )


def _inputs(decay: float, beta: float, rank: int, steps: int, seed: int) -> OpInputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    basis = torch.linalg.qr(normal(HEADS, DK, rank))[0]  # [HEADS, DK, rank]
    coordinates = torch.nn.functional.normalize(normal(steps, HEADS, rank), dim=-1)
    k = torch.einsum("hdr,thr->thd", basis, coordinates).unsqueeze(0)
    v = normal(1, steps, HEADS, DV)
    gates = torch.full((1, steps, HEADS), math.log(decay), dtype=torch.float64)
    one = OpInputs(q=k, k=k, v=v, log_decay=gates, beta=torch.full_like(gates, beta))
    return one.rows(torch.zeros(3, dtype=torch.int64))


def _relative(state: Tensor) -> Tensor:
    """RMS of the copies' errors over the RMS of the exact state: [2]."""
    error = (state[1:] - state[0]).square().mean((1, 2, 3)).sqrt()
    return error / state[0].square().mean().sqrt()


def _outcome(middle: float, late: float) -> Outcome:
    if not math.isfinite(late) or late > DIVERGED:
        return "diverges"
    if late < HARMLESS:
        return "harmless"
    return "grows" if late > STILL_GROWING * middle else "saturates"
