"""Teacher forcing by the decoder: `--engine stepwise` on a GPU, one token a model step.

The same rows and measurements as `TeacherForcing`, whose stepwise cache is the oracle on a CPU. The
prompt is consumed once a stream instead of once a row: it is the same for every policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantlab import dispatch
from quantlab.engine.decoder import Decoder, prefill
from quantlab.engine.teacher_forcing import LOGIT_BYTES, LOGIT_COPIES, REFERENCE, Measurement
from quantlab.replay import Policy

if TYPE_CHECKING:
    from quantlab.models import LoadedModel

# Steps between two calls of `on_progress`. The host must not wait for every step of a GPU.
STRIDE = 64


class DecodedForcing:
    """One batch of a study, decoded token by token.

    Args:
        m: the loaded model.
        tokens: [streams, ≥ prompt + N + 1] int64.
        policies: without the reference, which becomes policy 0.
        stream_ids: the streams' indices in the whole study; they key the random draws.
        positions: positions to measure, each between 1 and N.
        prompt: tokens consumed in full precision before the first rounded store.
        seed: 64-bit seed of the stochastic rounding.
        graphs: as of the decoder.
        implementation: likewise.

    Raises:
        ValueError: a position outside 1..N, too few tokens, or what the decode kernels lack.
    """

    def __init__(
        self,
        m: LoadedModel,
        tokens: Tensor,
        *,
        policies: Sequence[Policy],
        stream_ids: Sequence[int],
        positions: Sequence[int],
        prompt: int,
        seed: int,
        graphs: bool | None = None,
        implementation: dispatch.Implementation = "auto",
    ) -> None:
        self.positions = sorted(set(positions))
        if not self.positions or self.positions[0] < 1:
            raise ValueError("positions count from 1")
        self.last = self.positions[-1]
        if prompt < 1 or tokens.shape[1] < prompt + self.last + 1:
            raise ValueError(
                f"{tokens.shape[1]} tokens a stream: prompt {prompt} and N {self.last} need "
                f"{prompt + self.last + 1}, with a prompt of at least 1"
            )
        self.m = m
        self.policies = (REFERENCE, *policies)
        self.tokens = tokens.to(m.device)
        self.streams = tokens.shape[0]
        self.stream_ids = list(stream_ids)
        self.prompt = prompt
        self.decoder = Decoder(
            m,
            self.policies,
            rows=len(self.policies) * self.streams,
            capacity=prompt + self.last,
            seed=seed,
            places=[self.streams] * len(self.policies),
            graphs=graphs,
            implementation=implementation,
        )
        self.scan_name = self.decoder.implementation
        self.done = 0
        self._started = False

    @torch.inference_mode()
    def run(self, on_progress: Callable[[int, int], None] | None = None) -> Iterator[Measurement]:
        """Yield the measured positions in order.

        Args:
            on_progress: called with (tokens done, N) every 64 steps and at the end, once the
                measurements up to there have been consumed: the state can be saved there.
        """
        if not self._started:
            self._start()
        wanted = [p for p in self.positions if p > self.done]
        most = self._positions_per_chunk()
        while self.done < self.last:
            stop = min(self.done + STRIDE, self.last)
            at: list[int] = []
            logits: list[Tensor] = []
            while self.done < stop:
                found = self.decoder.step(self._column(self.prompt + self.done))
                self.done += 1
                if wanted and wanted[0] == self.done:
                    at.append(wanted.pop(0))
                    logits.append(found.clone())
                if at and (len(at) == most or self.done == stop):
                    yield self._measured(at, logits)
                    at, logits = [], []
            if on_progress is not None:
                on_progress(self.done, self.last)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that later steps depend on, where `on_progress` is called."""
        return {"done": torch.tensor(self.done), **self.decoder.state_dict()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict` of an equal batch."""
        named = dict(tensors)
        self.done = int(named.pop("done"))
        # gives every row its policy and place; what it stores is then replaced
        self._start()
        self.decoder.load_state_dict(named)

    def _start(self) -> None:
        n = self.streams
        count = len(self.policies)
        self.decoder.start(
            range(count * n),
            prefill(self.m, self.tokens[:, : self.prompt]),
            of=list(range(n)) * count,
            policies=[p for p in range(count) for _ in range(n)],
            streams=self.stream_ids * count,
        )
        self._started = True

    def _column(self, index: int) -> Tensor:
        return self.tokens[:, index].repeat(len(self.policies))

    def _measured(self, at: list[int], logits: list[Tensor]) -> Measurement:
        columns = torch.tensor(at, device=self.tokens.device) + self.prompt
        stacked = torch.stack(logits, 1)
        return Measurement(
            positions=torch.tensor(at, dtype=torch.int64),
            logits=stacked.view(len(self.policies), self.streams, *stacked.shape[1:]),
            targets=self.tokens[:, columns],
            diverged_at=self.decoder.diverged_at.view(len(self.policies), self.streams).cpu(),
        )

    def _positions_per_chunk(self) -> int:
        rows = len(self.policies) * self.streams
        return max(1, LOGIT_BYTES // (LOGIT_COPIES * 4 * rows * self.m.vocab_size))
