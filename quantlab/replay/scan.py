"""The windowed scan: decoding's rounding at prefill's speed.

Under teacher forcing all tokens of a segment are known. The scan walks them window by window and
rounds exactly where decoding would (arXiv 2610.13778, algorithms 1, 2, 4, 5, and their
re-derivation for two copies); `stepwise` is its oracle.

Rounding points: the post-prefill state and every flushed state, into each stored copy from the
unrounded one; records on append (`records`). Nothing else: sums are FP32 (FP64 for FP64 inputs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from quantlab.recurrence import OpInputs, exact_scan
from quantlab.recurrence.layout import uncut
from quantlab.replay.carried import Group, ScanState, mark_diverged
from quantlab.replay.draws import Draws
from quantlab.replay.lane import Lane, members, stores_exactly
from quantlab.replay.policy import Policy

# Elements of one [W, B, L, dk] tensor of a lane's plan; about six live at once for every lane.
# Measured on two cores: flat from 2^18 to 2^20, half as slow again at 2^22 (out of the caches).
PLAN_ELEMENTS = 1 << 19


class WindowedScan:
    """One recurrent layer's scan for a batch of policies × streams.

    Rows are policies × streams: row = policy · n_streams + stream. Conventional policies take
    single steps, FP32 ones too: the order of their additions is the floor under every divergence.

    Args:
        policies: any mix of kinds, formats and windows.
        streams: [n_streams] global stream ids; they key the random draws.
        layer: ordinal of the recurrent layer, likewise.
        seed: 64-bit seed, likewise.
    """

    def __init__(
        self, policies: Sequence[Policy], streams: Tensor, *, layer: int, seed: int
    ) -> None:
        if not policies or streams.ndim != 1 or streams.numel() == 0:
            raise ValueError("a scan needs at least one policy and streams [n_streams], n ≥ 1")
        self.policies = tuple(policies)
        self.streams = streams
        self.layer = layer
        self.seed = seed
        self.carried: ScanState | None = None
        self._saved: dict[str, Tensor] | None = None

    @property
    def n_rows(self) -> int:
        """Policies × streams."""
        return len(self.policies) * self.streams.numel()

    @property
    def diverged_at(self) -> Tensor:
        """[rows] int64: first position whose stored state was not finite, −1 for none.

        Position 0 is the post-prefill store. A store is checked through the sum of its elements,
        so a state whose sum leaves FP32's range counts as well.
        """
        if self.carried is None:
            return torch.full((self.n_rows,), -1, device=self.streams.device)
        return self.carried.diverged_at

    @torch.inference_mode()
    def prefill(self, inputs: OpInputs) -> Tensor:
        """Consume the prompt exactly, then store its state once: flush 0, phase h = 0.

        Args:
            inputs: the prompt, all rows.

        Returns:
            Outputs [rows, T, H, dv], FP32 (FP64 for FP64 inputs).
        """
        self._check(inputs)
        o, state = exact_scan(inputs)
        self.start(state, inputs)
        return o

    @torch.inference_mode()
    def start(self, state: Tensor, inputs: OpInputs) -> None:
        """Begin decoding from an unrounded state [rows, H, dv, dk]: store it as flush 0.

        Args:
            state: left as it was.
            inputs: any of the layer's inputs; dtypes and shapes are looked at.
        """
        self._check(inputs)
        self.carried = carried = self._build(inputs)
        for group in carried.groups:
            draws = self._draws(0, inputs)
            for lane in group.lanes:
                lane.start(state[lane.rows], draws)
                mark_diverged(carried.diverged_at, lane.rows, [lane.sums()], first=0)
            group.flush = 1

    @torch.inference_mode()
    def __call__(self, inputs: OpInputs) -> Tensor:
        """Consume the next T ≥ 1 tokens of all rows.

        Returns:
            Outputs [rows, T, H, dv], FP32 (FP64 for FP64 inputs).
        """
        self._check(inputs)
        carried = self._carried(inputs)
        shape = (inputs.n_rows, inputs.steps, inputs.heads, inputs.dv)
        o = torch.empty(shape, dtype=inputs.compute_dtype, device=inputs.v.device)
        for group in carried.groups:
            for start, stop in _pieces(group, inputs):
                if stop - start < group.window or group.phase:
                    self._part(group, inputs, o, start, stop)
                else:
                    self._whole(group, inputs, o, start, stop)
        return o

    def state(self) -> Tensor:
        """Return the current state per row, open windows replayed: [rows, H, dv, dk].

        At h = 0 this is the stored recurrence copy; else what a flush now would store, before
        its cast.
        """
        if self.carried is None:
            raise RuntimeError("no state yet: call prefill first")
        lanes = [lane for group in self.carried.groups for lane in group.lanes]
        first = lanes[0].recur
        out = first.new_empty((self.n_rows, *first.shape[1:]))
        for lane in lanes:
            out[lane.rows] = lane.state()
        return out

    def copies(self) -> tuple[Tensor, Tensor]:
        """Return what each row last stored: recurrence copies and read copies, [rows, H, dv, dk].

        A row with one copy has it in both.
        """
        if self.carried is None:
            raise RuntimeError("no state yet: call prefill first")
        lanes = [lane for group in self.carried.groups for lane in group.lanes]
        first = lanes[0].recur
        recur = first.new_empty((self.n_rows, *first.shape[1:]))
        read = torch.empty_like(recur)
        for lane in lanes:
            recur[lane.rows] = lane.recur
            read[lane.rows] = lane.recur if lane.read is None else lane.read
        return recur, read

    def state_dict(self) -> dict[str, Tensor]:
        """All that later segments depend on."""
        if self.carried is None:
            raise RuntimeError("no state yet: call prefill first")
        return self.carried.state_dict()

    @torch.inference_mode()
    def load_state_dict(self, named: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict` of a scan with the same arguments.

        Before the first call the tensors wait for it: only inputs tell record types and shapes.
        """
        if self.carried is None:
            self._saved = dict(named)
        else:
            self.carried.load_state_dict(named)

    def _carried(self, inputs: OpInputs) -> ScanState:
        if self.carried is None:
            if self._saved is None:
                raise RuntimeError("call prefill (or load_state_dict) before decoding")
            self.carried = self._build(inputs)
            self.carried.load_state_dict(self._saved)
            self._saved = None
        return self.carried

    def _check(self, inputs: OpInputs) -> None:
        if inputs.n_rows != self.n_rows:
            raise ValueError(
                f"{len(self.policies)} policies × {self.streams.numel()} streams need "
                f"{self.n_rows} rows, got {inputs.n_rows}"
            )
        if torch.get_float32_matmul_precision() != "highest":
            raise RuntimeError(
                "matrix products must be full FP32: torch.set_float32_matmul_precision('highest')"
            )

    def _build(self, inputs: OpInputs) -> ScanState:
        """Sort policies into lanes and lanes into groups."""
        groups: dict[int, Group] = {}
        for kind, found in members(self.policies, self.layer, inputs).items():
            indices = [index for index, _, _ in found]
            exact = stores_exactly(kind.recur, inputs)
            applies = [heads for _, _, heads in found if heads is not None] or None
            lane = Lane(kind, indices, self.streams, exact=exact, applies=applies)
            groups.setdefault(kind.window, Group(kind.window, [])).lanes.append(lane)
        diverged = torch.full((self.n_rows,), -1, device=inputs.v.device)
        return ScanState(list(groups.values()), diverged)

    def _draws(self, flush: int, inputs: OpInputs) -> Draws:
        return Draws(
            seed=self.seed,
            layer=self.layer,
            streams=self.streams,
            flush=flush,
            state_shape=(inputs.heads, inputs.dv, inputs.dk),
            device=inputs.v.device,
        )

    def _whole(self, group: Group, inputs: OpInputs, o: Tensor, start: int, stop: int) -> None:
        piece = inputs.slice(start, stop)
        plans = [lane.plan(piece.rows(lane.rows)) for lane in group.lanes]
        sums: list[list[Tensor]] = [[] for _ in group.lanes]
        count = (stop - start) // group.window
        for w in range(count):
            draws = self._draws(group.flush + w, inputs)
            for lane, plan, checks in zip(group.lanes, plans, sums, strict=True):
                lane.run(plan, w, draws)
                checks.append(lane.sums())
        length = group.window
        assert self.carried is not None
        diverged_at = self.carried.diverged_at
        for lane, plan, checks in zip(group.lanes, plans, sums, strict=True):
            o[lane.rows, start:stop] = uncut(plan.outputs(), inputs.heads)
            mark_diverged(
                diverged_at, lane.rows, checks, first=group.position + length, stride=length
            )
        group.flush += count
        group.position += count * length

    def _part(self, group: Group, inputs: OpInputs, o: Tensor, start: int, stop: int) -> None:
        piece = inputs.slice(start, stop)
        group.phase += stop - start
        group.position += stop - start
        flushes = group.phase == group.window
        draws = self._draws(group.flush, inputs) if flushes else None
        assert self.carried is not None
        for lane in group.lanes:
            out = lane.part(piece.rows(lane.rows), draws)
            o[lane.rows, start:stop] = uncut(out, inputs.heads)
            if flushes:
                mark_diverged(
                    self.carried.diverged_at, lane.rows, [lane.sums()], first=group.position
                )
        if flushes:
            group.phase = 0
            group.flush += 1


def _pieces(group: Group, inputs: OpInputs) -> Iterator[tuple[int, int]]:
    """Cut T steps where windows begin or plans would grow too large.

    The group's phase is read as the pieces are consumed.
    """
    batch = max(lane.n_rows for lane in group.lanes) * inputs.heads
    per_window = batch * group.window * max(inputs.dk, inputs.dv)
    most = max(1, PLAN_ELEMENTS // per_window)
    start = 0
    while start < inputs.steps:
        left = inputs.steps - start
        whole = 0 if group.phase else min(left // group.window, most)
        length = whole * group.window or min(left, group.window - group.phase)
        yield start, start + length
        start += length
