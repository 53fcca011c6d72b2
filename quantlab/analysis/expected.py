"""Expected squared output error of every head at every length, from gains and write errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.analysis.pullback import Gains
from quantlab.analysis.write_errors import WriteErrors
from quantlab.replay import Policy

EARLY, OLDER, LAST = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Mean over a window's steps of E‖D q‖², by the copy whose error it is.

    Attributes:
        kept: [policies, entries, H] of errors that the recurrence carries along.
        fresh: [policies, H] of the read copy's own cast.
    """

    kept: Tensor
    fresh: Tensor


def expected_errors(
    errors: WriteErrors, gains: Gains, policies: Sequence[Policy], dv: int
) -> Expected:
    """Combine them, see `pullback`.

    Args:
        errors: of all policies.
        gains: for the policies' window; the first entry is of one store.
        policies: of one window.
        dv: value rows.

    Raises:
        ValueError: the gains do not begin with one store, or are of another window.
    """
    if gains.stores[0] != 1 or any(p.window != gains.window for p in policies):
        raise ValueError("gains are to be of the policies' window, and to begin with one store")
    kept, fresh = [], []
    for p, policy in enumerate(policies):
        early = OLDER if policy.kind == "separate" else EARLY
        square = gains.squares[:, early] + gains.squares[:, LAST]
        total = (square * errors.variance[p]).sum(-1)
        if errors.bias is not None and gains.products is not None:
            product = gains.products[:, early] + gains.products[:, LAST]
            total = total + (product * errors.bias[p]).sum((-2, -1)).clamp(min=0)
        kept.append(dv * total)
        fresh.append(dv * (gains.squares[0, EARLY] * errors.fresh[p]).sum(-1))
    return Expected(kept=torch.stack(kept), fresh=torch.stack(fresh))
