"""Teacher-forced decoding of many policies × streams, the reference among them.

Under teacher forcing the tokens are known, so everything outside the recurrence runs as an
ordinary forward over a segment of tokens. Only the recurrent op is replaced: by a scan that walks
the segment window by window and rounds where decoding would (`windowed`), or, as the oracle, by a
cache that takes one token a forward with a real record buffer (`stepwise`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from quantlab.engine.attention import lower_right
from quantlab.engine.planner import ENGINES, Engine
from quantlab.models.precision import full_fp32
from quantlab.replay import Policy, parse_policy
from quantlab.replay.seeded import by_seed

if TYPE_CHECKING:
    from quantlab.models import LoadedModel, OpCall

# What every policy is compared with: one FP32 state, read and written at every step.
REFERENCE: Policy = parse_policy("conventional:fp32")
# Bytes of logits (FP32, with log-softmax temporaries) held at once; more positions go in chunks.
LOGIT_BYTES = 1 << 30
LOGIT_COPIES = 4


class Measurement(NamedTuple):
    """Logits of all rows at a few positions.

    Attributes:
        positions: [n] int64, 1-based: tokens consumed beyond the prompt.
        logits: [policies, streams, n, vocabulary] FP32, policy 0 the reference.
        targets: [streams, n] int64, the token that follows each position.
        diverged_at: [policies, streams] int64, the first position whose stored state was not
            finite in some layer, up to the end of this segment; -1 where there is none.
    """

    positions: Tensor
    logits: Tensor
    targets: Tensor
    diverged_at: Tensor


class TeacherForcing:
    """One batch of a study, run segment by segment.

    Args:
        m: the loaded model.
        tokens: [streams, ≥ prompt + N + 1] int64.
        policies: without the reference, which becomes policy 0.
        stream_ids: the streams' indices in the whole study: they key the random draws, so that a
            draw does not depend on the batch.
        positions: positions to measure, each between 1 and N.
        prompt: tokens consumed in full precision before the first rounded store.
        segment: tokens of a row in one forward.
        seed: 64-bit seed of the stochastic rounding.
        engine: "windowed" or "stepwise".
        scan: constructor of scans instead of that of the class `quantlab.dispatch` names for the
            device, by seed.

    Raises:
        ValueError: if a position lies outside 1..N or the tokens are too few.
        PartError: if a policy names a layer or a head that the model does not have.
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
        segment: int,
        seed: int,
        engine: Engine = "windowed",
        scan: Callable[..., Any] | None = None,
    ) -> None:
        """Validate, and set up one scan per recurrent layer; nothing is computed yet."""
        if not positions or min(positions) < 1:
            raise ValueError("positions count from 1")
        self.last = max(positions)
        if prompt < 1 or tokens.shape[1] < prompt + self.last + 1:
            raise ValueError(
                f"{tokens.shape[1]} tokens a stream: prompt {prompt} and N {self.last} need "
                f"{prompt + self.last + 1}, with a prompt of at least 1"
            )
        if engine not in ENGINES:
            raise ValueError(f"engine must be one of {ENGINES} (got {engine!r})")
        self.m = m
        require_parts(m, policies)
        self.policies = (REFERENCE, *policies)
        self.device = next(m.model.parameters()).device
        self.tokens = tokens.to(self.device)
        self.streams = tokens.shape[0]
        self.positions = torch.tensor(sorted(set(positions)), dtype=torch.int64)
        self.prompt = prompt
        self.segment = 1 if engine == "stepwise" else segment
        build: Callable[..., Any] = scan or by_seed(scan_class(engine, self.device))
        self.scan_name = build.__name__
        streams = torch.tensor(list(stream_ids), dtype=torch.int64, device=self.device)
        self._scans = [
            build(self.policies, streams, layer=layer, seed=seed) for layer in range(m.layers)
        ]
        self._cache: Any = None
        self._prefilling = False
        self.done = 0

    def run(self, on_progress: Callable[[int, int], None] | None = None) -> Iterator[Measurement]:
        """Yield the measured positions in order.

        Args:
            on_progress: called with (tokens done, N) after every segment, once its measurements
                have been consumed: the state can be saved there (`state_dict`).
        """
        from quantlab.models import forward_hidden, head, replaced

        while self.done < self.last:
            with self._ready(), replaced(self.m, self._handle):
                if self._cache is None:
                    self._prefill()
                start, stop = self.done, min(self.done + self.segment, self.last)
                columns = slice(self.prompt + start, self.prompt + stop)
                hidden = forward_hidden(
                    self.m, self._rows(self.tokens[:, columns]), cache=self._cache,
                    start=columns.start,
                )  # fmt: skip
            wanted = self.positions[(self.positions > start) & (self.positions <= stop)]
            diverged = self._diverged()
            size = self._positions_per_chunk()
            for chunk in [wanted[i : i + size] for i in range(0, len(wanted), size)]:
                with self._ready():
                    logits = head(self.m, hidden[:, (chunk - start - 1).to(self.device)])
                yield Measurement(
                    positions=chunk,
                    logits=logits.view(len(self.policies), self.streams, *logits.shape[1:]),
                    targets=self.tokens[:, (self.prompt + chunk).to(self.device)],
                    diverged_at=diverged,
                )
                del logits
            self.done = stop
            if on_progress is not None:
                on_progress(self.done, self.last)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that later segments depend on, between two segments (see `run`)."""
        tensors = {"done": torch.tensor(self.done)}
        for layer, scan in enumerate(self._scans):
            for name, value in scan.state_dict().items():
                tensors[f"scan.{layer}.{name}"] = value
        for index, layer_cache in enumerate(self._cache.layers):
            for name in ("keys", "values"):
                if isinstance(getattr(layer_cache, name, None), Tensor):
                    tensors[f"cache.{index}.{name}"] = getattr(layer_cache, name)
            for slot, conv in conv_states(layer_cache):
                tensors[f"cache.{index}.conv.{slot}"] = conv
        return tensors

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict` of an equal batch.

        The prompt is consumed once more, which builds transformers' cache in whatever shape the
        installed version has; then its tensors are replaced.
        """
        from quantlab.models import replaced

        with self._ready(), replaced(self.m, self._handle):
            self._prefill()
            for layer, scan in enumerate(self._scans):
                prefix = f"scan.{layer}."
                scan.load_state_dict(
                    {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
                )
            for index, layer_cache in enumerate(self._cache.layers):
                for name in ("keys", "values"):
                    if f"cache.{index}.{name}" in tensors:
                        saved = tensors[f"cache.{index}.{name}"].to(self.device)
                        setattr(layer_cache, name, saved)
                for slot, conv in conv_states(layer_cache):
                    conv.copy_(tensors[f"cache.{index}.conv.{slot}"])
        self.done = int(tensors["done"])

    def _ready(self) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode())
        stack.enter_context(full_fp32())
        stack.enter_context(lower_right(self.m.model))
        return stack

    def _rows(self, tokens: Tensor) -> Tensor:
        """Repeat [streams, T] for every policy: row = policy · streams + stream."""
        return tokens.repeat(len(self.policies), 1)

    def _prefill(self) -> None:
        from quantlab.models import forward_hidden, new_cache

        self._cache = new_cache(self.m)
        self._prefilling = True
        try:
            prompt = self._rows(self.tokens[:, : self.prompt])
            forward_hidden(self.m, prompt, cache=self._cache, start=0)
        finally:
            self._prefilling = False

    def _handle(self, call: OpCall) -> tuple[Tensor, Tensor | None]:
        scan = self._scans[call.layer]
        out = scan.prefill(call.inputs) if self._prefilling else scan(call.inputs)
        return out, None  # the scan keeps the state, not transformers' cache

    def _diverged(self) -> Tensor:
        """First non-finite position over the layers, [policies, streams], -1 for none."""
        at = torch.stack([scan.diverged_at for scan in self._scans])
        never = torch.iinfo(torch.int64).max
        first = torch.where(at < 0, never, at).amin(0)
        first = torch.where(first == never, -1, first)
        return first.view(len(self.policies), self.streams).cpu()

    def _positions_per_chunk(self) -> int:
        rows = len(self.policies) * self.streams
        return max(1, LOGIT_BYTES // (LOGIT_COPIES * 4 * rows * self.m.vocab_size))


def require_parts(m: LoadedModel, policies: Sequence[Policy]) -> None:
    """Check that a model has the layers and heads that policies name.

    Raises:
        PartError: it does not.
    """
    for policy in policies:
        if policy.part is not None:
            policy.part.require([heads for heads, _, _ in m.recurrent_shapes])


def scan_class(engine: Engine, device: torch.device) -> type[Any]:
    """Name the scan an engine uses on a device."""
    if engine == "stepwise":
        from quantlab.replay import StepwiseCache

        return StepwiseCache
    from quantlab import dispatch

    scan: type[Any] = dispatch.scan_class(device)
    return scan


def conv_states(layer_cache: Any) -> list[tuple[int, Tensor]]:
    """(slot, tensor) of the convolution states a cache layer holds; a dict or a list by version."""
    states = getattr(layer_cache, "conv_states", None)
    if states is None:
        return []
    items = states.items() if isinstance(states, dict) else enumerate(states)
    return [(slot, s) for slot, s in items if isinstance(s, Tensor)]
