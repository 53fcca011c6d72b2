"""Whole windows in which no record is rounded, planned many at a time.

Corrections, outputs and the flushed state are then affine in the checkpoints (see
`recurrence.window`), also where two copies are kept: the read copy gives the outputs of steps
1 … L − 1 and nothing else, since corrections re-derived at the flush come from the recurrence copy.
A window costs one product per copy and one for the fold.

For Mamba-2 this holds with rounded records as well: nothing in a record depends on the state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantlab.recurrence.layout import Windows
from quantlab.recurrence.window import AffineWindow, affine_window
from quantlab.replay.records import RecordTypes, rounded


@dataclass(slots=True, kw_only=True)
class WholeWindows:
    """W planned windows of B heads; biases become results as the windows are run.

    Attributes:
        length: L.
        flush: [W, B, dv, c] biases of the columns that come from the recurrence copy: o_L (with
            one copy o_1 … o_L), then for delta rules the decayed corrections.
        flush_map: [W, B, dk, c].
        read: [W, B, dv, L − 1] biases of the outputs that come from the read copy, or None.
        read_map: [W, B, dk, L − 1] or None.
        written: [W, B, dv, L] what the fold writes; for delta rules a view of `flush`.
        fold: [W, B, L, dk] keys.
        total: [W, B, 1, 1 or dk] decay of the checkpoint over the window.
    """

    length: int
    flush: Tensor
    flush_map: Tensor
    read: Tensor | None
    read_map: Tensor | None
    written: Tensor
    fold: Tensor
    total: Tensor

    @classmethod
    def plan(cls, windows: Windows, types: RecordTypes, *, separate: bool) -> WholeWindows:
        """Form all that does not depend on a checkpoint.

        Args:
            windows: of L steps each.
            types: must be exact for a delta rule.
            separate: whether steps 1 … L − 1 read a copy of their own.
        """
        length = windows.v.shape[-2]
        if windows.beta is not None or types.exact:
            plan = affine_window(
                q=windows.q,
                k=windows.k,
                v=windows.written,
                decays=windows.decays,
                beta=windows.beta,
                keys_queries=windows.keys_queries,
            )
        else:
            plan = _rounded_window(windows, types)
        columns = plan.of_met.shape[-1]
        first = length - 1 if separate else 0
        flush, flush_map = plan.columns(first, columns)
        read, read_map = plan.columns(0, first) if separate else (None, None)
        return cls(
            length=length,
            flush=flush,
            flush_map=flush_map,
            read=read,
            read_map=read_map,
            written=flush[..., -length:] if plan.written is None else plan.written,
            fold=plan.fold,
            total=plan.total,
        )

    def run(self, w: int, recur: Tensor, read: Tensor) -> Tensor:
        """Run window w; see `plans.Plan`. `recur` is used up."""
        self.flush[w].baddbmm_(recur, self.flush_map[w])
        if self.read is not None and self.read_map is not None:
            self.read[w].baddbmm_(read, self.read_map[w])
        return recur.mul_(self.total[w]).baddbmm_(self.written[w], self.fold[w])

    def outputs(self) -> Tensor:
        """Return outputs [W, B, dv, L], after all windows have run."""
        if self.read is None:
            return self.flush[..., : self.length]
        return torch.cat([self.read, self.flush[..., :1]], -1)


def _rounded_window(windows: Windows, types: RecordTypes) -> AffineWindow:
    """Form a window without a delta rule whose later steps see records.

    Each step's own write enters its own output unrounded, and so does the last one the fold.
    """
    own, decays = windows.written, windows.decays
    k, v = rounded(windows.k, types.k), rounded(windows.v, types.v)
    if windows.dt is not None:
        v = windows.dt.unsqueeze(-1) * v
    k = torch.cat([k[..., :-1, :], windows.k[..., -1:, :]], -2)
    v = torch.cat([v[..., :-1, :], own[..., -1:, :]], -2)
    plan = affine_window(q=windows.q, k=k, v=v, decays=decays, beta=None)
    direct = (windows.q * windows.k).sum(-1)
    return replace(
        plan,
        values=torch.cat([v, own], -2),
        of_values=torch.cat([plan.of_values.triu(1), torch.diag_embed(direct)], -2),
    )
