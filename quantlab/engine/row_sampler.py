"""What the rows of a generation have written, and their next tokens, kept on the device.

A row is given a generation's keys, takes a token after every forward, and stops by itself: at a
stop token, at the budget, or where its logits are not finite. Nothing of it waits for the host,
which looks now and then at which rows have ended; a row that has ended takes no more tokens.
On CUDA a choice of tokens is one captured graph. Every operation is row by row, so what a row
writes does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantlab import dispatch
from quantlab.engine.sampling import Sampling, choose, scores
from quantlab.engine.transfer import Reading, on_device

# What a row is doing.
FREE, GOING, STOPPED, CUT, BROKEN = range(5)


class Written(NamedTuple):
    """What a row wrote: `Generation`'s fields of these names, and how it ended (see above)."""

    tokens: list[int]
    margins: list[float]
    stop_id: int | None
    end: int


class RowSampler:
    """Tokens of a fixed number of rows.

    Args:
        rows: how many.
        vocabulary: V.
        sampling: how tokens are chosen.
        budget: tokens at which a row is cut.
        stop_ids: ids that end a row.
        device: where.
        graphs: whether choices are captured; on CUDA if None.

    Attributes:
        pending: [rows] int64 — each row's last token, which the next forward takes.
        count: [rows] int64 — tokens each row has, stop tokens left out.
        status: [rows] int64 — what each row is doing.
    """

    def __init__(
        self,
        rows: int,
        vocabulary: int,
        *,
        sampling: Sampling,
        budget: int,
        stop_ids: Sequence[int],
        device: torch.device,
        graphs: bool | None = None,
    ) -> None:
        self.rows, self.budget, self.sampling = rows, budget, sampling
        self.graphs = device.type == "cuda" if graphs is None else graphs
        self._device = device
        self._noise = dispatch.sampling_noise(device)
        self._stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=device)
        self._row = torch.arange(rows, device=device)
        # set together when a row begins; an even width keeps every column aligned
        self._columns = torch.zeros((7, rows + rows % 2), dtype=torch.int64, device=device)
        columns = self._columns[:, :rows]
        self.status, self.count, self._stop_id, self.pending = columns[:4]
        # keys of the noise; the seed as the bit pattern of a signed number
        self._seed, self._question, self._repetition = columns[4:]
        self._tokens = torch.zeros((rows, budget), dtype=torch.int32, device=device)
        # a stop token has a margin too
        self._margins = torch.zeros((rows, budget + 1), dtype=torch.float64, device=device)
        self._seen: Tensor | None = None
        if sampling.presence_penalty:
            self._seen = torch.zeros((rows, vocabulary), dtype=torch.bool, device=device)
        self._logits: Tensor | None = None
        self._turn = torch.zeros(rows, dtype=torch.bool, device=device)
        self._graph: Any | None = None
        self._warm = False

    @torch.inference_mode()
    def begin(
        self,
        rows: Sequence[int],
        *,
        seeds: Sequence[int],
        questions: Sequence[int],
        repetitions: Sequence[int],
    ) -> None:
        """Give rows generations to write, from nothing.

        Args:
            rows: which.
            seeds: by row, 64-bit seed of its noise.
            questions: by row, id of its question.
            repetitions: by row.
        """
        signed = [s - (1 << 64) if s >= 1 << 63 else s for s in seeds]
        none = [0] * len(rows)
        begun = [[GOING] * len(rows), none, none, none, signed, list(questions), list(repetitions)]
        at, *values = on_device([list(rows), *begun], self._device)
        self._columns[:, at] = torch.stack(values)
        if self._seen is not None:
            self._seen[at] = False

    @torch.inference_mode()
    def free(self, rows: Sequence[int]) -> None:
        """Let rows go."""
        at = self._index(rows)
        self.status[at] = FREE
        self.pending[at] = 0

    @torch.inference_mode()
    def choose(self, logits: Tensor, rows: Sequence[int] | None = None) -> None:
        """Take a token in every row that is going.

        Args:
            logits: [rows, V].
            rows: those whose turn it is; all if None.
        """
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        self._logits.copy_(logits)
        if rows is None:
            self._turn.fill_(True)
        else:
            self._turn.fill_(False)
            self._turn[self._index(rows)] = True
        if self._graph is not None:
            self._graph.replay()
        elif self.graphs and self._warm:
            self._graph = self._captured()
            self._graph.replay()
        else:
            # the first time plainly: it compiles kernels and sets up libraries
            self._choose()
            self._warm = True

    @property
    def progress(self) -> Tensor:
        """[3, rows] int64: status, count and stop id; of the latest choice, when it is made."""
        return self._columns[:3, : self.rows]

    @torch.inference_mode()
    def written(self, rows: Sequence[int], progress: Tensor) -> Callable[[], list[Written]]:
        """Begin to read what rows have written, ended or not.

        Args:
            rows: which.
            progress: as it was read on the host, where the rows had written all of it.

        Returns:
            A function that waits for it and returns it; rows may be given away before.
        """
        status, count, stop_ids = progress[:, list(rows)].tolist()
        at = self._index(rows)
        most = max(count)
        reading = Reading(self._tokens[at, :most], self._margins[at, : most + 1])

        def get() -> list[Written]:
            tokens, margins = reading.get()
            return [
                Written(
                    tokens=tokens[i, :n].tolist(),
                    margins=margins[i, : n + (end == STOPPED)].tolist(),
                    stop_id=stop_id if end == STOPPED else None,
                    end=end,
                )
                for i, (n, end, stop_id) in enumerate(zip(count, status, stop_ids, strict=True))
            ]

        return get

    def state_dict(self) -> dict[str, Tensor]:
        """All that later choices depend on; copies."""
        return {name: x.clone() for name, x in self._state().items()}

    @torch.inference_mode()
    def load_state_dict(self, named: dict[str, Tensor]) -> None:
        """Continue from `state_dict` of a sampler with the same arguments."""
        for name, x in self._state().items():
            x.copy_(named[name])

    def _state(self) -> dict[str, Tensor]:
        named = {
            "pending": self.pending, "count": self.count, "status": self.status,
            "stop_id": self._stop_id, "seed": self._seed, "question": self._question,
            "repetition": self._repetition, "tokens": self._tokens, "margins": self._margins,
        }  # fmt: skip
        return named if self._seen is None else named | {"seen": self._seen}

    def _choose(self) -> None:
        assert self._logits is not None
        turn = self._turn & (self.status == GOING)
        finite = torch.isfinite(self._logits).all(-1)
        # a broken row ends before its token counts
        logits = torch.nan_to_num(self._logits, nan=0.0)
        kept = scores(logits, self.sampling, seen=self._seen)
        noise = None
        if self.sampling.temperature:
            noise = self._noise(
                seed=self._seed,
                question=self._question,
                repetition=self._repetition,
                step=self.count,
                vocabulary=logits.shape[1],
            )
        token, margin = choose(kept, noise)
        stops = (token[:, None] == self._stop_ids).any(-1)
        chosen = turn & finite
        written = chosen & ~stops
        self._put(self._margins, margin, chosen)
        self._put(self._tokens, token.to(torch.int32), written)
        if self._seen is not None:
            self._seen[self._row, token] |= written
        self.pending.copy_(torch.where(written, token, self.pending))
        self._stop_id.copy_(torch.where(chosen & stops, token, self._stop_id))
        self.count.add_(written)
        end = torch.where(self.count == self.budget, CUT, GOING)
        end = torch.where(stops, STOPPED, end)
        end = torch.where(finite, end, BROKEN)
        self.status.copy_(torch.where(turn, end, self.status))

    def _put(self, into: Tensor, values: Tensor, where: Tensor) -> None:
        """Write values [rows] behind what each row has, in the rows meant."""
        at = self.count.clamp(max=into.shape[1] - 1)
        into[self._row, at] = torch.where(where, values, into[self._row, at])

    def _captured(self) -> Any:
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._choose()
        return graph

    def _index(self, values: Sequence[int]) -> Tensor:
        return on_device(list(values), self._device)
