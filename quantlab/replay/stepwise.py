"""The stepwise cache: decoding one token at a time with a real buffer, the scan's oracle.

Written from the algorithms (arXiv 2610.13778, 1, 2, 4 and 5) and from nothing of the windowed
scan: every step materialises S = Replay(checkpoint, buffer), takes the textbook step on it, and
appends a record; the step that fills the window replays the recurrence copy instead and stores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantlab.formats import Format, quantize
from quantlab.recurrence import OpInputs, textbook, zero_state
from quantlab.recurrence.step import Token, decay_of, read, token, write
from quantlab.replay.draws import READ, RECUR, Draws
from quantlab.replay.policy import Policy
from quantlab.replay.records import RecordTypes, rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the buffer keeps of one token, all [rows, H, …] and rounded to their record types.

    Attributes:
        k: [rows, H, dk].
        v: [rows, H, dv]; Mamba-2: Δ·x with x rounded.
        u: [rows, H, dv] the correction, or v without a delta rule.
        log_decay: [rows, H] or [rows, H, dk].
        beta: [rows, H] or None.
    """

    k: Tensor
    v: Tensor
    u: Tensor
    log_decay: Tensor
    beta: Tensor | None


@dataclass(slots=True, kw_only=True)
class PolicyCache:
    """Copies and buffer of one policy, rows = streams.

    Attributes:
        policy: it.
        recur: [streams, H, dv, dk] recurrence or only copy.
        read: the read copy; None with one copy.
        outside: heads that the policy's formats do not apply to.
        buffer: h records.
        flush: index of the next store.
    """

    policy: Policy
    recur: Tensor
    outside: list[int] = field(default_factory=list)
    read: Tensor | None = None
    buffer: list[Record] = field(default_factory=list)
    flush: int = 0

    def store(self, state: Tensor, draws: Draws) -> None:
        """Cast an unrounded state into each copy; drop the buffer."""
        if self.policy.kind == "separate":
            self.read = self._stored(state, self.policy.read, draws, READ)
        self.recur = self._stored(state, self.policy.recur, draws, RECUR)
        self.buffer = []
        self.flush += 1

    def _stored(self, state: Tensor, fmt: Format, draws: Draws, copy: int) -> Tensor:
        stored = _cast(state, fmt, draws, copy)
        if self.outside:
            stored = stored.clone()
            stored[:, self.outside] = state[:, self.outside].float().to(state.dtype)
        return stored

    def replay(self) -> Tensor:
        """Replay the buffer as cached onto the copy that a step before the L-th reads."""
        state = self.recur if self.read is None else self.read
        for record in self.buffer:
            state = _append(state, record, record.u)
        return state

    def replay_for_flush(self) -> Tensor:
        """Replay the buffer onto the recurrence copy, corrections derived again if so asked."""
        state = self.recur
        for record in self.buffer:
            if record.beta is None or self.policy.corrections == "fold":
                state = _append(state, record, record.u)
            else:
                state, _ = write(
                    state, k=record.k, v=record.v, log_decay=record.log_decay, beta=record.beta
                )
        return state

    def take(self, x: Token, types: RecordTypes) -> tuple[Tensor, Tensor | None]:
        """Take one token.

        Returns:
            Its output [streams, H, dv], and the state to store if it fills the window.
        """
        fills = len(self.buffer) + 1 == self.policy.window
        before = self.replay_for_flush() if fills else self.replay()
        state, u = write(before, k=x.k, v=x.written, log_decay=x.log_decay, beta=x.beta)
        o = read(state, x.q)
        if fills:
            return o, state
        v = rounded(x.v, types.v)
        if x.dt is not None:
            v = x.dt.unsqueeze(-1) * v
        self.buffer.append(
            Record(
                k=rounded(x.k, types.k),
                v=v,
                u=v if x.beta is None else rounded(u, types.u),
                log_decay=x.log_decay,
                beta=x.beta,
            )
        )
        return o, None


class StepwiseCache:
    """One recurrent layer's cache for a batch of policies × streams, one token at a time.

    Arguments, rows and results are those of `scan.WindowedScan`.

    Args:
        policies: any mix of kinds, formats and windows.
        streams: [n_streams] global stream ids.
        layer: ordinal of the recurrent layer.
        seed: 64-bit seed of the draws.
    """

    def __init__(
        self, policies: Sequence[Policy], streams: Tensor, *, layer: int, seed: int
    ) -> None:
        if not policies or streams.ndim != 1 or streams.numel() == 0:
            raise ValueError("a cache needs at least one policy and streams [n_streams], n ≥ 1")
        self.policies = tuple(policies)
        self.streams = streams
        self.layer = layer
        self.seed = seed
        self.caches: list[PolicyCache] = []
        self.position = 0
        rows = len(self.policies) * streams.numel()
        self.diverged_at = torch.full((rows,), -1, device=streams.device)

    @torch.inference_mode()
    def prefill(self, inputs: OpInputs) -> Tensor:
        """Consume the prompt by the textbook step, then store its state once (flush 0)."""
        o, state = textbook(inputs)
        self.start(state)
        return o

    @torch.inference_mode()
    def start(self, state: Tensor, inputs: OpInputs | None = None) -> None:
        """Begin decoding from an unrounded state [rows, H, dv, dk]."""
        del inputs
        self.position = 0
        self.diverged_at = torch.full_like(self.diverged_at, -1)
        self.caches = []
        for policy, rows in zip(self.policies, self._slices(), strict=True):
            outside = _outside(policy, self.layer, state.shape[1])
            cache = PolicyCache(policy=policy, recur=state[rows], outside=outside)
            cache.store(state[rows], self._draws(0, state))
            self.caches.append(cache)
            self._mark(cache, rows)

    @torch.inference_mode()
    def __call__(self, inputs: OpInputs) -> Tensor:
        """Consume the next T ≥ 1 tokens; outputs [rows, T, H, dv]."""
        if not self.caches:
            raise RuntimeError("call prefill (or load_state_dict) before decoding")
        blank = zero_state(inputs.slice(0, 1))
        shape = (inputs.n_rows, inputs.steps, inputs.heads, inputs.dv)
        o = blank.new_empty(shape)
        for t in range(inputs.steps):
            self.position += 1
            for cache, rows in zip(self.caches, self._slices(), strict=True):
                x = inputs.rows(rows)
                types = RecordTypes.of(cache.policy.records, x)
                o[rows, t], stored = cache.take(token(x, t), types)
                if stored is not None:
                    cache.store(stored, self._draws(cache.flush, stored))
                    self._mark(cache, rows)
        return o

    def state(self) -> Tensor:
        """Return the current state per row [rows, H, dv, dk], as `WindowedScan.state`."""
        if not self.caches:
            raise RuntimeError("no state yet: call prefill first")
        return torch.cat([cache.replay_for_flush() for cache in self.caches])

    def state_dict(self) -> dict[str, Tensor]:
        """All that later tokens depend on, by name; copies."""
        named = {
            "position": torch.tensor(self.position),
            "diverged_at": self.diverged_at.clone(),
        }
        for p, cache in enumerate(self.caches):
            named[f"{p}.flush"] = torch.tensor(cache.flush)
            named[f"{p}.recur"] = cache.recur.clone()
            if cache.read is not None:
                named[f"{p}.read"] = cache.read.clone()
            for name in ("k", "v", "u", "log_decay", "beta"):
                values = [getattr(record, name) for record in cache.buffer]
                if values and values[0] is not None:
                    named[f"{p}.buffer.{name}"] = torch.stack(values)
        return named

    @torch.inference_mode()
    def load_state_dict(self, named: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict` of a cache with the same arguments."""
        device = self.streams.device
        self.position = int(named["position"])
        self.diverged_at = named["diverged_at"].to(device).clone()
        self.caches = []
        for p, policy in enumerate(self.policies):
            held = {
                name.removeprefix(f"{p}."): x.to(device)
                for name, x in named.items()
                if name.startswith(f"{p}.")
            }
            count = held["buffer.k"].shape[0] if "buffer.k" in held else 0
            beta = held.get("buffer.beta")
            buffer = [
                Record(
                    k=held["buffer.k"][j],
                    v=held["buffer.v"][j],
                    u=held["buffer.u"][j],
                    log_decay=held["buffer.log_decay"][j],
                    beta=None if beta is None else beta[j],
                )
                for j in range(count)
            ]
            self.caches.append(
                PolicyCache(
                    policy=policy,
                    outside=_outside(policy, self.layer, held["recur"].shape[1]),
                    recur=held["recur"].clone(),
                    read=held["read"].clone() if "read" in held else None,
                    buffer=buffer,
                    flush=int(held["flush"]),
                )
            )

    def _slices(self) -> list[slice]:
        n = self.streams.numel()
        return [slice(p * n, (p + 1) * n) for p in range(len(self.policies))]

    def _draws(self, flush: int, state: Tensor) -> Draws:
        heads, dv, dk = state.shape[1:]
        return Draws(
            seed=self.seed,
            layer=self.layer,
            streams=self.streams,
            flush=flush,
            state_shape=(heads, dv, dk),
            device=state.device,
        )

    def _mark(self, cache: PolicyCache, rows: slice) -> None:
        bad = ~torch.isfinite(cache.recur).flatten(1).all(1)
        if cache.read is not None:
            bad |= ~torch.isfinite(cache.read).flatten(1).all(1)
        known = self.diverged_at[rows]
        self.diverged_at[rows] = torch.where((known < 0) & bad, self.position, known)


def _outside(policy: Policy, layer: int, heads: int) -> list[int]:
    """List the heads of a layer that a policy's formats do not apply to."""
    if policy.part is None:
        return []
    return [head for head, inside in enumerate(policy.part.heads(layer, heads)) if not inside]


def _append(state: Tensor, record: Record, u: Tensor) -> Tensor:
    """S·α + u kᵀ."""
    return torch.addcmul(
        state * decay_of(state, record.log_decay), u.unsqueeze(-1), record.k.unsqueeze(-2)
    )


def _cast(state: Tensor, fmt: Format, draws: Draws, copy: int) -> Tensor:
    words = draws.words(copy) if fmt.needs_words else None
    return quantize(state, fmt, words, counts=False)[0]
