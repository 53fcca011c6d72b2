"""Windows with rounded records, and windows that are only partly here.

The general form: h records lie behind, m new steps come, and if they complete the window the last
of them flushes it. Rounding points:

1. a step's own output and correction use its unrounded k, v and u;
2. its k, v and u are rounded to their records before the next step, inside the substitution;
3. the step that completes a window is not recorded: it is folded as it is;
4. at that step the recurrence copy is read; corrections of a delta rule are derived again from it
   in the compute dtype, from the recorded k and v, unrounded (`rederive`), or the records of u are
   folded (`fold`).

The output of the last step is that of the state to be stored.

A record of u beyond FP16's range is infinite, as IEEE has it; all outputs of its window, earlier
ones included, are then not finite (0·∞ in the products), where one token at a time only later
ones are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.recurrence.decays import WindowDecays
from quantlab.recurrence.layout import Windows
from quantlab.recurrence.window import affine_window, substitute
from quantlab.replay.records import OpenWindow, RecordTypes, rounded


@dataclass(slots=True, kw_only=True)
class RecordedWindows:
    """W windows of B heads: h old records and m new steps in each, n = h + m.

    Attributes:
        types: of the records.
        flushes: whether step n is the L-th.
        separate: whether the read copy is another than the recurrence copy.
        first: h.
        k: [W, B, n, dk] keys as recorded, step n's own where it flushes.
        v: [W, B, n, dv] values as recorded, likewise (what corrections come from).
        own: [W, B, m, dv] what new steps write before rounding: Δ·x; or βv, which becomes the
            correction as windows are run.
        query_map: [W, B, m, dk] γ_{1:s} q_s of the new steps.
        key_map: [W, B, m, dk] −β_s γ_{1:s} k_s of the new steps; None without a delta rule.
        overlaps: [W, B, m, n] β_s γ_{j+1:s} k_j·k_s for j < s, or None.
        weights: [W, B, m, n] γ_{j+1:s} k_j·q_s for j < s, else 0.
        direct: [W, B, m, 1] k_s·q_s of the steps' own, unrounded keys.
        written: [W, B, n, dv] records of what was written; filled as windows are run.
        log_decay: [W, B, n] or [W, B, n, dk].
        beta: [W, B, n] or None.
        fold: [W, B, n, dk] recorded keys decayed to the end.
        total: [W, B, 1, 1 or dk] decay of the checkpoint until the end.
        again: [W, B, dv, 1 + n] biases of o_n and the decayed corrections from the recurrence
            copy, where a flush derives them again, else None.
        again_map: [W, B, dk, 1 + n] or None.
        again_fold: [W, B, n, dk] or None.
        results: [W, B, m, dv] outputs, filled as windows are run.
    """

    types: RecordTypes
    flushes: bool
    separate: bool
    first: int
    k: Tensor
    v: Tensor
    own: Tensor
    query_map: Tensor
    key_map: Tensor | None
    overlaps: Tensor | None
    weights: Tensor
    direct: Tensor
    written: Tensor
    log_decay: Tensor
    beta: Tensor | None
    fold: Tensor
    total: Tensor
    again: Tensor | None
    again_map: Tensor | None
    again_fold: Tensor | None
    results: Tensor

    @classmethod
    def plan(
        cls,
        new: Windows,
        types: RecordTypes,
        *,
        behind: OpenWindow | None,
        flushes: bool,
        separate: bool,
        rederive: bool,
    ) -> RecordedWindows:
        """Form all that does not depend on a checkpoint.

        Args:
            new: m steps each.
            types: of the records.
            behind: h records, for a single window; None for h = 0.
            flushes: whether the new steps complete the window.
            separate: whether there is a read copy of its own.
            rederive: of the policy.
        """
        h = 0 if behind is None else behind.count
        own, beta = new.written, new.beta
        k, v = rounded(new.k, types.k), rounded(new.v, types.v)
        if new.dt is not None:
            v = new.dt.unsqueeze(-1) * v
        if flushes:
            k = torch.cat([k[:, :, :-1], new.k[:, :, -1:]], 2)
            v = torch.cat([v[:, :, :-1], own[:, :, -1:]], 2)
        log_decay = new.log_decay
        written = torch.empty_like(v)
        if behind is not None:
            k, v = _after(behind.k, k), _after(behind.v, v)
            log_decay = _after(behind.log_decay, log_decay)
            written = _after(behind.u, written)
            if beta is not None and behind.beta is not None:
                beta = _after(behind.beta, beta)
        decays = WindowDecays.of(log_decay, per_channel=log_decay.ndim == 4)
        # Rows of old steps are formed and dropped: their outputs are out already.
        pad = new.q.new_zeros((*new.q.shape[:2], h, new.q.shape[-1]))
        q, k_own = torch.cat([pad, new.q], 2), torch.cat([pad, new.k], 2)
        key_map = overlaps = again = again_map = again_fold = None
        starts, ends = decays.start_factors(k.dtype), decays.end_factors(k.dtype)
        if new.beta is None:
            (weights,) = decays.products(k, q)
        else:
            overlaps, weights = decays.products(k, k_own, q)
            strength = new.beta.unsqueeze(-1)
            overlaps = strength * overlaps[:, :, h:]
            key_map = -strength * (starts * k_own)[:, :, h:]
            own = strength * own
            if flushes and rederive:
                window = affine_window(q=q, k=k, v=v, decays=decays, beta=beta)
                n = k.shape[2]
                again, again_map = window.columns(n - 1, 2 * n)
                again_fold = window.fold
        return cls(
            types=types,
            flushes=flushes,
            separate=separate,
            first=h,
            k=k,
            v=v,
            own=own,
            query_map=(starts * q)[:, :, h:],
            key_map=key_map,
            overlaps=overlaps,
            weights=weights.tril(-1)[:, :, h:],
            direct=(new.q * new.k).sum(-1, keepdim=True),
            written=written,
            log_decay=log_decay,
            beta=beta,
            fold=k * ends,
            total=decays.total(k.dtype),
            again=again,
            again_map=again_map,
            again_fold=again_fold,
            results=torch.empty_like(own),
        )

    def run(self, w: int, recur: Tensor, read: Tensor) -> Tensor:
        """Run window w; see `plans.Plan`. `recur` is used up where the window flushes."""
        steps = self.own.shape[2] - (0 if self.again is None else 1)
        if steps:
            self._read_out(w, recur, read, steps)
        if not self.flushes:
            return recur
        if self.again is None or self.again_map is None or self.again_fold is None:
            self.written[w][:, -1] = self.own[w][:, -1]
            u, fold = self.written[w].mT, self.fold[w]
        else:
            columns = self.again[w].baddbmm_(recur, self.again_map[w])
            self.results[w][:, -1] = columns[..., 0]
            u, fold = columns[..., 1:], self.again_fold[w]
        return recur.mul_(self.total[w]).baddbmm_(u, fold)

    def _read_out(self, w: int, recur: Tensor, read: Tensor, steps: int) -> None:
        """Form outputs and records of the first `steps` new steps.

        The last of them is the flush step only where corrections are not derived again; it meets
        the recurrence copy then.
        """
        last_meets_recur = self.flushes and self.separate and self.again is None
        out, queries = self.results[w][:, :steps], self.query_map[w][:, :steps]
        out.copy_(torch.bmm(queries, read.mT))
        if last_meets_recur:
            out[:, -1:] = torch.bmm(queries[:, -1:], recur.mT)
        own, written = self.own[w][:, :steps], self.written[w]
        if self.key_map is None or self.overlaps is None:
            written[:, self.first :] = self.v[w][:, self.first :]
        else:
            keys = self.key_map[w][:, :steps]
            met = steps - 1 if last_meets_recur else steps
            own[:, :met] += torch.bmm(keys[:, :met], read.mT)
            if last_meets_recur:
                own[:, met:] += torch.bmm(keys[:, met:], recur.mT)
            substitute(
                own,
                self.overlaps[w],
                written,
                first=self.first,
                round_row=lambda row: rounded(row, self.types.u),
            )
        n = self.first + steps
        out.baddbmm_(self.weights[w][:, :steps, :n], written[:, :n])
        out.addcmul_(self.direct[w][:, :steps], own)

    def outputs(self) -> Tensor:
        """Return outputs [W, B, dv, m], after all windows have run."""
        return self.results.mT

    def left_open(self) -> OpenWindow:
        """Return the records of a single window that does not flush, after its run."""
        return OpenWindow(
            k=self.k[0],
            v=self.v[0] if self.beta is not None else self.written[0],
            u=self.written[0],
            log_decay=self.log_decay[0],
            beta=None if self.beta is None else self.beta[0],
        )


def replayed(recur: Tensor, behind: OpenWindow, *, rederive: bool) -> Tensor:
    """Replay records onto a recurrence copy: the state that a flush at this point would store.

    Args:
        recur: [B, dv, dk], left as it was.
        behind: h ≥ 1 records.
        rederive: whether corrections are derived again from `recur`.

    Returns:
        [B, dv, dk].
    """
    per_channel = behind.log_decay.ndim == 3
    decays = WindowDecays.of(behind.log_decay, per_channel=per_channel)
    if rederive and behind.beta is not None:
        window = affine_window(q=behind.k, k=behind.k, v=behind.v, decays=decays, beta=behind.beta)
        n = behind.count
        bias, met = window.columns(n, 2 * n)
        u, fold = torch.baddbmm(bias, recur, met), window.fold
    else:
        u, fold = behind.u.mT, behind.k * decays.end_factors(recur.dtype)
    return torch.baddbmm(recur * decays.total(recur.dtype), u, fold)


def _after(records: Tensor, new: Tensor) -> Tensor:
    """Old records [B, h, …] in front of the only window's new ones [1, B, m, …]."""
    return torch.cat([records.unsqueeze(0), new], 2)
