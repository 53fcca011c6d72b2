"""Whole windows in which no record is rounded, planned many at a time.

Corrections, outputs and the flushed state are then affine in the checkpoints (see
`recurrence.window`), also where two copies are kept: the read copy gives the outputs of steps
1 … L − 1 and nothing else, since corrections re-derived at the flush come from the recurrence copy.
A window costs one product per copy and one for the fold.

For Mamba-2 this holds with rounded records as well: nothing in a record depends on the state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.recurrence.layout import Windows
from quantlab.recurrence.window import affine_window
from quantlab.replay.records import RecordTypes, rounded


@dataclass(slots=True, kw_only=True)
class WholeWindows:
    """W planned windows of B heads; biases become results as the windows are run.

    Attributes:
        flush: [W, B, dv, c] biases of what comes from the recurrence copy.
        flush_map: [W, B, dk, c].
        read: [W, B, dv, L − 1] biases of what comes from the read copy; None with one copy.
        read_map: [W, B, dk, L − 1] or None.
        written: [W, B, dv, L] what the fold writes; for delta rules a view of `flush`.
        fold: [W, B, L, dk] keys decayed to the window's end.
        total: [W, B, 1, 1 or dk] decay of the checkpoint over the window.
    """

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
        own, beta = windows.written, windows.beta
        if beta is not None or types.exact:
            plan = affine_window(q=windows.q, k=windows.k, v=own, decays=windows.decays, beta=beta)
            u_bias, o_bias, fold = plan.u_bias, plan.o_bias, plan.fold
            u_map, o_map, total = plan.u_map, plan.o_map, plan.total
        else:
            decays = windows.decays
            k, v = recorded(windows, types)
            (weights,) = decays.products(k, windows.q)
            direct = (windows.q * windows.k).sum(-1)
            o_bias = torch.matmul(v.mT, weights.tril(-1).mT) + own.mT * direct.unsqueeze(-2)
            u_bias, u_map = v.mT, None
            o_map = decays.from_start(windows.q).mT
            fold, total = decays.to_end(k), decays.total(k.dtype)
        length = own.shape[-2]
        last = slice(length - 1, length) if separate else slice(0, length)
        flush, flush_map = o_bias[..., last], o_map[..., last]
        if u_map is not None:
            flush = torch.cat([u_bias, flush], -1)
            flush_map = torch.cat([u_map, flush_map], -1)
        return cls(
            flush=flush.contiguous(),
            flush_map=flush_map.contiguous(),
            read=o_bias[..., :-1].contiguous() if separate else None,
            read_map=o_map[..., :-1].contiguous() if separate else None,
            written=u_bias if u_map is None else flush[..., :length],
            fold=fold,
            total=total,
        )

    def run(self, w: int, recur: Tensor, read: Tensor) -> Tensor:
        """Run window w; see `plans.Plan`. `recur` is used up."""
        self.flush[w].baddbmm_(recur, self.flush_map[w])
        if self.read is not None and self.read_map is not None:
            self.read[w].baddbmm_(read, self.read_map[w])
        return recur.mul_(self.total[w]).baddbmm_(self.written[w], self.fold[w])

    def outputs(self) -> Tensor:
        """Return outputs [W, B, dv, L], after all windows have run."""
        length = self.fold.shape[-2]
        if self.read is None:
            return self.flush[..., -length:]
        return torch.cat([self.read, self.flush[..., -1:]], -1)


def recorded(windows: Windows, types: RecordTypes) -> tuple[Tensor, Tensor]:
    """Keys and written values as a flush sees them: records, but the last step's own values."""
    k, v = rounded(windows.k, types.k), rounded(windows.v, types.v)
    if windows.dt is not None:
        v = windows.dt.unsqueeze(-1) * v
    if types.k is not None:
        k = torch.cat([k[..., :-1, :], windows.k[..., -1:, :]], -2)
    if types.v is not None:
        v = torch.cat([v[..., :-1, :], windows.written[..., -1:, :]], -2)
    return k, v
