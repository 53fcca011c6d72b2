"""One window of n steps behind a checkpoint, without materialising the states between.

Two forms of the same algebra (`papers/replayssm.md`, Eq. 4–11; here rows are steps):

- `affine_window`: nothing is rounded inside the window, so corrections, outputs and the final
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

    Columns are steps, so that S multiplies from the left: U = u_bias + S·u_map and
    O = o_bias + S·o_map; the state after the window is total·S + U·fold.

    Attributes:
        u_bias: [..., dv, n] corrections behind a zero checkpoint; without a delta rule all of U.
        u_map: [..., dk, n], or None without a delta rule.
        o_bias: [..., dv, n] outputs behind a zero checkpoint.
        o_map: [..., dk, n].
        fold: [..., n, dk] keys decayed to the end of the window.
        total: [..., 1, 1] or [..., 1, dk] decay of the checkpoint over the window.
    """

    u_bias: Tensor
    u_map: Tensor | None
    o_bias: Tensor
    o_map: Tensor
    fold: Tensor
    total: Tensor


def affine_window(
    *, q: Tensor, k: Tensor, v: Tensor, decays: WindowDecays, beta: Tensor | None
) -> AffineWindow:
    """Everything in an unrounded window that does not depend on the checkpoint.

    Args:
        q: [..., n, dk].
        k: [..., n, dk].
        v: [..., n, dv], what is written (Mamba-2: Δ·x).
        decays: of the n steps.
        beta: [..., n] for delta rules, else None.
    """
    fold, total = decays.to_end(k), decays.total(k.dtype)
    o_map = decays.from_start(q).mT
    if beta is None:
        (weights,) = decays.products(k, q)
        return AffineWindow(
            u_bias=v.mT,
            u_map=None,
            o_bias=torch.matmul(v.mT, weights.mT),
            o_map=o_map,
            fold=fold,
            total=total,
        )
    overlaps, weights = decays.products(k, k, q)
    strength = beta.unsqueeze(-1)
    inverse = _unit_lower_inverse(strength * overlaps)
    u_bias = torch.matmul((strength * v).mT, inverse.mT)
    u_map = -torch.matmul((strength * decays.from_start(k)).mT, inverse.mT)
    return AffineWindow(
        u_bias=u_bias,
        u_map=u_map,
        o_bias=torch.matmul(u_bias, weights.mT),
        o_map=o_map + torch.matmul(u_map, weights.mT),
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
