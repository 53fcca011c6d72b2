"""Windows of a single step (L = 1): conventional decoding, stored at every token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.recurrence.layout import Windows
from quantlab.recurrence.step import read, write


@dataclass(slots=True, kw_only=True)
class StepWindows:
    """W windows of one step each, by the textbook step, bit for bit.

    Attributes:
        windows: [W, B, 1, …] inputs.
        written: [W, B, dv] values or Δ·x.
        results: [W, B, dv] outputs, filled as steps are taken.
    """

    windows: Windows
    written: Tensor
    results: Tensor

    @classmethod
    def plan(cls, windows: Windows) -> StepWindows:
        """Prepare steps."""
        written = windows.written[:, :, 0]
        return cls(windows=windows, written=written, results=torch.empty_like(written))

    def run(self, w: int, recur: Tensor, read_copy: Tensor) -> Tensor:
        """Take step w; see `plans.Plan`."""
        x = self.windows
        state, _ = write(
            recur,
            k=x.k[w, :, 0],
            v=self.written[w],
            log_decay=x.log_decay[w, :, 0],
            beta=None if x.beta is None else x.beta[w, :, 0],
        )
        self.results[w] = read(state, x.q[w, :, 0])
        return state

    def outputs(self) -> Tensor:
        """Return outputs [W, B, dv, 1], after all steps."""
        return self.results.unsqueeze(-1)
