"""One window of n steps behind a checkpoint, without materialising the states between.

Two forms of the same algebra (arXiv 2610.13778, Eq. 4–11; here rows are steps):

- `affine_window`: nothing is rounded inside the window, so outputs, corrections and the final
  state are affine in the checkpoint S. All that does not depend on S is formed beforehand, for
  many windows at once, and a window costs two matrix products.
- `substitute`: corrections are rounded to their records inside the forward substitution, row by
  row, which no triangular solve followed by rounding reproduces.

With A_sj = γ_{j+1:s} k_j·k_s for j < s and B = diag(β), the corrections of a delta rule solve
(I + BA) U = B(V − K̃Sᵀ), where row s of K̃ is γ_{1:s} k_s. Outputs are O = Q̃Sᵀ + WU with
W_sj = γ_{j+1:s} k_j·q_s for j ≤ s. Without a delta rule U = V.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.recurrence.decays import WindowDecays

Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineWindow:
    """A window as an affine function of the checkpoint S [..., dv, dk].

    The 2n columns of [O | Ũ] (n columns, O alone, without a delta rule) are steps, so that S
    multiplies from the left: columns a … b − 1 are bias + S·map with (bias, map) = columns(a, b).
    Ũ holds the corrections decayed to the window's end, and the state after the window is
    total·S + Ũ·fold.

    Attributes:
        values: [..., n, dv] what is written, before the delta rule.
        met: [..., 2n, dk] keys over queries, or [..., n, dk] queries, which meet S.
        of_values: [..., n, c] columns' coefficients of the values.
        of_met: [..., 2n or n, c] columns' coefficients of S·met.
        written: [..., dv, n] Ũ where it does not depend on S (no delta rule), else None.
        fold: [..., n, dk] keys.
        total: [..., 1, 1] or [..., 1, dk] decay of the checkpoint over the window.
    """

    values: Tensor
    met: Tensor
    of_values: Tensor
    of_met: Tensor
    written: Tensor | None
    fold: Tensor
    total: Tensor

    def columns(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Form bias [..., dv, stop − start] and map [..., dk, stop − start] of some columns."""
        bias = torch.matmul(self.values.mT, self.of_values[..., start:stop])
        return bias, torch.matmul(self.met.mT, self.of_met[..., start:stop])


def affine_window(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decays: WindowDecays,
    beta: Tensor | None,
    keys_queries: Tensor | None = None,
) -> AffineWindow:
    """Form everything in an unrounded window that does not depend on the checkpoint.

    A decay per head scales steps only and so moves into the [n, n] coefficients; one per key
    channel scales keys and queries themselves.

    Args:
        q: [..., n, dk].
        k: [..., n, dk].
        v: [..., n, dv], what is written (Mamba-2: Δ·x).
        decays: of the n steps.
        beta: [..., n] for delta rules, else None.
        keys_queries: [..., 2n, dk] k over q, if they lie so in memory.
    """
    total = decays.total(k.dtype)
    start, end = decays.start_factors(k.dtype), decays.end_factors(k.dtype)
    ones = torch.ones_like(start[..., :1])
    if decays.per_channel:
        met_k, met_q, fold = k * start, q * start, k * end
        start = end = ones
    else:
        met_k, met_q, fold = k, q, k
    ends = end.mT  # [..., 1, n], scales the columns of Ũ
    if beta is None:
        (weights,) = decays.products(k, q)
        return AffineWindow(
            values=v,
            met=met_q,
            of_values=weights.mT,
            of_met=torch.diag_embed(start.squeeze(-1)),
            written=v.mT * ends,
            fold=fold,
            total=total,
        )
    overlaps, weights = decays.products(k, k, q)
    strength = beta.unsqueeze(-1)
    solve = (_unit_lower_inverse(strength * overlaps) * strength.mT).mT  # B(I + BA)⁻ᵀ
    of_keys = -start * solve
    of_queries = torch.diag_embed(start.squeeze(-1))
    met = (
        torch.cat([met_k, met_q], -2)
        if keys_queries is None or decays.per_channel
        else keys_queries
    )
    return AffineWindow(
        values=v,
        met=met,
        of_values=torch.cat([torch.matmul(solve, weights.mT), solve * ends], -1),
        of_met=torch.cat(
            [
                torch.cat([torch.matmul(of_keys, weights.mT), of_keys * ends], -1),
                torch.cat([of_queries, torch.zeros_like(of_queries)], -1),
            ],
            -2,
        ),
        written=None,
        fold=fold,
        total=total,
    )


def _unit_lower_inverse(x: Tensor) -> Tensor:
    """(I + strict lower part of x)⁻¹ by substitution; the rest of x is not looked at."""
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand_as(x)
    inverse: Tensor = torch.linalg.solve_triangular(x, eye, upper=False, unitriangular=True)
    return inverse


def substitute(
    right: Tensor, lower: Tensor, records: Tensor, *, first: int, round_row: Rounding
) -> Tensor:
    """Solve for corrections row by row, each rounded to its record before later rows use it.

    Args:
        right: [B, m, dv] β(v − γSk) of the steps first … first + m − 1: all but the part of
            earlier corrections in this window.
        lower: [B, m, ≥ first + m] β_s γ_{j+1:s} k_j·k_s for those steps s (rows) and all steps j.
        records: [B, first + m, dv]; rows before `first` hold earlier records.
        first: records already there.
        round_row: rounds one row [B, dv] to the record's type.

    Returns:
        [B, m, dv] the unrounded corrections, which a step's own output uses. `right` is used up.

    Mutates:
        records: rows from `first` on are written; right.
    """
    for i in range(right.shape[1]):
        s = first + i
        own = right[:, i : i + 1]
        if s > 0:
            own.baddbmm_(lower[:, i : i + 1, :s], records[:, :s], alpha=-1)
        records[:, s] = round_row(own[:, 0])
    return right
