"""`TritonScan`: the windowed scan of `quantlab.replay.scan` on the GPU, rounding where it does.

Policies of the same window, formats, copies and record types are one group; a group's rows run in
one launch. Kernels start at a window's first step. Tokens of a window that is still open at the end
of a segment are therefore kept as inputs and walked again at the start of the next segment: their
outputs and records come out the same, since nothing of a window depends on how the sequence is cut.

Not covered, and refused: FP64 inputs, windows beyond 64, formats that `stores.STORE_NAMES` lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from quantlab.recurrence import OpInputs
from quantlab.replay.draws import READ, RECUR
from quantlab.replay.lane import Lane, LaneKind, members
from quantlab.replay.policy import Policy
from quantlab.replay.scan import WindowedScan
from quantlab_kernels.conventional import conventional_scan, conventional_scan_kernel
from quantlab_kernels.copies import Copy, store_copy
from quantlab_kernels.scan_launch import MAX_WINDOW, ScanLaunch, windowed_scan
from quantlab_kernels.stores import store_kind

_STEP_FIELDS = ("q", "k", "v", "log_decay", "beta", "dt")


@dataclass(slots=True, kw_only=True)
class Group:
    """Rows that store alike.

    Attributes:
        policy: that they have in common.
        indices: which policies of the scan these are.
        rows: int64 [R] their rows in the scan.
        streams: int64 [R] global stream ids.
        recur: [R, H, dv, dk] FP32 recurrence or only copy, as stored.
        read: likewise the read copy, None with one copy.
        recur_factor: [R, H, dv] FP32, what operands of the recurrence copy are multiplied by to be
            its values, see held.py; stored with it.
        read_factor: likewise of the read copy.
        bad_flush: int32 [R, H] first flush after which a copy was not finite, -1 for none.
        applies: int8 [R, H] whether copies are stored in the policy's formats; None for all.
        flush: number of the next store.
        pending: inputs of the tokens of an open window, rows of this group; None at h = 0.
    """

    policy: Policy
    indices: list[int]
    rows: Tensor
    streams: Tensor
    recur: Tensor
    read: Tensor | None
    bad_flush: Tensor
    recur_factor: Tensor
    read_factor: Tensor | None = None
    applies: Tensor | None = None
    flush: int = 1
    pending: OpInputs | None = None


class TritonScan(WindowedScan):
    """One recurrent layer's scan for policies × streams, on Triton; see `WindowedScan`.

    Args:
        policies: any mix of kinds, formats and windows that the kernels have.
        streams: [n_streams] global stream ids; they key the random draws.
        layer: ordinal of the recurrent layer, likewise.
        seed: 64-bit seed, likewise.

    Raises:
        ValueError: a window or a format that the kernels do not have.
    """

    launch: ScanLaunch | None = None
    """How programs of windowed policies are launched, for sweeps; None for the kernels' choice."""

    def __init__(self, policies, streams, *, layer: int, seed: int) -> None:
        super().__init__(policies, streams, layer=layer, seed=seed)
        for policy in self.policies:
            if policy.window > MAX_WINDOW:
                raise ValueError(f"{policy.short}: kernels have windows of up to {MAX_WINDOW}")
            store_kind(policy.read)
            store_kind(policy.recur)
        self.groups: list[Group] = []

    @property
    def diverged_at(self) -> Tensor:
        """[rows] int64: first position whose stored state was not finite, −1 for none."""
        out = torch.full((self.n_rows,), -1, device=self.streams.device)
        for group in self.groups:
            # the first of a row's heads; none is -1, which as unsigned comes last
            none = torch.iinfo(torch.int32).max
            first = torch.where(group.bad_flush < 0, none, group.bad_flush).amin(1)
            position = first.to(torch.int64) * group.policy.window
            out[group.rows.to(out.device)] = torch.where(first == none, -1, position).to(out.device)
        return out

    @torch.inference_mode()
    def start(self, state: Tensor, inputs: OpInputs) -> None:
        """Begin decoding from an unrounded state [rows, H, dv, dk]: store it as flush 0."""
        self._check(inputs)
        self.groups = []
        for group in self._empty(inputs):
            exact = state[group.rows].contiguous()
            stored = self._stored(exact, group, group.policy.recur, RECUR)
            group.recur, group.recur_factor = stored.values, stored.factors
            if group.read is not None:
                stored = self._stored(exact, group, group.policy.read, READ)
                group.read, group.read_factor = stored.values, stored.factors
            bad = ~group.recur.isfinite().flatten(2).all(2)
            if group.read is not None:
                bad |= ~group.read.isfinite().flatten(2).all(2)
            group.bad_flush = torch.where(bad, 0, -1).to(torch.int32)
            self.groups.append(group)

    @torch.inference_mode()
    def __call__(self, inputs: OpInputs) -> Tensor:
        """Consume the next T ≥ 1 tokens of all rows.

        Returns:
            Outputs [rows, T, H, dv] FP32.
        """
        self._check(inputs)
        self._restore(inputs)
        inputs = _unit_strides(inputs)
        shape = (inputs.n_rows, inputs.steps, inputs.heads, inputs.dv)
        o = torch.empty(shape, dtype=torch.float32, device=inputs.v.device)
        for group in self.groups:
            if group.pending is None:
                self._run(group, inputs, group.rows, o)
                taken = inputs
            else:
                before = group.pending.steps
                taken = _joined(group.pending, inputs.rows(group.rows))
                rows = torch.arange(taken.n_rows, device=group.rows.device)
                out = o.new_empty((taken.n_rows, taken.steps, inputs.heads, inputs.dv))
                self._run(group, taken, rows, out)
                o[group.rows] = out[:, before:]
            left = taken.steps % group.policy.window
            group.flush += taken.steps // group.policy.window
            if left == 0:
                group.pending = None
            else:
                tail = taken.slice(taken.steps - left, taken.steps)
                tail = tail.rows(group.rows) if group.pending is None else tail
                group.pending = _copied(tail)
        return o

    @torch.inference_mode()
    def state(self) -> Tensor:
        """Return the current state per row, open windows replayed: [rows, H, dv, dk].

        At h = 0 this is the stored recurrence copy; else what a flush now would store, before its
        cast (replayed by the torch reference).
        """
        if not self.groups:
            raise RuntimeError("no state yet: call prefill first")
        first = self.groups[0].recur
        out = first.new_empty((self.n_rows, *first.shape[1:]))
        for group in self.groups:
            out[group.rows] = self._current(group)
        return out

    @torch.inference_mode()
    def copies(self) -> tuple[Tensor, Tensor]:
        """Return what each row last stored: recurrence and read copies, see `WindowedScan`."""
        if not self.groups:
            raise RuntimeError("no state yet: call prefill first")
        first = self.groups[0].recur
        recur = first.new_empty((self.n_rows, *first.shape[1:]))
        read = torch.empty_like(recur)
        for group in self.groups:
            recur[group.rows] = group.recur
            read[group.rows] = group.recur if group.read is None else group.read
        return recur, read

    def state_dict(self) -> dict[str, Tensor]:
        """All that later segments depend on; copies, not views."""
        if not self.groups:
            raise RuntimeError("no state yet: call prefill first")
        named: dict[str, Tensor] = {}
        for g, group in enumerate(self.groups):
            named[f"{g}.flush"] = torch.tensor(group.flush)
            named[f"{g}.recur"] = group.recur.clone()
            named[f"{g}.recur_factor"] = group.recur_factor.clone()
            named[f"{g}.bad_flush"] = group.bad_flush.clone()
            if group.read is not None:
                named[f"{g}.read"] = group.read.clone()
                named[f"{g}.read_factor"] = group.read_factor.clone()
            if group.pending is not None:
                for field in _STEP_FIELDS:
                    x = getattr(group.pending, field)
                    if x is not None:
                        named[f"{g}.pending.{field}"] = x.clone()
        return named

    def load_state_dict(self, named: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict` of a scan with the same arguments, at the next call."""
        self._saved = dict(named)

    def _restore(self, inputs: OpInputs) -> None:
        if self._saved is None:
            if not self.groups:
                raise RuntimeError("call prefill (or load_state_dict) before decoding")
            return
        named, device = self._saved, inputs.v.device
        groups = self._empty(inputs)
        for g, group in enumerate(groups):
            saved = {
                name.removeprefix(f"{g}."): x.to(device)
                for name, x in named.items()
                if name.startswith(f"{g}.")
            }
            if "recur" in saved and "recur_factor" not in saved:
                raise ValueError("the saved state is of an earlier version, without factors")
            if "recur" not in saved or ("read" in saved) != (group.read is not None):
                raise ValueError("the saved state is of other policies than those here")
            if saved["recur"].shape != group.recur.shape:
                raise ValueError(
                    f"the saved copies are {tuple(saved['recur'].shape)}, "
                    f"these inputs need {tuple(group.recur.shape)}"
                )
            group.flush = int(saved["flush"])
            group.recur = saved["recur"].clone()
            group.recur_factor = saved["recur_factor"].clone()
            if group.read is not None:
                group.read, group.read_factor = saved["read"].clone(), saved["read_factor"].clone()
            group.bad_flush = saved["bad_flush"].clone()
            if "pending.q" in saved:
                fields = {f: saved.get(f"pending.{f}") for f in _STEP_FIELDS}
                group.pending = replace(inputs.rows(group.rows), **fields)
        self.groups, self._saved = groups, None

    def _check(self, inputs: OpInputs) -> None:
        super()._check(inputs)
        if inputs.compute_dtype != torch.float32:
            raise TypeError("the Triton scan computes in FP32; use the torch scan for FP64 inputs")
        if not inputs.v.is_cuda and isinstance(conventional_scan_kernel, JITFunction):
            raise ValueError(
                f"the Triton scan needs a CUDA device, inputs are on {inputs.v.device} "
                "(TRITON_INTERPRET=1 runs it on the CPU, slowly)"
            )

    def _empty(self, inputs: OpInputs) -> list[Group]:
        """Sort policies into groups; their copies are to be filled."""
        device = inputs.v.device
        n = self.streams.numel()
        within = torch.arange(n)
        groups = []
        for found in members(self.policies, self.layer, inputs).values():
            indices = [index for index, _, _ in found]
            rows = (torch.tensor(indices)[:, None] * n + within).flatten().to(device)
            shape = (rows.numel(), inputs.heads, inputs.dv, inputs.dk)
            recur = torch.empty(shape, dtype=torch.float32, device=device)
            policy = found[0][1]
            heads = [applies for _, _, applies in found if applies is not None]
            groups.append(
                Group(
                    policy=policy,
                    indices=indices,
                    rows=rows,
                    streams=self.streams.to(device=device, dtype=torch.int64).repeat(len(indices)),
                    recur=recur,
                    read=torch.empty_like(recur) if policy.kind == "separate" else None,
                    recur_factor=torch.ones(shape[:3], dtype=torch.float32, device=device),
                    bad_flush=torch.full(shape[:2], -1, dtype=torch.int32, device=device),
                    applies=_by_row(heads, n, device) if heads else None,
                )
            )
        return groups

    def _stored(self, exact: Tensor, group: Group, fmt, copy: int) -> Copy:
        return store_copy(
            exact,
            fmt,
            seed=self.seed,
            layer=self.layer,
            copy=copy,
            streams=group.streams,
            flush=0,
            applies=group.applies,
        )

    def _run(self, group: Group, inputs: OpInputs, rows: Tensor, o: Tensor) -> None:
        keys = {"seed": self.seed, "layer": self.layer, "first_flush": group.flush}
        recur, bad = group.recur, group.bad_flush
        if group.policy.window == 1:
            fmt = group.policy.recur
            conventional_scan(
                inputs, rows, group.streams, recur, o, bad, fmt, group.applies, **keys
            )
        else:
            read = None
            if group.read is not None:
                read = Copy(values=group.read, factors=group.read_factor)
            copies = (Copy(values=recur, factors=group.recur_factor), read)
            windowed_scan(
                inputs,
                rows,
                group.streams,
                *copies,
                o,
                bad,
                group.policy,
                group.applies,
                launch=self.launch,
                **keys,
            )

    def _current(self, group: Group) -> Tensor:
        if group.pending is None:
            return group.recur
        lane = Lane(LaneKind.of(group.policy, group.pending), [0], group.streams, exact=False)
        lane.recur, lane.read = group.recur, group.read
        lane.part(group.pending, None)
        return lane.state()


def _by_row(heads: Sequence[Sequence[bool]], streams: int, device: torch.device) -> Tensor:
    """Lay out which heads of every policy its formats apply to: int8 [rows, H]."""
    per_policy = torch.tensor([list(row) for row in heads], dtype=torch.int8, device=device)
    return per_policy.repeat_interleave(streams, 0)


def _unit_strides(inputs: OpInputs) -> OpInputs:
    """Give q, k, v and per-channel decays unit stride along their last axis."""
    names = ("q", "k", "v", "log_decay") if inputs.per_channel else ("q", "k", "v")
    fixed = {
        n: getattr(inputs, n).contiguous() for n in names if getattr(inputs, n).stride(-1) != 1
    }
    return replace(inputs, **fixed)


def _joined(first: OpInputs, second: OpInputs) -> OpInputs:
    """Join inputs of consecutive tokens of the same rows."""
    fields = {}
    for name in _STEP_FIELDS:
        a, b = getattr(first, name), getattr(second, name)
        fields[name] = None if a is None else torch.cat([a, b], dim=1)
    return replace(second, **fields)


def _copied(inputs: OpInputs) -> OpInputs:
    """Copy inputs to memory of their own, so that no segment is kept alive by its tail."""
    fields = {}
    for name in _STEP_FIELDS:
        x = getattr(inputs, name)
        fields[name] = None if x is None else x.clone(memory_format=torch.contiguous_format)
    return replace(inputs, **fields)
