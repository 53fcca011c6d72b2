"""The FP64 recurrences that run beside a watched scan, on the op inputs of the run.

The rows of a state never meet: S' = S·A + v kᵀ acts on each value row alone. Recurrences that share
keys and gates are therefore value rows of one state, and one pass forms what depends on keys and
gates alone once for all of them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quantlab.analysis.shadow import in_double, nothing_written
from quantlab.recurrence import OpInputs, exact_scan


class Companions:
    """Shadow, restart, probe and (for delta rules) oracle of one layer.

    Args:
        exact: [rows, H, dv, dk] FP64 state after the prompt, unrounded.
        stored: likewise, as stored.

    Attributes:
        oracle: [rows, H, dv, dk] what is left of the first store's error if no delta rule read it
            back; the probe itself without one.
    """

    def __init__(self, exact: Tensor, stored: Tensor) -> None:
        self._dv = exact.shape[2]
        self._stack = torch.cat([exact, stored, stored - exact], 2)
        self.oracle = stored - exact

    @property
    def shadow(self) -> Tensor:
        """[rows, H, dv, dk] the exact state."""
        return self._stack[:, :, : self._dv]

    @property
    def restart(self) -> Tensor:
        """[rows, H, dv, dk] the exact course from a stored state; see `restart_from`."""
        return self._stack[:, :, self._dv : 2 * self._dv]

    @property
    def probe(self) -> Tensor:
        """[rows, H, dv, dk] what is left of the first store's error."""
        return self._stack[:, :, 2 * self._dv :]

    def restart_from(self, stored: Tensor, rows: slice) -> None:
        """Have some rows' restart begin here, from [n, H, dv, dk]."""
        self.restart[rows] = stored.double()

    def advance(self, inputs: OpInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Take some steps.

        Returns:
            Outputs [rows, T, H, dv] FP64 of the shadow, the probe and the oracle.
        """
        exact, dv = in_double(inputs), self._dv
        v = torch.cat([exact.v, exact.v, torch.zeros_like(exact.v)], -1)
        o, self._stack = exact_scan(replace(exact, v=v), self._stack)
        shadow, probe = o[..., :dv], o[..., 2 * dv :]
        if not inputs.is_delta:
            self.oracle = self.probe
            return shadow, probe, probe
        left, self.oracle = exact_scan(nothing_written(exact, feedback=False), self.oracle)
        return shadow, probe, left
