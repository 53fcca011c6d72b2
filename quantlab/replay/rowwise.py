"""The stepwise cache for rows that start, and are replaced, at different times.

Under free-running generation each row has its own policy, stream, open window and store count. The
replayed states are carried along instead of being replayed from a buffer at every step: a step's
record goes onto both of them by the very operations, in the very order, that `stepwise` replays a
buffer by, so the two agree bit for bit.

Rounding points are those of `stepwise`: records on append, and each stored copy from the unrounded
state. A row's result depends on nothing in the other rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quantlab.formats import quantize
from quantlab.formats.philox import sr_words
from quantlab.recurrence import OpInputs
from quantlab.recurrence.step import Token, decay_of, read, token, write
from quantlab.replay.draws import READ, RECUR
from quantlab.replay.lane import applied
from quantlab.replay.policy import Policy
from quantlab.replay.records import RecordTypes, rounded

# Counters of a row, in the order of `RowwiseCache.counters`.
POLICY, STREAM, PHASE, FLUSH, POSITION, DIVERGED = range(6)


class RowwiseCache:
    """One recurrent layer's states of a fixed number of rows.

    Args:
        policies: that a row can have.
        rows: how many.
        layer: ordinal of the recurrent layer; keys the random draws.
        seed: 64-bit seed, likewise.

    Attributes:
        counters: [6, rows] int64 on the CPU: policy (−1: the row is free), stream, records in the
            open window, index of the next store, tokens since the prompt, first position whose
            stored state was not finite (−1 for none).
    """

    def __init__(self, policies: Sequence[Policy], rows: int, *, layer: int, seed: int) -> None:
        if not policies or rows < 1:
            raise ValueError("a cache needs at least one policy and one row")
        self.policies = tuple(policies)
        self.layer = layer
        self.seed = seed
        self.counters = torch.full((6, rows), -1, dtype=torch.int64)
        # [rows, H, dv, dk] each: what the next step reads, and what the next flush stores onto
        self.reading: Tensor | None = None
        self.storing: Tensor | None = None

    @property
    def rows(self) -> int:
        """Rows, free ones included."""
        return self.counters.shape[1]

    @torch.inference_mode()
    def start(self, row: int, state: Tensor, *, policy: int, stream: int) -> None:
        """Begin a row from an unrounded state, which is stored once as flush 0.

        Args:
            row: which, free or not.
            state: [H, dv, dk] after the prompt.
            policy: index into the policies.
            stream: id that keys the row's draws, in [0, 2^32).
        """
        if self.reading is None or self.storing is None:
            self.reading = state.new_zeros((self.rows, *state.shape))
            self.storing = torch.zeros_like(self.reading)
        self.counters[:, row] = torch.tensor([policy, stream, 0, 0, 0, -1])
        self._store(torch.tensor([row]), state.unsqueeze(0))

    @torch.inference_mode()
    def stop(self, row: int) -> None:
        """Free a row: it is carried along with a state of zeros that no policy touches."""
        self.counters[:, row] = -1
        if self.reading is not None and self.storing is not None:
            self.reading[row] = 0
            self.storing[row] = 0

    @torch.inference_mode()
    def __call__(self, inputs: OpInputs) -> Tensor:
        """Take one token of every row; outputs [rows, 1, H, dv]."""
        if inputs.steps != 1 or inputs.n_rows != self.rows:
            raise ValueError(
                f"one token of {self.rows} rows at a time, got {inputs.steps} of {inputs.n_rows}"
            )
        if self.reading is None or self.storing is None:
            raise RuntimeError("start a row before decoding")
        x = token(inputs, 0)
        live = self.counters[POLICY] >= 0
        windows = torch.tensor([self.policies[p].window for p in self.counters[POLICY].tolist()])
        fills = live & (self.counters[PHASE] + 1 == windows)
        filling = fills.nonzero()[:, 0]
        before = self.reading
        if len(filling):
            # a fresh tensor, so that `reading` stays as it is
            before = before.clone()
            where = filling.to(before.device)
            before[where] = self.storing[where]
        state, u = write(before, k=x.k, v=x.written, log_decay=x.log_decay, beta=x.beta)
        o = read(state, x.q)
        self._append(inputs, x, u)
        self.counters[POSITION] += live
        self.counters[PHASE] += live
        if len(filling):
            self._store(filling, state[filling.to(state.device)])
        return o.unsqueeze(1)

    def _append(self, inputs: OpInputs, x: Token, u: Tensor) -> None:
        """Put the token's record onto both carried states."""
        assert self.reading is not None and self.storing is not None
        k, v, written = x.k, x.v, u
        for types, rows in self._by_records(inputs):
            if types.exact:
                continue
            if len(rows) == self.rows:
                k, v, written = (
                    rounded(a, t) for a, t in ((x.k, types.k), (x.v, types.v), (u, types.u))
                )
                continue
            k, v, written = (
                a.index_copy(0, rows, rounded(full[rows], t))
                for a, full, t in ((k, x.k, types.k), (v, x.v, types.v), (written, u, types.u))
            )
        if x.dt is not None:
            v = x.dt.unsqueeze(-1) * v
        if x.beta is None:
            written = v
        decay = decay_of(self.reading, x.log_decay)
        self.reading = torch.addcmul(self.reading * decay, written.unsqueeze(-1), k.unsqueeze(-2))
        derived, _ = write(self.storing, k=k, v=v, log_decay=x.log_decay, beta=x.beta)
        folding = self._folding() if x.beta is not None else torch.empty(0, dtype=torch.int64)
        if len(folding):
            where = folding.to(derived.device)
            derived[where] = torch.addcmul(
                (self.storing * decay)[where], written[where].unsqueeze(-1), k[where].unsqueeze(-2)
            )
        self.storing = derived

    def _by_records(self, inputs: OpInputs) -> list[tuple[RecordTypes, Tensor]]:
        """Record types in use, each with its rows; free rows go with the first."""
        kinds = [RecordTypes.of(p.records, inputs) for p in self.policies]
        which = self.counters[POLICY].clamp(min=0).tolist()
        found: dict[RecordTypes, list[int]] = {}
        for row, policy in enumerate(which):
            found.setdefault(kinds[policy], []).append(row)
        device = inputs.v.device
        return [(types, torch.tensor(rows, device=device)) for types, rows in found.items()]

    def _folding(self) -> Tensor:
        fold = torch.tensor([p.corrections == "fold" for p in self.policies])
        policy = self.counters[POLICY]
        return ((policy >= 0) & fold[policy.clamp(min=0)]).nonzero()[:, 0]

    def _store(self, rows: Tensor, state: Tensor) -> None:
        """Cast unrounded states [n, H, dv, dk] of rows into their copies; open new windows."""
        assert self.reading is not None and self.storing is not None
        policy = self.counters[POLICY, rows]
        drawn = {copy: self._words(rows, copy, state) for copy in (RECUR, READ)}
        for p in sorted(set(policy.tolist())):
            chosen = self.policies[p]
            inside = (policy == p).nonzero()[:, 0]
            where, some = rows[inside].to(state.device), inside.to(state.device)
            copies = [(chosen.recur, RECUR, self.storing)]
            if chosen.kind == "separate":
                copies.append((chosen.read, READ, self.reading))
            finite = torch.ones(len(inside), dtype=torch.bool, device=state.device)
            for fmt, copy, into in copies:
                words = None
                if fmt.needs_words:
                    pairs, of_row = drawn[copy]
                    words = pairs[of_row[inside].to(state.device)]
                stored = quantize(state[some], fmt, words, counts=False)[0]
                if chosen.part is not None:
                    heads = chosen.part.heads(self.layer, state.shape[1])
                    applies = torch.tensor([heads], device=state.device)
                    stored = applied(stored, state[some], applies)
                into[where] = stored
                finite &= torch.isfinite(stored).flatten(1).all(1)
            if chosen.kind != "separate":
                self.reading[where] = self.storing[where]
            bad = rows[inside][~finite.cpu()]
            known = self.counters[DIVERGED, bad]
            self.counters[DIVERGED, bad] = torch.where(
                known < 0, self.counters[POSITION, bad], known
            )
        self.counters[PHASE, rows] = 0
        self.counters[FLUSH, rows] += 1

    def _words(self, rows: Tensor, copy: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Words of the distinct (stream, flush) pairs that SR needs, and each row's pair."""
        policy = self.counters[POLICY, rows].tolist()
        needs = torch.tensor([self._format(p, copy) for p in policy], dtype=torch.bool)
        of_row = torch.full((len(rows),), -1)
        if not needs.any():
            return state.new_empty(0), of_row
        key = self.counters[[STREAM, FLUSH]][:, rows[needs]]
        pairs, of_row[needs] = torch.unique(key, dim=1, return_inverse=True)
        heads, dv, dk = state.shape[1:]
        words = sr_words(
            seed=self.seed, layer=self.layer, copy=copy, stream=pairs[0], flush=pairs[1],
            heads=heads, dv=dv, dk=dk, device=state.device,
        )  # fmt: skip
        return words, of_row

    def _format(self, policy: int, copy: int) -> bool:
        """Whether a policy draws words for a copy."""
        chosen = self.policies[policy]
        if copy == READ:
            return chosen.kind == "separate" and chosen.read.needs_words
        return chosen.recur.needs_words

    def state_dict(self) -> dict[str, Tensor]:
        """All that later tokens depend on; copies."""
        named = {"counters": self.counters.clone()}
        if self.reading is not None and self.storing is not None:
            named |= {"reading": self.reading.clone(), "storing": self.storing.clone()}
        return named

    @torch.inference_mode()
    def load_state_dict(self, named: Mapping[str, Tensor], device: torch.device) -> None:
        """Continue from `state_dict` of a cache with the same arguments."""
        self.counters = named["counters"].clone()
        if "reading" in named:
            self.reading = named["reading"].to(device).clone()
            self.storing = named["storing"].to(device).clone()
