"""Rows that store alike, scanned together.

A lane holds one or more policies of the same window, copies, formats and record types, for all
streams; its products run as one batch. The casts, which dominate, see all its rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.formats import Format, quantize
from quantlab.recurrence import OpInputs
from quantlab.recurrence.layout import Windows, cut, flat
from quantlab.replay.draws import READ, RECUR, Draws
from quantlab.replay.plans import Plan
from quantlab.replay.policy import Policy
from quantlab.replay.recorded import RecordedWindows, replayed
from quantlab.replay.records import OpenWindow, RecordTypes
from quantlab.replay.single import StepWindows
from quantlab.replay.whole import WholeWindows


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneKind:
    """What rows of a lane have in common.

    Attributes:
        window: L.
        read: format of the read copy, None with one copy.
        recur: format of the recurrence or only copy.
        types: of the records.
        rederive: whether a flush derives corrections again.
        partial: whether the formats apply to some heads only (which ones may differ by row).
    """

    window: int
    read: Format | None
    recur: Format
    types: RecordTypes
    rederive: bool
    partial: bool = False

    @classmethod
    def of(cls, policy: Policy, inputs: OpInputs, partial: bool = False) -> LaneKind:
        """Kind of a policy's rows on a layer's inputs, which tell the record types."""
        types = RecordTypes.of(policy.records, inputs)
        if policy.window == 1:
            types = RecordTypes(k=None, v=None, u=None)  # the L-th token is never recorded
        separate = policy.kind == "separate"
        # With one copy and exact records the cached corrections are the derived ones.
        rederive = policy.corrections == "rederive" or (types.exact and not separate)
        return cls(
            window=policy.window,
            read=policy.read if separate else None,
            recur=policy.recur,
            types=types,
            rederive=rederive or not inputs.is_delta,
            partial=partial,
        )

    def plans_whole(self, is_delta: bool) -> bool:
        """Whether whole windows are affine in the copies (see `whole`)."""
        return not is_delta or (self.types.exact and self.rederive)


def stores_exactly(fmt: Format, inputs: OpInputs) -> bool:
    """Whether storing a state computed from these inputs in a format changes nothing."""
    return fmt.element.name == "float64" or (fmt.is_exact and inputs.compute_dtype == torch.float32)


def members(
    policies: Sequence[Policy], layer: int, inputs: OpInputs
) -> dict[LaneKind, list[tuple[int, Policy, tuple[bool, ...] | None]]]:
    """Sort a scan's policies by what they store in one layer.

    Returns:
        By kind: index of the policy, the policy of all heads it is there, and the heads that its
        formats apply to (None for all).
    """
    found: dict[LaneKind, list[tuple[int, Policy, tuple[bool, ...] | None]]] = {}
    for index, policy in enumerate(policies):
        here, applies = policy.at(layer, inputs.heads)
        kind = LaneKind.of(here, inputs, applies is not None)
        found.setdefault(kind, []).append((index, here, applies))
    return found


def applied(stored: Tensor, state: Tensor, applies: Tensor) -> Tensor:
    """Keep stored values of some heads, and what FP32 makes of the state of the others.

    Args:
        stored: [rows, H, dv, dk].
        state: likewise, before the cast.
        applies: bool [rows, H].
    """
    exact = state if state.dtype == torch.float32 else state.float().to(state.dtype)
    return torch.where(applies[..., None, None], stored, exact)


class Lane:
    """Copies and records of some rows of one layer.

    Args:
        kind: what the rows have in common.
        policies: their indices in the scan; rows are policies × streams, streams fastest.
        streams: [n_streams] global stream ids.
        exact: whether storing in the recurrence copy's format changes nothing.
        applies: of every policy, the heads that the formats apply to; None for all.

    Attributes:
        recur: [rows, H, dv, dk] recurrence or only copy, values of its format.
        read: [rows, H, dv, dk] read copy, None with one copy.
        open: records of an open window, None at h = 0.
        rows: which rows of the scan these are.
    """

    def __init__(
        self,
        kind: LaneKind,
        policies: Sequence[int],
        streams: Tensor,
        *,
        exact: bool,
        applies: Sequence[Sequence[bool]] | None = None,
    ) -> None:
        self.kind = kind
        self.policies = list(policies)
        self.streams = streams.numel()
        self.recur: Tensor = torch.empty(0)
        self.read: Tensor | None = None
        self.open: OpenWindow | None = None
        self._exact = exact
        self._applies: Tensor | None = None
        if applies is not None:
            heads = torch.tensor([list(row) for row in applies], device=streams.device)
            self._applies = heads.repeat_interleave(self.streams, 0)
        first, count = self.policies[0], len(self.policies)
        self.rows: slice | Tensor
        if self.policies == list(range(first, first + count)):
            self.rows = slice(first * self.streams, (first + count) * self.streams)
        else:
            starts = torch.tensor(self.policies, device=streams.device) * self.streams
            within = torch.arange(self.streams, device=streams.device)
            self.rows = (starts.unsqueeze(1) + within).flatten()

    @property
    def n_rows(self) -> int:
        """Policies of this lane × streams."""
        return len(self.policies) * self.streams

    def start(self, state: Tensor, draws: Draws) -> None:
        """Store a post-prefill state [rows, H, dv, dk], as any flush would.

        Args:
            state: of this lane's rows; not kept.
            draws: of flush 0.
        """
        self.open = None
        self.recur = state.clone()
        self._store(draws)

    def plan(self, piece: OpInputs) -> Plan:
        """Plan the whole windows that a piece of inputs, of this lane's rows, is made of."""
        windows = cut(piece, self.kind.window)
        if self.kind.window == 1:
            return StepWindows.plan(windows)
        if self.kind.plans_whole(piece.is_delta):
            separate = self.kind.read is not None
            return WholeWindows.plan(windows, self.kind.types, separate=separate)
        return self._recorded(windows, flushes=True)

    def run(self, plan: Plan, w: int, draws: Draws) -> None:
        """Run window w of a plan and store."""
        self._advance(plan, w)
        self._store(draws)

    def part(self, piece: OpInputs, draws: Draws | None) -> Tensor:
        """Run steps that are only part of a window.

        Args:
            piece: m steps of this lane's rows.
            draws: of the flush, if these steps complete the window.

        Returns:
            Outputs [1, B, dv, m].
        """
        plan = self._recorded(cut(piece, piece.steps), flushes=draws is not None)
        self._advance(plan, 0)
        if draws is None:
            self.open = plan.left_open()
        else:
            self.open = None
            self._store(draws)
        return plan.outputs()

    def state(self) -> Tensor:
        """Form what a flush at this point would store, before its cast: [rows, H, dv, dk]."""
        if self.open is None:
            return self.recur
        state = replayed(flat(self.recur), self.open, rederive=self.kind.rederive)
        return state.view_as(self.recur)

    def sums(self) -> Tensor:
        """Form a number per row, [rows], that is finite while its stored copies are."""
        sums = self.recur.flatten(1).sum(1)
        return sums if self.read is None else sums + self.read.flatten(1).sum(1)

    def tensors(self) -> dict[str, Tensor]:
        """All that a later segment needs, by name."""
        named = {"recur": self.recur}
        if self.read is not None:
            named["read"] = self.read
        if self.open is not None:
            named |= {f"open.{name}": x for name, x in self.open.tensors().items()}
        return named

    def load(self, named: dict[str, Tensor]) -> None:
        """Take over what `tensors` gave."""
        self.recur = named["recur"].clone()
        self.read = named["read"].clone() if "read" in named else None
        if (self.read is None) != (self.kind.read is None):
            raise ValueError("the saved state has other copies than the policies here")
        self.open = None
        if "open.k" in named:
            self.open = OpenWindow(
                k=named["open.k"],
                v=named["open.v"],
                u=named["open.u"],
                log_decay=named["open.log_decay"],
                beta=named.get("open.beta"),
            )

    def _advance(self, plan: Plan, w: int) -> None:
        recur = flat(self.recur)
        state = plan.run(w, recur, recur if self.read is None else flat(self.read))
        self.recur = state.view_as(self.recur)

    def _recorded(self, windows: Windows, *, flushes: bool) -> RecordedWindows:
        return RecordedWindows.plan(
            windows,
            self.kind.types,
            behind=self.open,
            flushes=flushes,
            separate=self.kind.read is not None,
            rederive=self.kind.rederive,
        )

    def _store(self, draws: Draws) -> None:
        """Cast the FP32 (or FP64) state in `recur` into each copy, never one from the other."""
        state = self.recur
        if self.kind.read is not None:
            self.read = self._cast(state, self.kind.read, draws, READ)
        if not self._exact:
            self.recur = self._cast(state, self.kind.recur, draws, RECUR)

    def _cast(self, state: Tensor, fmt: Format, draws: Draws, copy: int) -> Tensor:
        words = draws.words(copy) if fmt.needs_words else None
        by_stream = state.view(-1, self.streams, *state.shape[1:])
        stored = quantize(by_stream, fmt, words, counts=False)[0].view_as(state)
        return stored if self._applies is None else applied(stored, state, self._applies)
