"""The FP64 recurrences that run beside a watched scan, on the op inputs of the run.

The rows of a state never meet: S' = S·A + v kᵀ acts on each value row alone. Recurrences that share
keys and gates are therefore value rows of one state, and one pass forms what depends on keys and
gates alone once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantlab.analysis.shadow import in_double, nothing_written
from quantlab.recurrence import OpInputs, exact_scan


def side_by_side(
    inputs: OpInputs, states: Sequence[Tensor], values: Sequence[Tensor] | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Run several states on the same keys, queries and gates.

    Args:
        inputs: of the run.
        states: [rows, H, dv, dk] each.
        values: [rows, T, H, dv] what each state is written; the inputs' own v for all if None.

    Returns:
        Outputs [rows, T, H, dv] and final states, one each, in the inputs' compute dtype.
    """
    dv = inputs.dv
    v = torch.cat([inputs.v] * len(states) if values is None else list(values), -1)
    o, after = exact_scan(replace(inputs, v=v), torch.cat(list(states), 2))
    return list(torch.split(o, dv, -1)), list(torch.split(after, dv, 2))


class Companions:
    """Shadow, restart, probe and (for delta rules) oracle of one layer.

    Args:
        exact: [rows, H, dv, dk] FP64 state after the prompt, unrounded.
        stored: likewise, as stored.

    Attributes:
        shadow: [rows, H, dv, dk] the exact state.
        restart: likewise the exact course from a stored state; see `restart_from`.
        probe: likewise what is left of the first store's error.
        oracle: likewise what is left of the first store's error if no delta rule read it
            back; the probe itself without one.
    """

    def __init__(self, exact: Tensor, stored: Tensor) -> None:
        self.shadow = exact.clone()
        self.restart = stored.clone()
        self.probe = stored - exact
        self.oracle = self.probe.clone()

    def restart_from(self, stored: Tensor, rows: slice) -> None:
        """Have some rows' restart begin here, from [n, H, dv, dk]."""
        self.restart[rows] = stored.double()

    def advance(self, inputs: OpInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Take some steps.

        Returns:
            Outputs [rows, T, H, dv] FP64 of the shadow, the probe and the oracle.
        """
        exact = in_double(inputs)
        (shadow, _, probe), (self.shadow, self.restart, self.probe) = side_by_side(
            exact,
            (self.shadow, self.restart, self.probe),
            (exact.v, exact.v, torch.zeros_like(exact.v)),
        )
        if not inputs.is_delta:
            self.oracle = self.probe
            return shadow, probe, probe
        left, self.oracle = exact_scan(nothing_written(exact, feedback=False), self.oracle)
        return shadow, probe, left
