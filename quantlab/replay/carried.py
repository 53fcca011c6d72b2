"""What one layer's scan carries from segment to segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantlab.replay.lane import Lane


@dataclass(slots=True)
class Group:
    """Lanes of one window length: they flush together.

    Attributes:
        window: L.
        lanes: by what they store.
        phase: h, records in the open windows.
        flush: index of the next store.
        position: tokens consumed since the prompt.
    """

    window: int
    lanes: list[Lane]
    phase: int = 0
    flush: int = 0
    position: int = 0


@dataclass(slots=True)
class ScanState:
    """All that one layer carries from segment to segment.

    Attributes:
        groups: copies, open records, phases and flush indices.
        diverged_at: [rows] int64, the first position whose stored state was not finite, −1 for
            none; 0 is the post-prefill store.
    """

    groups: list[Group]
    diverged_at: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors by name; copies, not views."""
        named = {"diverged_at": self.diverged_at.clone()}
        for g, group in enumerate(self.groups):
            counters = [group.window, group.phase, group.flush, group.position]
            named[f"{g}.counters"] = torch.tensor(counters, dtype=torch.int64)
            for i, lane in enumerate(group.lanes):
                for name, x in lane.tensors().items():
                    named[f"{g}.{i}.{name}"] = x.clone()
        return named

    def load_state_dict(self, named: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict` of a scan with the same policies, streams and shapes.

        Raises:
            ValueError: it is of other policies.
        """
        device = self.diverged_at.device
        windows = [int(named[f"{g}.counters"][0]) for g in range(_count(named))]
        if windows != [group.window for group in self.groups]:
            raise ValueError(
                f"the saved state has windows {windows}, the policies here need "
                f"{[group.window for group in self.groups]}"
            )
        for g, group in enumerate(self.groups):
            counters = named[f"{g}.counters"].tolist()
            _, group.phase, group.flush, group.position = counters
            for i, lane in enumerate(group.lanes):
                prefix = f"{g}.{i}."
                lane.load(
                    {
                        name.removeprefix(prefix): x.to(device)
                        for name, x in named.items()
                        if name.startswith(prefix)
                    }
                )
        self.diverged_at = named["diverged_at"].to(device).clone()


def mark_diverged(
    diverged_at: Tensor,
    rows: slice | Tensor,
    sums: Sequence[Tensor],
    *,
    first: int,
    stride: int = 1,
) -> None:
    """Note the earliest store whose sums [rows] are not finite; store i is at first + i·stride."""
    bad = ~torch.isfinite(torch.stack(list(sums)))
    at = first + stride * bad.int().argmax(0)
    known = diverged_at[rows]
    diverged_at[rows] = torch.where((known < 0) & bad.any(0), at, known)


def _count(named: Mapping[str, Tensor]) -> int:
    count = 0
    while f"{count}.counters" in named:
        count += 1
    return count
