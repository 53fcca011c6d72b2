"""What the three ways to run windows have in common.

`single` runs windows of one step, `whole` whole windows without rounded records, `recorded` all
others.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Plan(Protocol):
    """Windows of one lane with all that does not depend on a checkpoint formed beforehand."""

    def run(self, w: int, recur: Tensor, read: Tensor, /) -> Tensor:
        """Run window w; its outputs stay in the plan.

        Args:
            w: index.
            recur: [B, dv, dk] recurrence or only copy; may be overwritten.
            read: [B, dv, dk] the copy that steps before the L-th read; `recur` with one copy.

        Returns:
            [B, dv, dk] the state to be stored, before any cast; where the window stays open,
            `recur` as it was.
        """
        ...

    def outputs(self) -> Tensor:
        """Return outputs [W, B, dv, steps of a window], after all windows have run."""
        ...
